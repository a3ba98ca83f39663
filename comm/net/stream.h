#pragma once
/// A connected, non-blocking socket, encrypted or not.

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "comm/net/tls.h"
#include "comm/os/fd.h"

namespace rz::net {

/// One thread at a time calls a function. In a child of fork() only the destructor may be called, which sends
/// nothing.
class Stream {
 public:
  Stream() = default;
  /// `tls`: of Authentication::take_tls(); null: not encrypted.
  explicit Stream(UniqueFd socket, std::unique_ptr<Tls> tls = nullptr)
      : socket_(std::move(socket)), tls_(std::move(tls)) {}

  int fd() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  bool encrypted() const { return tls_ != nullptr; }
  void close() {
    tls_.reset();
    socket_.close();
  }

  /// As sendmsg(2). With encryption some of the bytes taken may be unsent(): flush() continues.
  std::ptrdiff_t send(std::span<const iovec> parts) {
    if (tls_) return tls_->send(parts);
    if (parts.size() == 1)
      return ::send(socket_.get(), parts[0].iov_base, parts[0].iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data()), message.msg_iovlen = parts.size();
    return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  std::ptrdiff_t send(const void* bytes, std::size_t size) {
    const iovec part{const_cast<void*>(bytes), size};
    return send({&part, 1});
  }
  bool flush() { return !unsent() || tls_->flush(); }
  /// Bytes that were taken, but are not with the kernel.
  std::size_t unsent() const { return tls_ ? tls_->unsent() : 0; }

  /// As readv(2) that does not wait. Of an encrypted stream, fewer bytes than requested: nothing more has
  /// arrived, unless has_more().
  std::ptrdiff_t receive(std::span<const iovec> parts) {
    if (tls_) return tls_->receive(parts);
    if (parts.size() == 1) return ::recv(socket_.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
    return ::readv(socket_.get(), parts.data(), static_cast<int>(parts.size()));
  }
  std::ptrdiff_t receive(void* to, std::size_t size) {
    const iovec part{to, size};
    return receive({&part, 1});
  }
  /// receive() may return something although poll(2) does not report the socket.
  bool has_more() const { return tls_ && tls_->has_more(); }
  /// Why encryption has failed; empty if it has not.
  std::string error() const { return tls_ ? tls_->error() : std::string(); }

 private:
  UniqueFd socket_;
  std::unique_ptr<Tls> tls_;
};

}  // namespace rz::net
