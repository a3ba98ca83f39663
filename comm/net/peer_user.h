#pragma once
/// Which user has the other end of a connection within this host, as the kernel knows it.

namespace rz::net {

/// Whether the other end of a connected socket is open in a process of this user. Of TCP, the kernel names
/// the user for connections within one network namespace, while both ends are open; otherwise false.
bool is_of_this_user(int socket);
/// Whether the other end has an address of this host.
bool is_of_this_host(int socket);

}  // namespace rz::net
