#pragma once
/// Memory that a training step takes and gives back every time: after the first steps nothing is allocated
/// any more.

#include <cstddef>
#include <memory>

#include "tensor/tensor.h"

namespace rz {

/// Keeps returned blocks by size. Copies share one pool; memory taken from it may outlive it. Thread-safe. On
/// a device it serves one stream: a block that was given back may be handed out while kernels of that stream
/// still use it.
class BufferPool {
 public:
  explicit BufferPool(Allocator upstream = allocate_host);

  /// Not initialised; its block goes back when the last Tensor on it ends. No heap allocation of any kind
  /// once a block of this size is free.
  Tensor empty(const Shape&, DType = DType::f32) const;

  struct Statistics {
    std::size_t allocations = 0;  ///< blocks ever asked of upstream
    std::size_t bytes = 0;        ///< held now, in use or free
    std::size_t in_use = 0;       ///< bytes now in use
    std::size_t peak = 0;         ///< most bytes ever in use
  };
  Statistics statistics() const;
  /// Gives free blocks back to upstream.
  void trim() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
