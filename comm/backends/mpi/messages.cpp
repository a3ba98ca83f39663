#include "comm/backends/mpi/messages.h"

#include <algorithm>

#include "comm/backends/mpi/session.h"
#include "comm/core/error.h"

namespace rz::mpi {

namespace {

constexpr int tag_of_headers = 1, tag_of_bytes = 2;

bool all_done(std::vector<MPI_Request>& requests) {
  int done = 0;
  check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
  return done != 0;
}

}  // namespace

Messages::Messages(MPI_Comm comm, int rank, int size, std::size_t most_bytes)
    : comm_(comm), rank_(rank), most_bytes_(most_bytes), links_(static_cast<std::size_t>(size)) {}

void Messages::add(const Operation& op, std::shared_ptr<Job> job) {
  Link& link = links_[static_cast<std::size_t>(op.root)];
  const bool sends = op.kind == Collective::send;
  const std::size_t count = sends ? op.in.count : op.out.count;
  const DType dtype = sends ? op.in.dtype : op.out.dtype;
  Message& m = (sends ? link.sends : link.receives).emplace_back();
  m.job = std::move(job);
  m.data = static_cast<std::byte*>(sends ? const_cast<void*>(op.in.data) : op.out.data);
  m.bytes = count * size_of(dtype);
  m.header = {sends ? link.sends_made++ : link.receives_made++, count, static_cast<std::uint64_t>(dtype)};
  ++pending_;
}

void Messages::post_pieces(int peer, Message& m, bool sending) {
  for (std::size_t begin = 0; begin < m.bytes; begin += most_bytes_) {
    const int n = static_cast<int>(std::min(most_bytes_, m.bytes - begin));
    MPI_Request& request = m.requests.emplace_back(MPI_REQUEST_NULL);
    if (sending)
      check(MPI_Isend(m.data + begin, n, MPI_BYTE, peer, tag_of_bytes, comm_, &request), "MPI_Isend");
    else
      check(MPI_Irecv(m.data + begin, n, MPI_BYTE, peer, tag_of_bytes, comm_, &request), "MPI_Irecv");
  }
}

bool Messages::advance(const Ended& ended) {
  if (pending_ == 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    moved |= advance_sends(static_cast<int>(i), links_[i], ended);
    moved |= advance_receives(static_cast<int>(i), links_[i], ended);
  }
  return moved;
}

bool Messages::advance_sends(int peer, Link& link, const Ended& ended) {
  bool moved = false;
  for (Message& m : link.sends) {
    if (m.posted) continue;
    MPI_Request& request = m.requests.emplace_back(MPI_REQUEST_NULL);
    check(MPI_Isend(&m.header, sizeof m.header, MPI_BYTE, peer, tag_of_headers, comm_, &request),
          "MPI_Isend");
    m.posted = moved = true;
    post_pieces(peer, m, true);
  }
  while (!link.sends.empty() && all_done(link.sends.front().requests)) {
    const auto job = std::move(link.sends.front().job);
    link.sends.pop_front();
    ++link.sends_ended;
    --pending_;
    ended(*job);
    moved = true;
  }
  return moved;
}

void Messages::compare(int peer, const Message& m) const {
  require(m.theirs == m.header, Errc::mismatch, "mismatched messages: rank ", peer, " sent message #",
          m.theirs.sequence, " of ", m.theirs.count, " ", name(static_cast<DType>(m.theirs.dtype)), ", rank ",
          rank_, " expects message #", m.header.sequence, " of ", m.header.count, " ",
          name(static_cast<DType>(m.header.dtype)));
}

// One at a time, so that bytes are not asked for before it is known that they are the right ones.
bool Messages::advance_receives(int peer, Link& link, const Ended& ended) {
  bool moved = false;
  while (!link.receives.empty()) {
    Message& m = link.receives.front();
    if (!m.posted) {
      MPI_Request& request = m.requests.emplace_back(MPI_REQUEST_NULL);
      check(MPI_Irecv(&m.theirs, sizeof m.theirs, MPI_BYTE, peer, tag_of_headers, comm_, &request),
            "MPI_Irecv");
      m.posted = true;
    }
    if (!all_done(m.requests)) break;
    moved = true;
    if (!m.moving) {
      compare(peer, m);
      m.moving = true;
      m.requests.clear();
      post_pieces(peer, m, false);
      continue;
    }
    const auto job = std::move(m.job);
    link.receives.pop_front();
    ++link.receives_ended;
    --pending_;
    ended(*job);
  }
  return moved;
}

Messages::Overdue Messages::oldest() const {
  Overdue oldest;
  for (std::size_t i = 0; i < links_.size(); ++i)
    for (const auto* queue : {&links_[i].receives, &links_[i].sends})
      for (const Message& m : *queue)
        if (!oldest.job || m.job->deadline < oldest.job->deadline)
          oldest = {m.job.get(), static_cast<int>(i), queue == &links_[i].sends};
  return oldest;
}

bool Messages::in_vain(int peer, std::uint64_t peer_sent, std::uint64_t peer_received) const {
  const Link& l = link(peer);
  return l.sends_made > peer_received || l.receives_made > peer_sent;
}

void Messages::give_up(const Ended& ended) {
  for (Link& link : links_)
    for (auto* queue : {&link.receives, &link.sends})
      for (Message& m : *queue) {
        if (queue == &link.receives)
          for (MPI_Request& request : m.requests)
            if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
        ended(*m.job);
      }
  if (pending_ > 0) new std::vector<Link>(std::move(links_));
  links_.clear();
  pending_ = 0;
}

}  // namespace rz::mpi
