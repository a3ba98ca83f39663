#include "comm/backends/mpi/point_to_point.h"

#include <algorithm>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/core/error.h"

namespace rz::mpi {

namespace {

constexpr int header_tag = 1, data_tag = 2;

bool all_done(std::vector<MPI_Request>& requests) {
  int done = 0;
  check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
  return done != 0;
}

}  // namespace

MpiPointToPoint::MpiPointToPoint(MPI_Comm comm, int rank, int size, std::size_t max_call_bytes)
    : comm_(comm), rank_(rank), max_call_bytes_(max_call_bytes), queues_(static_cast<std::size_t>(size)) {}

void MpiPointToPoint::add(const CollectiveCall& op, Request* request) {
  PeerQueues& queues = queues_[static_cast<std::size_t>(op.root)];
  const bool sends = op.kind == Collective::send;
  const std::size_t count = sends ? op.in.count : op.out.count;
  const DType dtype = sends ? op.in.dtype : op.out.dtype;
  Message& m = (sends ? queues.sends : queues.receives).emplace_back();
  m.request = request;
  m.data = static_cast<std::byte*>(sends ? const_cast<void*>(op.in.data) : op.out.data);
  m.bytes = count * size_of(dtype);
  m.header = {sends ? queues.sends_added++ : queues.receives_added++, count,
              static_cast<std::uint64_t>(dtype)};
  ++pending_;
}

void MpiPointToPoint::post_chunks(int peer, Message& m, bool sending) {
  for (std::size_t begin = 0; begin < m.bytes; begin += max_call_bytes_) {
    const int n = static_cast<int>(std::min(max_call_bytes_, m.bytes - begin));
    MPI_Request& request = m.mpi_requests.emplace_back(MPI_REQUEST_NULL);
    if (sending)
      check(MPI_Isend(m.data + begin, n, MPI_BYTE, peer, data_tag, comm_, &request), "MPI_Isend");
    else
      check(MPI_Irecv(m.data + begin, n, MPI_BYTE, peer, data_tag, comm_, &request), "MPI_Irecv");
  }
}

bool MpiPointToPoint::advance(std::vector<Request*>& ended) {
  if (pending_ == 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    moved |= advance_sends(static_cast<int>(i), queues_[i], ended);
    moved |= advance_receives(static_cast<int>(i), queues_[i], ended);
  }
  return moved;
}

bool MpiPointToPoint::advance_sends(int peer, PeerQueues& queues, std::vector<Request*>& ended) {
  bool moved = false;
  for (Message& m : queues.sends) {
    if (m.posted) continue;
    MPI_Request& request = m.mpi_requests.emplace_back(MPI_REQUEST_NULL);
    check(MPI_Isend(&m.header, sizeof m.header, MPI_BYTE, peer, header_tag, comm_, &request), "MPI_Isend");
    m.posted = moved = true;
    post_chunks(peer, m, true);
  }
  while (!queues.sends.empty() && all_done(queues.sends.front().mpi_requests)) {
    ended.push_back(queues.sends.front().request);
    queues.sends.pop_front();
    ++queues.sends_completed;
    --pending_;
    moved = true;
  }
  return moved;
}

void MpiPointToPoint::check_header(int peer, const Message& m) const {
  require(m.received_header == m.header, Errc::mismatch, "mismatched messages: rank ", peer,
          " sent message #", m.received_header.sequence, " of ", m.received_header.count, " ",
          name(static_cast<DType>(m.received_header.dtype)), ", rank ", rank_, " expects message #",
          m.header.sequence, " of ", m.header.count, " ", name(static_cast<DType>(m.header.dtype)));
}

// One message at a time: its bytes are received only after its header has been checked.
bool MpiPointToPoint::advance_receives(int peer, PeerQueues& queues, std::vector<Request*>& ended) {
  bool moved = false;
  while (!queues.receives.empty()) {
    Message& m = queues.receives.front();
    if (!m.posted) {
      MPI_Request& request = m.mpi_requests.emplace_back(MPI_REQUEST_NULL);
      check(MPI_Irecv(&m.received_header, sizeof m.received_header, MPI_BYTE, peer, header_tag, comm_,
                      &request),
            "MPI_Irecv");
      m.posted = true;
    }
    if (!all_done(m.mpi_requests)) break;
    moved = true;
    if (!m.transferring) {
      check_header(peer, m);
      m.transferring = true;
      m.mpi_requests.clear();
      post_chunks(peer, m, false);
      continue;
    }
    ended.push_back(m.request);
    queues.receives.pop_front();
    ++queues.receives_completed;
    --pending_;
  }
  return moved;
}

MpiPointToPoint::Overdue MpiPointToPoint::earliest_deadline() const {
  Overdue oldest;
  for (std::size_t i = 0; i < queues_.size(); ++i)
    for (const auto* queue : {&queues_[i].receives, &queues_[i].sends})
      for (const Message& m : *queue)
        if (!oldest.request || m.request->deadline < oldest.request->deadline)
          oldest = {m.request, static_cast<int>(i), queue == &queues_[i].sends};
  return oldest;
}

bool MpiPointToPoint::can_never_complete(int peer, std::uint64_t peer_sent,
                                         std::uint64_t peer_received) const {
  const PeerQueues& l = queues_of(peer);
  return l.sends_added > peer_received || l.receives_added > peer_sent;
}

void MpiPointToPoint::abandon(bool open) {
  for (PeerQueues& queues : queues_)
    for (Message& m : queues.receives)
      for (MPI_Request& request : m.mpi_requests)
        if (open && request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  if (pending_ > 0) new std::vector<PeerQueues>(std::move(queues_));
  queues_.clear();
  pending_ = 0;
}

}  // namespace rz::mpi
