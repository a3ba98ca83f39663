#pragma once
/// Handshake of new connections: both ends prove that they have the job's id, and its secret if it has one,
/// before anything else is read (authentication.h). A connection that does not is closed, and counted; others
/// are not affected. Ends of a unix socket must be of one user, as must those of TCP within a host if there
/// is no secret.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/authentication.h"
#include "comm/net/random.h"
#include "comm/os/fd.h"

namespace rz::net {

/// Identity of this rank, and the descriptors that it passes on unix sockets.
struct HandshakeInfo {
  JobId job{};  ///< random; only who reads the group's store knows it
  int rank = 0;
  int size = 1;
  std::vector<int> passed_fds;                     ///< at most 4, borrowed
  std::function<void()> check = nullptr;           ///< called once a second; may throw
  std::shared_ptr<const Secret> secret = nullptr;  ///< of the job; null: its id is what the ends prove
  Encryption encryption = Encryption::off;
  /// For the hello of an accepted connection; one that knows the job may then take until the deadline, since
  /// its process may have to wait for a processor.
  std::chrono::milliseconds hello_timeout = std::chrono::seconds(5);
};

/// A non-blocking socket to a rank. It may still be connecting when it is passed to handshake(), and is
/// authenticated when handshake() returns it.
struct Connection {
  int rank = -1;
  int index = 0;  ///< number of this socket among those between the two ranks
  UniqueFd socket;
  std::vector<UniqueFd> received_fds;  ///< descriptors from the peer
  std::string address;                 ///< of the peer, for messages
  std::unique_ptr<Tls> tls = nullptr;  ///< null: not encrypted
};

/// Completes the connections `outgoing` and accepts `links` connections from each rank of `incoming`.
/// Returns all of them, in the order of completion. Errc::timeout names the ranks that did not connect;
/// Errc::rendezvous names an outgoing connection that failed, or a rank that is two processes. Both have the
/// number of connections that were refused, if there were any.
std::vector<Connection> handshake(const HandshakeInfo&, int listener, std::vector<Connection> outgoing,
                                  const std::vector<int>& incoming, int links, Deadline);

/// "1, 2 and 5", for messages.
std::string list_ranks(const std::vector<int>&);

}  // namespace rz::net
