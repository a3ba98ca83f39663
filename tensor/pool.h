#pragma once
/// Memory that a training step takes and gives back every time: after the first steps nothing is allocated
/// any more.

#include <cstddef>
#include <memory>

#include "tensor/tensor.h"

namespace rz {

/// Keeps returned blocks by size, rounded up by a sixteenth at most. When it has none of a size, and would
/// hold more than twice the most that was ever in use, what nobody used for longest goes back to upstream
/// first, and so does every free block before an error of upstream passes. Kept are blocks of this pass and
/// the last one (next_pass()), and those that were taken while this thread captured a CUDA graph, which may
/// run at any time: trim() alone gives them back.
///
/// Copies share one pool; memory taken from it may outlive it. Thread-safe. On a device it serves one stream:
/// a block that was given back may be handed out while kernels of that stream still use it.
class BufferPool {
 public:
  explicit BufferPool(Allocator upstream = allocate_host);

  /// Not initialised; its block goes back when the last Tensor on it ends. No heap allocation of any kind
  /// once a block of this size is free.
  Tensor empty(const Shape&, DType = DType::f32) const;

  struct Statistics {
    std::size_t allocations = 0;  ///< blocks ever asked of upstream
    std::size_t bytes = 0;        ///< of blocks held now, in use or free
    std::size_t in_use = 0;       ///< of blocks now in use
    std::size_t peak = 0;         ///< most bytes ever in use
  };
  Statistics statistics() const;
  /// A pass over a model is over: from the third on, passes that are alike allocate nothing, whatever they
  /// take.
  void next_pass() const;
  /// Gives every free block back to upstream. Graphs that were captured with this pool's memory must not run
  /// any more.
  void trim() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
