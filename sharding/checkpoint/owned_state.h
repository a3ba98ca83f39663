#pragma once
/// What one rank writes to a checkpoint.

#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "comm/device/stream.h"
#include "sharding/checkpoint/shard_writer.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Parameters and optimizer states that a rank exports, in f32, and on one rank the persistent buffers. Over
/// all ranks each element is there once, in ddp too.
class OwnedState {
 public:
  /// `buffers`: whether this rank writes those of the module. `finite`: parameters and states must be
  /// (ShardSlice::finite). All references must outlive this object.
  OwnedState(Module&, const Strategy&, bool buffers, bool finite, const Stream&);

  /// In the order of read(); files are not set.
  const std::vector<ShardSlice>& slices() const { return slices_; }
  std::size_t bytes() const;
  /// Calls f for the bytes of the slices, one slice or part of it at a time. On a device this waits for the
  /// stream.
  void read(const std::function<void(std::span<const std::byte>)>& f) const;

 private:
  const Strategy& strategy_;
  std::vector<std::pair<std::string, ModuleBuffer*>> buffers_;
  Stream stream_;
  std::vector<ShardSlice> slices_;
};

}  // namespace rz
