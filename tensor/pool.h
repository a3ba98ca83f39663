#pragma once
/// A pool for the memory of training steps: in steady state nothing is allocated.

#include <cstddef>
#include <memory>

#include "tensor.h"

namespace rz {

/// Keeps released blocks in size classes that waste at most 1/16. If no block fits and the pool would exceed
/// twice its peak use, it first returns the least recently released blocks to upstream. If upstream fails, it
/// returns all free blocks and retries once. Two kinds of blocks are exempt:
///   - from the first rule, blocks released in this pass or the previous one (next_pass());
///   - from both rules, blocks allocated while this thread captured a CUDA graph, which may run at any time.
///     Only trim() returns these.
///
/// Copies share one pool; memory taken from it may outlive it. Thread-safe. On a device a pool serves one
/// stream: a released block may be reused while earlier kernels of that stream still access it.
class BufferPool {
 public:
  explicit BufferPool(Allocator upstream = allocate_host);

  /// An uninitialized tensor. Its block is released with the last Tensor that refers to it. No heap
  /// allocation if a block of the size is free. Throws upstream's error.
  Tensor empty(const Shape&, DType = DType::f32) const;

  struct Statistics {
    std::size_t allocations = 0;  ///< total number of blocks allocated from upstream
    std::size_t bytes = 0;        ///< bytes of all blocks held, in use or free
    std::size_t in_use = 0;       ///< bytes of the blocks in use
    std::size_t peak = 0;         ///< maximum of in_use
  };
  Statistics statistics() const;
  /// Marks the end of a pass over a model. From the third on, identical passes allocate nothing, whatever
  /// their size.
  void next_pass() const;
  /// Returns every free block to upstream. Graphs captured with memory of this pool must not run afterwards.
  void trim() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
