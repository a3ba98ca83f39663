#pragma once
/// Unix sockets in the abstract namespace: messages that keep their bounds and may carry a descriptor.

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz {

/// Both are non-blocking. Errc::system or Errc::rendezvous names the address.
UniqueFd listen_unix(const std::string& name);
UniqueFd connect_unix(const std::string& name, Deadline);

/// The process at the other end, by its number here; 0: it cannot be told, or lives in another namespace.
pid_t peer_pid(int socket);

/// False if the message could not go now (or the peer has gone); fd = -1: none goes along.
bool send_message(int socket, const void* bytes, std::size_t size, int fd);
/// False if no whole message is there.
bool receive_message(int socket, void* bytes, std::size_t size, UniqueFd& fd);

template <class T>
bool send_message(int socket, const T& message, int fd) {
  return send_message(socket, &message, sizeof message, fd);
}
template <class T>
bool receive_message(int socket, T& message, UniqueFd& fd) {
  return receive_message(socket, &message, sizeof message, fd);
}

}  // namespace rz
