#pragma once
/// The interface of a host on which its ranks listen for TCP.

#include <string>

#include "comm/net/socket.h"

namespace rz {

/// The address to listen on, with port 0. `interface`: an interface's name, address, or leading numbers of
/// its address. If empty: loopback if the whole group is on one machine, else the interface with the address
/// `way_to_store` (local end of the route to rank 0's store), else the first one that is not loopback.
/// Errc::config, listing the interfaces, if `interface` matches none or is loopback in a group of several
/// machines. Errc::rendezvous if no interface is suitable.
net::SocketAddress choose_address(const std::string& interface, bool one_machine,
                                  const std::string& way_to_store);

}  // namespace rz
