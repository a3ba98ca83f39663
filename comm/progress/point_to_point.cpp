#include "comm/progress/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"

namespace rz {

PointToPoint::PointToPoint(Transport& transport, int rank, int size)
    : transport_(transport), rank_(rank), peers_(static_cast<std::size_t>(size)) {}

void PointToPoint::add(const CollectiveCall& op, void* tag) {
  PeerQueues& link = peers_[static_cast<std::size_t>(op.root)];
  const bool sends = op.kind == Collective::send;
  const std::size_t count = sends ? op.in.count : op.out.count;
  const DType dtype = sends ? op.in.dtype : op.out.dtype;
  void* data = sends ? const_cast<void*>(op.in.data) : op.out.data;
  Message m{.tag = tag, .data = static_cast<std::byte*>(data), .bytes = count * size_of(dtype)};
  m.signature = {.sequence = sends ? link.send_sequence++ : link.receive_sequence++,
                 .count = count,
                 .kind = Collective::send,
                 .dtype = dtype};
  (sends ? link.sends : link.receives).push_back(m);
  ++pending_;
}

bool PointToPoint::advance() {
  if (pending_ == 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int peer = static_cast<int>(i);
    if (peer == rank_) {
      moved |= advance_self(peers_[i]);
      continue;
    }
    moved |= advance_sends(peer, peers_[i]);
    moved |= advance_receives(peer, peers_[i]);
  }
  return moved;
}

void PointToPoint::finish(std::deque<Message>& queue) {
  finished_.push_back(queue.front().tag);
  queue.pop_front();
  --pending_;
}

bool PointToPoint::advance_sends(int peer, PeerQueues& link) {
  bool moved = false;
  while (link.posting < link.sends.size()) {
    Message& m = link.sends[link.posting];
    if (m.bytes > 0) {
      const std::size_t n =
          transport_.post(peer, Channel::point_to_point, m.signature, {m.data + m.done, m.bytes - m.done});
      moved |= n > 0;
      m.done += n;
      link.posted += n;
    }
    if (m.done < m.bytes) break;
    m.stream_end = link.posted;
    ++link.posting;
  }
  while (link.posting > 0 &&
         (link.sends.front().bytes == 0 ||
          transport_.released(peer, Channel::point_to_point) >= link.sends.front().stream_end)) {
    --link.posting;
    finish(link.sends);
    moved = true;
  }
  return moved;
}

void PointToPoint::check(int peer, Message& m, const CallSignature& theirs) const {
  require(theirs == m.signature, Errc::mismatch, "mismatched messages: rank ", peer, " sent message #",
          theirs.sequence, " of ", theirs.count, " ", name(theirs.dtype), ", rank ", rank_,
          " expects message #", m.signature.sequence, " of ", m.signature.count, " ",
          name(m.signature.dtype));
  m.signature_checked = true;
}

bool PointToPoint::advance_receives(int peer, PeerQueues& link) {
  bool moved = false;
  while (!link.receives.empty()) {
    Message& m = link.receives.front();
    if (m.bytes > 0 && !m.signature_checked) {
      const ReceiveView incoming = transport_.peek(peer, Channel::point_to_point);
      if (incoming.bytes.empty()) break;
      check(peer, m, incoming.signature);
    }
    while (m.done < m.bytes) {
      const std::size_t n =
          transport_.receive(peer, Channel::point_to_point, {m.data + m.done, m.bytes - m.done});
      if (n == 0) break;
      m.done += n;
      moved = true;
    }
    if (m.done < m.bytes) break;
    finish(link.receives);
    moved = true;
  }
  return moved;
}

bool PointToPoint::advance_self(PeerQueues& link) {
  bool moved = false;
  while (!link.sends.empty() && !link.receives.empty()) {
    const Message& from = link.sends.front();
    Message& to = link.receives.front();
    check(rank_, to, from.signature);
    if (from.bytes > 0) std::memmove(to.data, from.data, from.bytes);
    finish(link.sends);
    finish(link.receives);
    moved = true;
  }
  return moved;
}

bool PointToPoint::contains(const std::deque<Message>& queue, const void* tag) {
  return std::any_of(queue.begin(), queue.end(), [&](const Message& m) { return m.tag == tag; });
}

WaitState PointToPoint::waiting_on(const void* tag) const {
  WaitState state;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const bool receives = contains(peers_[i].receives, tag), sends = contains(peers_[i].sends, tag);
    if (!receives && !sends) continue;
    if (i < state.waiting_on.size()) state.waiting_on.set(i);
    if (state.suspect < 0) state.suspect = static_cast<int>(i);
    if (receives) state.text += concat(state.text.empty() ? "" : ", ", "rank ", i, " to send");
    if (sends) state.text += concat(state.text.empty() ? "" : ", ", "rank ", i, " to receive");
  }
  return state;
}

void PointToPoint::clear() {
  for (PeerQueues& link : peers_) link.sends.clear(), link.receives.clear(), link.posting = 0;
  pending_ = 0;
}

}  // namespace rz
