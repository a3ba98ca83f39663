#pragma once
/// Memory for what lives for a part of a step: whole gradients until they are reduced, gathered scopes.

#include <cstddef>
#include <functional>
#include <memory>

#include "tensor/tensor.h"

namespace rz {

/// Blocks from `upstream`, whole, used again as they come back: the smallest that is large enough, unless
/// that wastes more than half of it and there is room for a new one. Room is what was once in use together:
/// beyond it, free blocks that are too small go back to upstream before a new one is made. After the first
/// steps nothing is asked of upstream any more. Thread-safe.
class TransientMemory {
 public:
  /// `synchronize` is called before blocks go back to upstream: on a device it waits for the work that still
  /// uses them.
  explicit TransientMemory(Allocator upstream, std::function<void()> synchronize = {});

  /// Not initialised; comes back when the last Tensor on it ends.
  Tensor allocate(const Shape&, DType = DType::f32);

  std::size_t held() const;         ///< bytes, in use or free
  std::size_t in_use() const;       ///< bytes asked for and not back yet
  std::size_t peak() const;         ///< most of in_use() ever
  std::size_t allocations() const;  ///< blocks ever asked of upstream

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
