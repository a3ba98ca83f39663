#pragma once
/// Which user has the other end of a connection within this host, as the kernel knows it.

#include "comm/os/fd.h"

namespace rz::net {

/// A socket to the kernel's list of connections; empty where it is not to be had.
UniqueFd socket_to_kernel();
/// Whether the other end of a connected socket is open in a process of this user. Of TCP, the kernel names
/// the user for connections within one network namespace, while both ends are open; otherwise false.
/// `kernel`: of socket_to_kernel(), of one thread at a time; without it (-1), a process that has no
/// descriptor left trusts nobody.
bool is_of_this_user(int socket, int kernel = -1);
/// Whether the other end has an address of this host, or may have one.
bool is_of_this_host(int socket);

}  // namespace rz::net
