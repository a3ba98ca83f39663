#pragma once
/// Seeds of dropout.

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/device/stream.h"

namespace rz {

/// Every pass of every rank has its own seed. Those of an update lie in memory that a graph may read.
class DropoutSeeds {
 public:
  struct Place {
    int rank = 0, ranks = 1;
    /// Passes of a rank that follow each other in the order of the passes of all ranks, which numbers the
    /// seeds. With those of an update, seeds do not depend on the number of ranks.
    std::uint64_t consecutive = 1;
  };
  /// For updates of `micro_batches`, on the device of the stream.
  DropoutSeeds(std::uint64_t seed, std::size_t micro_batches, Place, const Stream&);

  /// The seed of a pass of this rank, counted from 0.
  std::uint64_t of_pass(std::uint64_t pass) const;
  /// Writes the seeds of an update, which begins with a pass, in the order of the stream.
  void draw(std::uint64_t first_pass, const Stream&);
  /// On the device; see Tape::seed_at().
  const std::uint64_t* at(std::size_t micro_batch) const { return on_device_.get() + micro_batch; }

 private:
  std::uint64_t seed_;
  Place place_;
  std::vector<std::uint64_t> next_;  // in host memory
  std::shared_ptr<std::uint64_t> on_device_;
};

}  // namespace rz
