#include "comm/transport/tcp/control_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "comm/net/socket.h"

namespace rz::tcp {

void ControlSocket::open(net::Stream stream, net::Poller& poller, std::chrono::milliseconds max_silence) {
  stream_ = std::move(stream);
  net::limit_unacknowledged(stream_.fd(), max_silence);
  fd_events_.events = EPOLLIN;  // data may have arrived before the registration
  poller.add(stream_.fd(), fd_events_, EPOLLIN);
}

void ControlSocket::close(net::Poller& poller) {
  if (!stream_) return;
  send(ControlFrame{}, true);
  poller.remove(stream_.fd());
  shutdown(stream_.fd(), SHUT_WR);
  stream_.close();
}

// ---- receiving ----

ssize_t ControlSocket::receive_some() {
  std::byte* const to = partial_.data() + partial_bytes_;
  const std::size_t size = partial_.size() - partial_bytes_;
  if (!stream_.encrypted()) return stream_.receive(to, size);
  const std::lock_guard lock(mutex_);
  return stream_.receive(to, size);
}

/// False if no whole frame has arrived.
bool ControlSocket::receive(ControlFrame& frame) {
  while (partial_bytes_ < partial_.size()) {
    const ssize_t n = receive_some();
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n < 0) note_error();
    if (n <= 0) return closed_ = true, false;
    partial_bytes_ += static_cast<std::size_t>(n);
  }
  partial_bytes_ = 0;
  std::memcpy(&frame, partial_.data(), sizeof frame);
  closed_ = frame.magic != control_magic;
  return !closed_;
}

std::optional<Failure> ControlSocket::read(int peer, WaitForGraph& graph) {
  std::optional<Failure> failure;
  if (!fd_events_.events || closed_) return failure;
  fd_events_.events = 0;
  for (ControlFrame frame; receive(frame);) {
    store(peer, frame, graph);
    if (frame.kind == ControlFrame::failure && !failure)
      failure = Failure{frame.culprit, static_cast<Errc>(frame.code),
                        std::string(frame.reason, strnlen(frame.reason, sizeof frame.reason)), frame.calls};
  }
  return failure;
}

void ControlSocket::store(int peer, const ControlFrame& frame, WaitForGraph& graph) {
  if (frame.kind == ControlFrame::departure) departed_ = true;
  if (frame.kind == ControlFrame::beat) ++beats_;
  if (frame.kind == ControlFrame::failure && static_cast<Errc>(frame.code) == Errc::cancelled)
    cancelled_after_ = std::min(frame.calls, cancelled_after_.value_or(frame.calls));
  if (frame.kind == ControlFrame::wait_query) {
    WaitMessage query{.kind = WaitMessage::query};
    std::memcpy(&query.number, frame.reason, sizeof query.number);
    graph.receive(peer, query);
  }
  if (frame.kind == ControlFrame::wait_reply || frame.kind == ControlFrame::wait_idle ||
      frame.kind == ControlFrame::wait_elsewhere) {
    WaitReply reply;
    std::memcpy(&reply, frame.reason, sizeof reply);
    WaitMessage message{.kind = frame.kind == ControlFrame::wait_reply  ? WaitMessage::reply
                                : frame.kind == ControlFrame::wait_idle ? WaitMessage::idle
                                                                        : WaitMessage::elsewhere,
                        .waits_for = reply.waits_for,
                        .call = reply.call};
    if (reply.has_numbered) message.numbered = reply.numbered;
    graph.receive(peer, message);
  }
}

// ---- sending ----

/// Drops the frame if the socket is full. Only a last word (failure or departure) is queued, behind the rest
/// of at most one other frame.
void ControlSocket::send(const ControlFrame& frame, bool last_word) noexcept {
  const std::lock_guard lock(mutex_);
  flush_locked();
  const std::size_t before = unsent_bytes_;
  if (before && !(last_word && before < sizeof frame)) return;
  std::memcpy(unsent_.data() + before, &frame, sizeof frame);
  unsent_bytes_ = before + sizeof frame;
  flush_locked();
  // No byte of the frame was sent: drop it unless it is a last word.
  if (!before && !last_word && unsent_bytes_ == sizeof frame) unsent_bytes_ = 0;
}

void ControlSocket::flush() noexcept {
  if (!unsent_bytes_ && !unsent_records_) return;
  const std::lock_guard lock(mutex_);
  flush_locked();
}

/// Whichever call finds the error of a socket is the only one.
void ControlSocket::note_error() noexcept {
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && !error_number_) error_number_ = errno;
}

/// Requires mutex_.
void ControlSocket::flush_locked() noexcept {
  if (unsent_records_) {
    unsent_records_ = !stream_.flush();
    if (unsent_records_) note_error();
  }
  const std::size_t bytes = unsent_bytes_;
  if (!bytes) return;
  const ssize_t n = stream_.send(unsent_.data(), bytes);
  unsent_records_ = stream_.unsent() > 0;
  if (n < 0 || unsent_records_) note_error();
  if (n <= 0) return;
  std::memmove(unsent_.data(), unsent_.data() + n, bytes - static_cast<std::size_t>(n));
  unsent_bytes_ = bytes - static_cast<std::size_t>(n);
}

void ControlSocket::send_failure(const Failure& failure) noexcept {
  ControlFrame frame;
  frame.kind = ControlFrame::failure;
  frame.culprit = failure.culprit;
  frame.code = static_cast<std::uint32_t>(failure.code);
  frame.calls = failure.calls;
  failure.reason.copy(frame.reason, sizeof frame.reason - 1);
  send(frame, true);
}

void ControlSocket::send_beat() noexcept {
  ControlFrame frame;
  frame.kind = ControlFrame::beat;
  send(frame, false);
}

void ControlSocket::send_wait_message(const WaitMessage& message) noexcept {
  ControlFrame frame;
  frame.kind = message.kind == WaitMessage::query   ? ControlFrame::wait_query
               : message.kind == WaitMessage::reply ? ControlFrame::wait_reply
               : message.kind == WaitMessage::idle  ? ControlFrame::wait_idle
                                                    : ControlFrame::wait_elsewhere;
  if (message.kind == WaitMessage::query) {
    std::memcpy(frame.reason, &message.number, sizeof message.number);
  } else {
    const WaitReply reply{message.waits_for, message.call, message.numbered.value_or(CallSignature{}),
                          message.numbered.has_value()};
    std::memcpy(frame.reason, &reply, sizeof reply);
  }
  send(frame, false);
}

}  // namespace rz::tcp
