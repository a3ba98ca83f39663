#pragma once
/// Result of Communicator::explain().

#include <cstddef>
#include <string>

namespace rz {

struct AlgorithmChoice {
  /// Name of the schedule ("ring"; "schedule:ring" on one node), or the protocol of the intra-node engine:
  /// "one_shot", "two_shot", "staged", "zero_copy" or "single_copy" (comm/tuning/intranode.h).
  std::string algorithm;
  std::string transport;        ///< "shm", "tcp", "shm+tcp"
  std::size_t chunk_bytes = 0;  ///< of a chunk, or of a slice of a schedule; 0: one chunk, or not known
  std::string reason;  ///< such as "built-in table: all_reduce intra-node, up to 64 KiB, up to 2 ranks"
};

}  // namespace rz
