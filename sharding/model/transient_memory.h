#pragma once
/// Cache of memory blocks for buffers that live for a part of a step: whole gradients until they are reduced,
/// gathered scopes.

#include <cstddef>
#include <functional>
#include <memory>

#include "tensor/tensor.h"

namespace rz {

/// Caches whole blocks of `upstream`. allocate() returns the smallest free block that is large enough, unless
/// more than half of it would be wasted and there is room for a new block: the peak of concurrent use, and on
/// a device as much again as was ever released. Beyond that, free blocks that are too small are released to
/// upstream before a new one is allocated. On a device a release waits, and must not fall into the capture of
/// a graph; what is released makes room to keep it the next time: steps with the same allocations release
/// less and less, and after a few upstream is not called any more. Thread-safe.
class TransientMemory {
 public:
  /// `synchronize` is called before blocks are released to upstream: on a device it waits for the work that
  /// still uses them.
  explicit TransientMemory(Allocator upstream, std::function<void()> synchronize = {});

  /// Uninitialised memory. The block is free again when the last Tensor that refers to it is destroyed.
  Tensor allocate(const Shape&, DType = DType::f32);

  std::size_t held() const;         ///< bytes, in use or free
  std::size_t in_use() const;       ///< bytes allocated and not yet returned
  std::size_t peak() const;         ///< maximum of in_use() so far
  std::size_t allocations() const;  ///< number of blocks allocated from upstream so far

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
