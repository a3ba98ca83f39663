#include "comm/transport/tcp/data_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/net/socket.h"

namespace rz::tcp {

namespace {

/// Size of the first read of a frame: its header, and all of a small frame. The rest of a long frame is read
/// directly into its destination.
constexpr std::size_t first_read_bytes = 4096;
/// Frames of up to this size are assembled in one buffer before they are sent.
constexpr std::size_t coalesce_below = 2048;
constexpr std::size_t buffered_read_bytes = 64 << 10;
constexpr std::size_t read_buffer_bytes = buffered_read_bytes + first_read_bytes;
/// If peek() has fewer bytes than this, it first reads more of the frame from the socket.
constexpr std::size_t min_read = 16 << 10;
/// peek() returns incomplete frames up to a multiple of this, so that no element is split.
constexpr std::size_t element_alignment = 64;
/// Unsent bytes that the kernel queues per socket: enough to keep the network busy. With more, blocks would
/// wait in the queue of one socket while another has already sent the blocks after them.
constexpr int max_unsent_bytes = 256 << 10;

bool socket_would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

void DataSocket::open(net::Stream stream, net::Poller& poller) {
  stream_ = std::move(stream);
  net::limit_unsent(stream_.fd(), max_unsent_bytes);
  fd_events_.events = EPOLLIN | EPOLLOUT;  // data may have arrived before the registration
  poller.add(stream_.fd(), fd_events_, EPOLLIN | EPOLLOUT);
}

void DataSocket::close(net::Poller& poller) {
  if (!stream_) return;
  poller.remove(stream_.fd());
  shutdown(stream_.fd(), SHUT_WR);
  stream_.close();
}

// ---- sending ----

bool DataSocket::ready_to_send() {
  flush();
  return !out_.busy && !write_closed_ && fd_events_.writable();
}

bool DataSocket::send(const FrameHeader& header, const std::byte* payload) {
  out_.header = header;
  out_.payload = payload;
  out_.sent = 0;
  send_some();
  if (out_.sent > 0 || !out_.busy) return true;
  return out_.busy = false;
}

/// Sends the rest of the frame; `busy` is set if some of it remains.
void DataSocket::send_some() {
  const std::size_t total = sizeof(FrameHeader) + out_.header.length;
  out_.busy = true;
  if (write_closed_ || !fd_events_.writable()) return;
  const ssize_t sent = out_.sent == 0 && total <= coalesce_below ? send_small_frame() : send_rest();
  if (sent > 0) out_.sent += static_cast<std::size_t>(sent);
  out_.busy = out_.sent < total || stream_.unsent();
  // An encrypted socket may take bytes and fail to send them.
  const bool failed = (sent < 0 || stream_.unsent()) && !socket_would_block() && errno != EINTR;
  if (failed && !error_number_) error_number_ = errno;
  if (failed && sent < 0) write_closed_ = true;  // see ended()
  // Short write: the socket is full. epoll reports EPOLLOUT once it has space again.
  if (out_.busy && (sent >= 0 || socket_would_block()))
    fd_events_.events &= ~static_cast<std::uint32_t>(EPOLLOUT);
}

/// Sends a small frame as one buffer, which costs the kernel less than two.
ssize_t DataSocket::send_small_frame() {
  std::array<std::byte, coalesce_below> frame;
  std::memcpy(frame.data(), &out_.header, sizeof(FrameHeader));
  std::memcpy(frame.data() + sizeof(FrameHeader), out_.payload, out_.header.length);
  return stream_.send(frame.data(), sizeof(FrameHeader) + out_.header.length);
}

ssize_t DataSocket::send_rest() {
  iovec parts[2];
  int n = 0;
  if (out_.sent < sizeof(FrameHeader))
    parts[n++] = {reinterpret_cast<char*>(&out_.header) + out_.sent, sizeof(FrameHeader) - out_.sent};
  const std::size_t skip = out_.sent > sizeof(FrameHeader) ? out_.sent - sizeof(FrameHeader) : 0;
  parts[n++] = {const_cast<std::byte*>(out_.payload) + skip, out_.header.length - skip};
  return stream_.send({parts, static_cast<std::size_t>(n)});
}

std::uint64_t DataSocket::released(std::uint64_t accepted) const {
  if (!out_.busy) return accepted;
  if (stream_.unsent()) return out_.header.offset;
  return out_.header.offset + (out_.sent > sizeof(FrameHeader) ? out_.sent - sizeof(FrameHeader) : 0);
}

// ---- receiving ----

/// Reads at most `max_bytes` available bytes and appends them to the buffer.
void DataSocket::fill_buffer(std::size_t max_bytes) {
  if (read_closed_ || !fd_events_.readable()) return;
  ReadBuffer& b = buffer_;
  if (!b.bytes) b.bytes = std::make_unique_for_overwrite<std::byte[]>(read_buffer_bytes);
  if (b.begin) {  // only a few bytes remain here
    std::memmove(b.bytes.get(), b.bytes.get() + b.begin, b.end - b.begin);
    b.end -= b.begin, b.begin = 0;
  }
  const iovec part{b.bytes.get() + b.end, std::min(max_bytes, read_buffer_bytes - b.end)};
  b.end += read_into({&part, 1});
}

/// One read; updates fd_events_ and read_closed_.
std::size_t DataSocket::read_into(std::span<const iovec> parts) {
  std::size_t requested = 0;
  for (const iovec& part : parts) requested += part.iov_len;
  const ssize_t n = stream_.receive(parts);
  const bool nothing = n < 0 && socket_would_block();
  const bool failed = n < 0 && !nothing && errno != EINTR;
  if (failed && !error_number_) error_number_ = errno;
  if (n == 0 || failed) read_closed_ = true;
  // Short read: no more is available, and epoll reports EPOLLIN when there is. A hang-up is reported only
  // once, so the bit stays set after it.
  if (nothing ||
      (n > 0 && static_cast<std::size_t>(n) < requested && !fd_events_.hung_up() && !stream_.has_more()))
    fd_events_.events &= ~static_cast<std::uint32_t>(EPOLLIN);
  return n > 0 ? static_cast<std::size_t>(n) : 0;
}

int DataSocket::error_number() const {
  int error = error_number_;
  socklen_t size = sizeof error;
  if (!error && stream_.fd() >= 0) getsockopt(stream_.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

bool DataSocket::next_frame(bool read_ahead) {
  if (buffered() < sizeof(FrameHeader)) fill_buffer(read_ahead ? buffered_read_bytes : first_read_bytes);
  if (buffered() < sizeof(FrameHeader)) return false;
  std::memcpy(&in_.header, buffer_.bytes.get() + buffer_.begin, sizeof(FrameHeader));
  in_.valid = true;
  in_.done = 0;
  buffer_.begin += sizeof(FrameHeader);
  return true;
}

/// Buffered bytes that peek() may show.
std::size_t DataSocket::presentable() const {
  const std::size_t here = buffered();
  if (here >= remaining()) return remaining();
  const std::size_t whole = (in_.done + here) / element_alignment * element_alignment;
  return whole > in_.done ? whole - in_.done : 0;
}

std::span<const std::byte> DataSocket::peek() {
  if (presentable() < std::min(remaining(), min_read)) fill_buffer(buffered_read_bytes);
  return {buffer_.bytes.get() + buffer_.begin, presentable()};
}

void DataSocket::advance(std::size_t bytes) {
  in_.done += bytes;
  if (remaining() == 0) in_.valid = false;
}

void DataSocket::consume(std::size_t bytes) {
  buffer_.begin += bytes;
  advance(bytes);
}

std::size_t DataSocket::receive(std::span<std::byte> into) {
  if (const std::size_t n = std::min(into.size(), buffered())) {
    std::memcpy(into.data(), buffer_.bytes.get() + buffer_.begin, n);
    consume(n);
    return n;
  }
  if (read_closed_ || !fd_events_.readable()) return 0;
  ReadBuffer& b = buffer_;
  if (!b.bytes) b.bytes = std::make_unique_for_overwrite<std::byte[]>(read_buffer_bytes);
  b.begin = b.end = 0;
  const iovec parts[2] = {{into.data(), into.size()}, {b.bytes.get(), first_read_bytes}};
  const std::size_t got = read_into({parts, into.size() == remaining() ? 2u : 1u});
  const std::size_t n = std::min(into.size(), got);
  b.end = got - n;
  advance(n);
  return n;
}

}  // namespace rz::tcp
