#include "comm/transport/tcp/tcp_channel.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::tcp {

namespace {

/// Limit of one receive(), so that a fast peer does not starve the others.
constexpr std::size_t max_receive_bytes = 1 << 20;

}  // namespace

// ---- sending ----

/// A socket that can start a frame, or null. Striped posts use the sockets in turn.
DataSocket* TcpChannel::free_socket(bool striped) {
  const std::size_t n = striped ? sockets_.size() : 1;
  for (std::size_t i = 0; i < n; ++i) {
    DataSocket& s = sockets_[striped ? (next_socket_ + i) % n : 0];
    if (!s.ready_to_send()) continue;
    if (striped) next_socket_ = (next_socket_ + i + 1) % n;
    return &s;
  }
  return nullptr;
}

std::size_t TcpChannel::post(const CallSignature& signature, std::span<const std::byte> bytes) {
  const bool striped = bytes.size() >= max_frame_bytes;
  std::size_t taken = 0;
  while (taken < bytes.size()) {
    DataSocket* s = free_socket(striped);
    if (!s) break;
    FrameHeader header;
    header.length = static_cast<std::uint32_t>(std::min(bytes.size() - taken, max_frame_bytes));
    header.offset = accepted_;
    header.signature = signature;
    if (!s->send(header, bytes.data() + taken)) continue;
    taken += header.length;
    accepted_ += header.length;
  }
  return taken;
}

std::uint64_t TcpChannel::released() const {
  std::uint64_t released = accepted_;
  for (const DataSocket& s : sockets_) released = std::min(released, s.released(accepted_));
  return released;
}

// ---- receiving ----

bool TcpChannel::has_front(DataSocket& s) {
  if (s.has_front()) return true;
  if (!s.next_frame(peeked_)) return false;
  const FrameHeader& f = s.front();
  if (f.magic == frame_magic && f.length > 0 && f.length <= max_frame_bytes && f.offset >= consumed_)
    return true;
  report_damaged(f);
  s.reject_front();
  return false;
}

void TcpChannel::report_damaged(const FrameHeader& f) {
  monitor_.report({peer_, Errc::peer_lost,
                   concat("rank ", peer_, " sent a damaged frame: magic ", f.magic, ", length ", f.length,
                          ", offset ", f.offset, " where ", consumed_, " was due")});
}

/// The socket whose front frame continues the stream, or null. Each socket's frames are in stream order, so
/// the next one is at the front of some socket.
DataSocket* TcpChannel::front_socket() {
  if (front_) return front_;
  bool all_later = true;
  for (DataSocket& s : sockets_) {
    const bool has = has_front(s);
    if (has && s.front().offset == consumed_) return front_ = &s;
    all_later &= has;
  }
  if (all_later) report_damaged(sockets_.front().front());
  return nullptr;
}

ReceiveView TcpChannel::peek() {
  DataSocket* s = front_socket();
  if (!s) return {};
  return {s->front().signature, s->peek()};
}

void TcpChannel::advance(DataSocket& s, std::size_t bytes) {
  consumed_ += bytes;
  if (!s.has_front()) front_ = nullptr;
}

void TcpChannel::consume(std::size_t bytes) {
  if (bytes == 0) return;
  require(front_ && bytes <= front_->buffered() && bytes <= front_->remaining(), Errc::invalid_argument,
          "consume(", bytes, ") of more than peek() showed from rank ", peer_);
  front_->consume(bytes);
  peeked_ = true;
  advance(*front_, bytes);
}

std::size_t TcpChannel::receive(std::span<std::byte> into) {
  into = into.first(std::min(into.size(), max_receive_bytes));
  std::size_t done = 0;
  CallSignature signature;
  peeked_ = false;
  while (done < into.size()) {
    DataSocket* s = front_socket();
    if (!s || (done && s->front().signature != signature)) break;
    signature = s->front().signature;
    const std::size_t n = s->receive(into.subspan(done, std::min(into.size() - done, s->remaining())));
    if (n == 0) break;
    advance(*s, n);
    done += n;
  }
  return done;
}

bool TcpChannel::at_end() const {
  if (front_) return front_->read_closed();
  return std::all_of(sockets_.begin(), sockets_.end(), [](const DataSocket& s) { return s.read_closed(); });
}

std::string TcpChannel::error() const {
  for (const DataSocket& s : sockets_)
    if (std::string error = s.error(); !error.empty()) return error;
  return "";
}

int TcpChannel::error_number() const {
  for (const DataSocket& s : sockets_)
    if (const int error = s.error_number()) return error;
  return 0;
}

bool TcpChannel::ended() const {
  return std::any_of(sockets_.begin(), sockets_.end(), [](const DataSocket& s) { return s.ended(); });
}

}  // namespace rz::tcp
