#include "comm/net/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::net {

namespace {

constexpr int kind = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;

/// An address in the abstract namespace: a zero byte, then the name. There is no file.
socklen_t fill(sockaddr_un& address, const std::string& name) {
  require(name.size() < sizeof address.sun_path, Errc::rendezvous, "unix socket name '", name,
          "' is too long");
  address = {};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

UniqueFd listen_unix(const std::string& name) {
  sockaddr_un address;
  const socklen_t size = fill(address, name);
  UniqueFd socket(::socket(AF_UNIX, kind, 0));
  if (!socket) fail_errno("socket(AF_UNIX)");
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail_errno("bind", "@" + name);
  if (listen(socket.get(), 1024) != 0) fail_errno("listen", "@" + name);
  return socket;
}

UniqueFd connect_unix(const std::string& name, Deadline deadline) {
  sockaddr_un address;
  const socklen_t size = fill(address, name);
  for (;;) {
    UniqueFd socket(::socket(AF_UNIX, kind, 0));
    if (!socket) fail_errno("socket(AF_UNIX)");
    if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) return socket;
    // EAGAIN: the listener's queue is full.
    if (errno != EAGAIN || deadline.expired())
      fail(Errc::rendezvous, "connect to unix socket @", name, ": ", std::strerror(errno),
           "; ranks that share memory must share the network namespace, and the peer must be alive");
    std::this_thread::sleep_for(poll_period::full_backlog);
  }
}

bool send_message(int socket, const void* bytes, std::size_t size, int fd) {
  iovec part{const_cast<void*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(size);
}

pid_t peer_pid(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 ? peer.pid : 0;
}

bool receive_message(int socket, void* bytes, std::size_t size, UniqueFd& fd) {
  iovec part{bytes, size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  fd.close();
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) != static_cast<ssize_t>(size)) return false;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof received);
    fd = UniqueFd(received);
  }
  return true;
}

}  // namespace rz::net
