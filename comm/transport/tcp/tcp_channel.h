#pragma once
/// The stream to and from one peer on one channel, over one or several data sockets.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/transport/link_monitor.h"
#include "comm/transport/tcp/data_socket.h"
#include "comm/transport/transport.h"

namespace rz::tcp {

/// Posts of at least max_frame_bytes are striped over the sockets, frame by frame. Shorter posts use the
/// first socket, so that they arrive in order. Functions without a comment implement those of Transport.
class TcpChannel {
 public:
  /// Reports damaged frames to the monitor.
  TcpChannel(int peer, int sockets, LinkMonitor& monitor)
      : peer_(peer), monitor_(monitor), sockets_(static_cast<std::size_t>(sockets)) {}

  void open(int socket, net::Stream stream) {
    sockets_[static_cast<std::size_t>(socket)].open(std::move(stream), monitor_.poller());
  }
  void close() {
    for (DataSocket& s : sockets_) s.close(monitor_.poller());
  }

  std::size_t post(const CallSignature&, std::span<const std::byte>);
  std::uint64_t released() const;
  /// Continues unfinished frames.
  void flush() {
    for (DataSocket& s : sockets_) s.flush();
  }

  ReceiveView peek();
  void consume(std::size_t bytes);
  /// Copies the buffered bytes first, then reads directly into `into`.
  std::size_t receive(std::span<std::byte> into);
  /// True if the stream ends where peek() or receive() has found nothing more.
  bool at_end() const;
  /// A socket has ended or failed, in one direction or both.
  bool ended() const;
  std::span<const DataSocket> sockets() const { return sockets_; }
  /// Why encryption of a socket has failed; empty if it has not.
  std::string error() const;
  /// The errno with which a socket has failed; 0 if none has.
  int error_number() const;

 private:
  DataSocket* free_socket(bool striped);
  DataSocket* front_socket();
  bool has_front(DataSocket&);
  void advance(DataSocket&, std::size_t bytes);
  void report_damaged(const FrameHeader&);

  const int peer_;
  LinkMonitor& monitor_;
  std::vector<DataSocket> sockets_;
  std::size_t next_socket_ = 0;  // for the next striped frame
  std::uint64_t accepted_ = 0, consumed_ = 0;
  DataSocket* front_ = nullptr;  // its front frame continues the stream; null: not found
  bool peeked_ = false;          // the last bytes were consumed from the buffer: read more into it ahead
};

}  // namespace rz::tcp
