#include "comm/backends/mpi/verified_collectives.h"

#include <algorithm>

#include "comm/backends/mpi/mpi_runtime.h"

namespace rz::mpi {

namespace {

constexpr std::size_t max_agreements_ahead = 8;  // verifications in flight
constexpr std::size_t max_remembered_calls = 8;  // calls that have ended, to reply to queries

// Distinct calls collide with probability 2^-64.
std::uint64_t signature_hash(const CallSignature& s) {
  std::uint64_t h = 0x9e3779b97f4a7c15u;
  for (const std::uint64_t field :
       {std::uint64_t{s.sequence}, static_cast<std::uint64_t>(s.root), s.count,
        static_cast<std::uint64_t>(s.kind), static_cast<std::uint64_t>(s.dtype),
        static_cast<std::uint64_t>(s.op), static_cast<std::uint64_t>(s.algorithm)}) {
    h = (h ^ field) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
  }
  return h;
}

}  // namespace

void VerifiedCollectives::add(const std::shared_ptr<Request>& request, const CollectiveCall& call) {
  Call& added = queue_.emplace_back();
  added.request = request;
  added.call = &call;
  added.signature = {.sequence = next_sequence_++,
                     .root = call.root,
                     .count = count_per_rank(call, context_.size),
                     .kind = call.kind,
                     .dtype = call.dtype(),
                     .op = call.op.kind,
                     .algorithm = uses_messages(call)};
}

// All ranks post the verifications in the same order, that of their calls.
void VerifiedCollectives::propose() {
  for (std::size_t i = 0; i < std::min(queue_.size(), max_agreements_ahead); ++i) {
    Call& call = queue_[i];
    if (call.proposed) continue;
    call.proposal[0] = signature_hash(call.signature);
    call.proposal[1] = ~call.proposal[0];
    check(MPI_Iallreduce(call.proposal, call.reduced, 2, MPI_UINT64_T, MPI_MAX, control_,
                         &call.agreement_request),
          "MPI_Iallreduce");
    call.proposed = true;
  }
}

bool VerifiedCollectives::advance(std::vector<Request*>& ended) {
  if (queue_.empty()) return false;
  propose();
  Call& call = queue_.front();
  if (!call.started) {
    if (!is_agreed(call)) return false;
    call.stages = plan_stages(*call.call, context_, operators_);
    call.started = true;
    if (!call.stages.empty()) call.stages[0].post(call.mpi_requests);
  }
  if (!advance_stages(call)) return false;
  recent_.push_back(call.signature);
  if (recent_.size() > max_remembered_calls) recent_.pop_front();
  ended.push_back(call.request.get());
  queue_.pop_front();
  return true;
}

bool VerifiedCollectives::is_agreed(Call& call) {
  int done = 0;
  check(MPI_Test(&call.agreement_request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (!done) return false;
  call.differs = call.reduced[0] != ~call.reduced[1];
  return !call.differs;
}

bool VerifiedCollectives::advance_stages(Call& call) {
  for (; call.stage_index < call.stages.size(); ++call.stage_index) {
    int done = 0;
    check(MPI_Testall(static_cast<int>(call.mpi_requests.size()), call.mpi_requests.data(), &done,
                      MPI_STATUSES_IGNORE),
          "MPI_Testall");
    if (!done) return false;
    if (const auto& finish = call.stages[call.stage_index].finish) finish();
    call.mpi_requests.clear();
    if (call.stage_index + 1 < call.stages.size()) call.stages[call.stage_index + 1].post(call.mpi_requests);
  }
  return true;
}

std::optional<CallSignature> VerifiedCollectives::find(std::uint32_t sequence) const {
  for (const CallSignature& signature : recent_)
    if (signature.sequence == sequence) return signature;
  for (const Call& call : queue_)
    if (call.signature.sequence == sequence) return call.signature;
  return std::nullopt;
}

void VerifiedCollectives::abandon() {
  operators_.abandon();
  if (!queue_.empty()) new std::deque<Call>(std::move(queue_));
  queue_.clear();
}

}  // namespace rz::mpi
