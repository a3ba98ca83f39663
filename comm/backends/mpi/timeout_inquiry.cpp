#include "comm/backends/mpi/timeout_inquiry.h"

#include "comm/core/error.h"
#include "comm/transport/call_signature.h"

namespace rz::mpi {

namespace {

constexpr auto inquiry_timeout = std::chrono::seconds(1);  // idle ranks reply within their idle poll

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i ? ", " : " ", ranks[i]);
  return text;
}

void fail_timeout(const std::string& operation, int rank, std::chrono::milliseconds timeout,
                  const std::string& reason, int culprit) {
  throw Error(
      Errc::timeout,
      concat(operation, " did not end within ", std::chrono::duration<double>(timeout).count(), " s on rank ",
             rank, ": ", reason, "; a rank may be stuck, or slower than the timeout allows"),
      culprit);
}

TimeoutInquiry::TimeoutInquiry(ControlChannel& control, int rank, int size, const CallSignature& mine)
    : rank_(rank),
      mine_(mine),
      until_(std::chrono::steady_clock::now() + inquiry_timeout),
      replies_(static_cast<std::size_t>(size)),
      pending_(size - 1) {
  control.broadcast({.kind = ControlMessage::query, .sequence = mine.sequence});
}

void TimeoutInquiry::receive(int peer, const ControlMessage& reply) {
  auto& known = replies_[static_cast<std::size_t>(peer)];
  if (reply.sequence != mine_.sequence || known) return;
  known = reply;
  --pending_;
}

TimeoutInquiry::Result TimeoutInquiry::result() const {
  std::vector<int> unresponsive, late;
  Result result{CallsOfRanks(replies_.size()), "", -1};
  auto& [calls, reason, culprit] = result;
  calls[static_cast<std::size_t>(rank_)] = mine_;
  for (int peer = 0; peer < static_cast<int>(replies_.size()); ++peer) {
    if (peer == rank_) continue;
    const auto& reply = replies_[static_cast<std::size_t>(peer)];
    if (!reply) {
      unresponsive.push_back(peer);
    } else if (!reply->found && reply->calls <= mine_.sequence) {
      late.push_back(peer);
    } else if (reply->found) {
      calls[static_cast<std::size_t>(peer)] = reply->signature;
    }
  }
  if (!late.empty()) reason = ranks_text(late) + " did not call it";
  if (!unresponsive.empty())
    reason += concat(reason.empty() ? "" : ", and ", ranks_text(unresponsive), " sent no reply");
  if (const int other = rank_that_differs(calls, mine_); other >= 0)
    reason = concat("rank ", other, " called ", describe(*calls[static_cast<std::size_t>(other)]));
  if (reason.empty()) reason = "every rank called it, but MPI did not end it";
  culprit = !late.empty() ? late[0] : !unresponsive.empty() ? unresponsive[0] : -1;
  return result;
}

void TimeoutInquiry::conclude(std::chrono::milliseconds timeout) const {
  const auto [calls, reason, culprit] = result();
  if (rank_that_differs(calls, mine_) >= 0) fail_mismatched(calls, rank_);
  fail_timeout(describe(mine_), rank_, timeout, reason, culprit);
}

}  // namespace rz::mpi
