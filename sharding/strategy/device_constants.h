#pragma once
/// An optimizer's constants in device memory, where updates in a graph find them.

#include <cstdint>
#include <span>

#include "comm/device/stream.h"
#include "sharding/optim/optimizer.h"
#include "tensor/tensor.h"

namespace rz {

/// Constants for members that missed no update, then a slot for each member. A member that missed updates
/// has constants of its own, at an address that stays the same.
class DeviceConstants {
 public:
  /// Writes the constants of the update that the optimizer has begun; `missed` by member.
  void write(const Optimizer&, std::span<const std::int64_t> missed, const Stream&);
  /// Whether write() was called since the last call of this function.
  bool take_written();
  /// For members that missed `missed` updates; `first` is one of them.
  const void* of(std::int64_t missed, int first) const { return memory_.raw() + slot(missed, first); }

 private:
  std::size_t slot(std::int64_t missed, int first) const;

  Tensor memory_;
  std::size_t stride_ = 0;
  bool written_ = false;
};

}  // namespace rz
