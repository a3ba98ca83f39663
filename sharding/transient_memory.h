#pragma once
/// Memory for what lives for a part of a step: whole gradients until they are reduced, gathered scopes.

#include <cstddef>
#include <memory>

#include "tensor/tensor.h"

namespace rz {

/// Blocks from `upstream`, used again as they come back: the smallest that is large enough, whole. If none
/// is, those that are free (hence too small) go back to upstream before a new one is made; so it never holds
/// more blocks than were once in use together, and after the first steps asks for nothing any more.
/// Thread-safe.
class TransientMemory {
 public:
  explicit TransientMemory(Allocator upstream);

  /// Not initialised; comes back when the last Tensor on it ends.
  Tensor take(const Shape&, DType = DType::f32);

  std::size_t held() const;         ///< bytes, in use or free
  std::size_t in_use() const;       ///< bytes asked for and not back yet
  std::size_t peak() const;         ///< most of in_use() ever
  std::size_t allocations() const;  ///< blocks ever asked of upstream

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
