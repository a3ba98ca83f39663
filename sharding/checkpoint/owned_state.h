#pragma once
/// What one rank writes to a checkpoint, and the file of it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "comm/device/stream.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/checksum.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// A slice that a rank writes, and the tensor to which it belongs.
struct ShardSlice {
  std::string tensor;                ///< name in the index
  std::vector<std::uint64_t> shape;  ///< of the whole tensor
  DType dtype = DType::f32;
  StoredSlice slice;
  bool finite = false;  ///< of f32: an element that is not finite is refused
};

/// Writes slices one at a time, in the given order, each in one or more write() calls.
class ShardWriter {
 public:
  /// Errors as those of SafetensorsWriter.
  ShardWriter(const std::string& path, std::span<const ShardSlice> slices);

  /// The next bytes of the slices. Errc::diverged names a tensor whose elements must be finite and are not.
  void write(std::span<const std::byte> bytes);
  /// Makes the file durable. Returns the checksums of the slices. Errc::invalid_argument unless every byte
  /// was written.
  std::vector<std::uint64_t> finish();

 private:
  void check(std::span<const std::byte> bytes);

  SafetensorsWriter file_;
  std::vector<std::size_t> bytes_;       // of each slice
  std::vector<std::string> finite_;      // name of the tensor of each slice that must be finite, else empty
  std::size_t slice_ = 0, written_ = 0;  // the slice that is being written, and its bytes so far
  Checksum checksum_;
  std::vector<std::uint64_t> checksums_;
};

/// Parameters and optimizer states that a rank exports, in f32, and on one rank the persistent buffers. Over
/// all ranks each element is there once, in ddp too.
class OwnedState {
 public:
  struct Options {
    bool buffers = false;                   ///< this rank writes those of the module
    bool finite = true;                     ///< parameters and states must be (ShardSlice::finite)
    std::set<const Parameter*> left_out{};  ///< parameters that are not there
  };
  /// All references must outlive this object.
  OwnedState(Module&, const Strategy&, const Options&, const Stream&);

  /// In the order of read(); files are not set.
  const std::vector<ShardSlice>& slices() const { return slices_; }
  std::size_t bytes() const;
  /// Calls f for the bytes of the slices, one slice or part of it at a time. On a device this waits for the
  /// stream.
  void read(const std::function<void(std::span<const std::byte>)>& f) const;

 private:
  const Strategy& strategy_;
  std::vector<std::pair<std::string, ModuleBuffer*>> buffers_;
  Options options_;
  Stream stream_;
  std::vector<ShardSlice> slices_;
};

}  // namespace rz
