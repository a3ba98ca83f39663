#pragma once
/// Result of Communicator::explain().

#include <cstddef>
#include <string>

namespace rz {

struct AlgorithmChoice {
  /// Name of the schedule ("ring"; "streams:ring" on one node), or the protocol of the intra-node engine:
  /// "one_shot", "two_shot", "staged", "zero_copy" or "single_copy" (comm/tuning/intranode.h).
  std::string algorithm;
  std::string transport;        ///< "shm", "tcp", "shm+tcp"
  std::size_t chunk_bytes = 0;  ///< size of the pipelined chunks; 0: one chunk, or not known
  std::string reason;  ///< such as "built-in table: all_reduce on one host, up to 64 KiB, up to 2 ranks"
};

}  // namespace rz
