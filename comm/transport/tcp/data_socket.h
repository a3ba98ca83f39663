#pragma once
/// One data socket of a TCP channel: frames in both directions, each a header of fixed size and a payload.

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/net/poller.h"
#include "comm/net/stream.h"
#include "comm/transport/call_signature.h"

namespace rz::tcp {

constexpr std::uint32_t frame_magic = 0x32465a52;  // "RZF2": the version is part of it
constexpr std::size_t max_frame_bytes = 64 << 10;  ///< payload of a frame, at most

struct FrameHeader {
  std::uint32_t magic = frame_magic;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;  ///< of the payload's first byte in the stream
  CallSignature signature;
};
static_assert(sizeof(FrameHeader) == 40 && sizeof(CallSignature) == 24);

/// Never blocks. Does not move while the poller watches it.
class DataSocket {
 public:
  void open(net::Stream, net::Poller&);
  /// Ends the stream in both directions; data that the kernel has accepted still arrives.
  void close(net::Poller&);
  /// The peer has closed the connection, or it has failed, in one direction or both.
  bool ended() const { return read_closed_ || write_closed_ || (fd_events_.events & (EPOLLHUP | EPOLLERR)); }

  /// Why encryption has failed; empty if it has not.
  std::string error() const { return stream_.error(); }
  /// Any thread.
  int descriptor() const { return stream_.fd(); }
  /// The errno with which sending or reading has failed first; 0 if neither has.
  int error_number() const;

  // ---- sending

  /// Whether a frame can be started: the socket has space and the frame before has been sent.
  bool ready_to_send();
  /// Starts a frame, whose payload is read until released() has passed it. Returns false if the kernel took
  /// nothing: the frame is not accepted.
  bool send(const FrameHeader&, const std::byte* payload);
  /// Continues the frame.
  void flush() {
    if (out_.busy) send_some();
  }
  /// The position in the stream up to which this socket no longer reads payloads; `accepted` if there is no
  /// unfinished frame.
  std::uint64_t released(std::uint64_t accepted) const;

  // ---- receiving: frame by frame

  /// Makes the next frame the front one if its header has arrived. Returns false if not. `read_ahead`: reads
  /// as much as there is, instead of a small frame.
  bool next_frame(bool read_ahead);
  /// The next frame is the front one; front() has its header.
  bool has_front() const { return in_.valid; }
  const FrameHeader& front() const { return in_.header; }
  /// Rejects the header that next_frame() has made the front one: its frame is not read.
  void reject_front() { in_.valid = false; }
  /// Bytes of the front frame that are to be consumed or received.
  std::size_t remaining() const { return in_.header.length - in_.done; }
  /// The next bytes of the front frame's payload. An incomplete frame is shown up to a multiple of 64 bytes
  /// from its start, so that no element is split.
  std::span<const std::byte> peek();
  /// Skips buffered bytes of the front frame.
  void consume(std::size_t bytes);
  std::size_t buffered() const { return buffer_.end - buffer_.begin; }
  /// Moves bytes of the front frame to `into`, at most remaining(): what is buffered, or else by one read.
  /// That also reads the start of the next frame, if it completes this one.
  std::size_t receive(std::span<std::byte> into);
  /// No more bytes will arrive; some may be buffered.
  bool read_closed() const { return read_closed_; }

 private:
  struct Outgoing {
    FrameHeader header;
    const std::byte* payload = nullptr;
    std::size_t sent = 0;  ///< bytes of header and payload
    bool busy = false;     ///< the kernel has not accepted all of it, or of what it was encrypted to
  };
  struct Incoming {
    FrameHeader header;
    bool valid = false;
    std::size_t done = 0;  ///< bytes of the payload
  };
  /// Its memory is not zeroed: most peers of a large group send few bytes, which touch few of its pages.
  struct ReadBuffer {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t begin = 0, end = 0;
  };

  void send_some();
  ssize_t send_small_frame();
  ssize_t send_rest();
  std::size_t presentable() const;
  void fill_buffer(std::size_t max_bytes);
  std::size_t read_into(std::span<const iovec> parts);
  void advance(std::size_t bytes);

  net::Stream stream_;
  net::FdEvents fd_events_;
  Outgoing out_;
  Incoming in_;
  ReadBuffer buffer_;  // what was received and is not consumed: the front frame's bytes, then the next frames
  bool read_closed_ = false;   // end of stream, or an error
  bool write_closed_ = false;  // sending has failed
  int error_number_ = 0;
};

}  // namespace rz::tcp
