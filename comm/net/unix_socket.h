#pragma once
/// Unix sockets of type SOCK_SEQPACKET in the abstract namespace: messages keep their boundaries and may
/// carry one descriptor.

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz::net {

/// Both return non-blocking sockets. Errors (Errc::system, Errc::rendezvous) name the address.
UniqueFd listen_unix(const std::string& name);
UniqueFd connect_unix(const std::string& name, Deadline);

/// Process id of the peer, as seen here; 0 if it is unknown or the peer is in another pid namespace.
pid_t peer_pid(int socket);

/// Sends one message, with the descriptor `fd` unless it is -1. Returns false if the socket is full or the
/// peer has closed it. Never blocks.
bool send_message(int socket, const void* bytes, std::size_t size, int fd);
/// Receives one message of `size` bytes; `fd` becomes its descriptor, or empty. Returns false if there is no
/// such message. Never blocks.
bool receive_message(int socket, void* bytes, std::size_t size, UniqueFd& fd);

template <class T>
bool send_message(int socket, const T& message, int fd) {
  return send_message(socket, &message, sizeof message, fd);
}
template <class T>
bool receive_message(int socket, T& message, UniqueFd& fd) {
  return receive_message(socket, &message, sizeof message, fd);
}

}  // namespace rz::net
