#pragma once
/// How the transport of a group is made.

#include <string>

namespace rz {

struct TransportOptions {
  /// "auto": ranks with the same host id share memory, others use TCP. "shm": ranks of several hosts are an
  /// error that names them. "tcp": TCP for every pair.
  std::string kind = "auto";
  std::string interface;  ///< name, address or its first numbers; empty: by the route to rank 0
  int sockets = 2;        ///< TCP sockets for collectives from a host to another, see sockets_per_peer()
  std::string host_id;    ///< what counts as one host; empty: this machine
  std::string algorithm;  ///< that the ranks' calls are forced to: all must say the same
  std::string congestion = "system";  ///< control of TCP's sockets, see set_congestion_control()
  std::string
      tuning;  ///< a table as text (comm/tuning/tuning.h), of rank 0; another's must be empty, or the same
  bool deterministic = true;  ///< what the ranks' sums are held to: the same on all ranks
};

}  // namespace rz
