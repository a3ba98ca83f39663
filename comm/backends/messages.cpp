#include "comm/backends/messages.h"

#include <algorithm>
#include <cstring>

#include "comm/backends/execution.h"
#include "comm/core/error.h"

namespace rz {

Messages::Messages(Transport& transport, int rank, int size)
    : transport_(transport), rank_(rank), links_(static_cast<std::size_t>(size)) {}

void Messages::add(const Operation& op, void* tag) {
  Link& link = links_[static_cast<std::size_t>(op.root)];
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

bool Messages::advance() {
  if (pending_ == 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    const int peer = static_cast<int>(i);
    if (peer == rank_) {
      moved |= advance_self(links_[i]);
      continue;
    }
    moved |= advance_sends(peer, links_[i]);
    moved |= advance_receives(peer, links_[i]);
  }
  return moved;
}

void Messages::finish(std::deque<Message>& queue) {
  finished_.push_back(queue.front().tag);
  queue.pop_front();
  --pending_;
}

bool Messages::advance_sends(int peer, Link& link) {
  bool moved = false;
  while (link.posting < link.sends.size()) {
    Message& m = link.sends[link.posting];
    if (m.bytes > 0) {
      const std::size_t n =
          transport_.post(peer, Lane::point_to_point, m.signature, {m.data + m.done, m.bytes - m.done});
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
          transport_.released(peer, Lane::point_to_point) >= link.sends.front().stream_end)) {
    --link.posting;
    finish(link.sends);
    moved = true;
  }
  return moved;
}

void Messages::check(int peer, Message& m, const Signature& theirs) const {
  require(theirs == m.signature, Errc::mismatch, "mismatched messages: rank ", peer, " sent message #",
          theirs.sequence, " of ", theirs.count, " ", name(theirs.dtype), ", rank ", rank_,
          " expects message #", m.signature.sequence, " of ", m.signature.count, " ",
          name(m.signature.dtype));
  m.greeted = true;
}

bool Messages::advance_receives(int peer, Link& link) {
  bool moved = false;
  while (!link.receives.empty()) {
    Message& m = link.receives.front();
    if (m.bytes > 0 && !m.greeted) {
      const Incoming incoming = transport_.peek(peer, Lane::point_to_point);
      if (incoming.bytes.empty()) break;
      check(peer, m, incoming.signature);
    }
    while (m.done < m.bytes) {
      const std::size_t n =
          transport_.receive(peer, Lane::point_to_point, {m.data + m.done, m.bytes - m.done});
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

bool Messages::advance_self(Link& link) {
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

bool Messages::holds(const std::deque<Message>& queue, const void* tag) {
  return std::any_of(queue.begin(), queue.end(), [&](const Message& m) { return m.tag == tag; });
}

RankSet Messages::debtors(const void* tag) const {
  RankSet all;
  for (std::size_t i = 0; i < std::min(links_.size(), all.size()); ++i)
    all[i] = holds(links_[i].receives, tag) || holds(links_[i].sends, tag);
  return all;
}

int Messages::culprit(const void* tag) const {
  for (std::size_t i = 0; i < links_.size(); ++i)
    if (holds(links_[i].receives, tag) || holds(links_[i].sends, tag)) return static_cast<int>(i);
  return -1;
}

std::string Messages::waiting_for(const void* tag) const {
  std::string out;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (holds(links_[i].receives, tag)) out += str(out.empty() ? "" : ", ", "rank ", i, " to send");
    if (holds(links_[i].sends, tag)) out += str(out.empty() ? "" : ", ", "rank ", i, " to receive");
  }
  return out;
}

void Messages::clear() {
  for (Link& link : links_) link.sends.clear(), link.receives.clear(), link.posting = 0;
  pending_ = 0;
}

}  // namespace rz
