#pragma once
/// Unix sockets in the abstract namespace: messages that keep their bounds and may carry a descriptor.

#include <cstddef>
#include <string>

#include "comm/core/deadline.h"
#include "comm/transports/descriptor.h"

namespace rz {

/// Both are non-blocking. Errc::system or Errc::rendezvous names the address.
Descriptor listen_unix(const std::string& name);
Descriptor connect_unix(const std::string& name, Deadline);

/// False if the message could not go now (or the peer has gone); fd = -1: none goes along.
bool send_message(int socket, const void* bytes, std::size_t size, int fd);
/// False if no whole message is there.
bool receive_message(int socket, void* bytes, std::size_t size, Descriptor& fd);

template <class T>
bool send_message(int socket, const T& message, int fd) {
  return send_message(socket, &message, sizeof message, fd);
}
template <class T>
bool receive_message(int socket, T& message, Descriptor& fd) {
  return receive_message(socket, &message, sizeof message, fd);
}

}  // namespace rz
