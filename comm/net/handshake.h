#pragma once
/// The handshake of a fresh connection: both sides show that they belong to the same group before anything
/// else is read. Who cannot is dropped and disturbs nobody.

#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/random.h"
#include "comm/os/fd.h"

namespace rz {

/// Who I am, and what my hello brings along on a unix socket.
struct HandshakeInfo {
  JobId job{};
  int rank = 0;
  int size = 1;
  std::vector<int> passed_fds;  ///< descriptors, borrowed
};

/// A non-blocking socket to a rank: still connecting when it goes into handshake(), proved when it comes out.
struct Connection {
  int rank = -1;
  int index = 0;  ///< of the sockets between the two ranks
  UniqueFd socket;
  std::vector<UniqueFd> received_fds;  ///< what the peer's hello brought
  std::string address;                 ///< where it leads, for messages
};

/// Completes the outgoing `calls` and accepts `links` connections from each of `callers`. Errc::timeout names
/// the ranks that did not come; Errc::rendezvous a call that failed.
std::vector<Connection> handshake(const HandshakeInfo&, int listener, std::vector<Connection> calls,
                                  const std::vector<int>& callers, int links, Deadline);

/// "1, 2 and 5".
std::string list_ranks(const std::vector<int>&);

}  // namespace rz
