#pragma once
/// What a call takes, in words for people: the answer of Communicator::explain().

#include <cstddef>
#include <string>

namespace rz {

struct AlgorithmChoice {
  /// Of a schedule its name ("ring", and on one host "streams:ring"); of ranks that meet in shared memory
  /// "one_shot", "two_shot", "letters", "direct" or "single_copy" (comm/tuning/intranode.h).
  std::string algorithm;
  std::string transport;        ///< "shm", "tcp", "shm+tcp"
  std::size_t chunk_bytes = 0;  ///< of the pieces that are on their way together; 0: the whole, or unknown
  std::string reason;           ///< "built-in table: all_reduce on one host, up to 64 KiB, up to 2 ranks"
};

}  // namespace rz
