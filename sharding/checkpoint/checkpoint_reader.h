#pragma once
/// Reading of checkpoints by tensor and range, whatever ranks wrote them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/tensor_source.h"

namespace rz {

/// A checkpoint open for reading. Files are opened when they are read, at most 64 at a time. Copies share the
/// files; concurrent reads are safe.
class CheckpointReader {
 public:
  /// `folder` holds the index. Checks the index, and that its files exist with the right sizes. Errc::config
  /// or Errc::io names the file and what is wrong, in one line.
  static CheckpointReader open(const std::string& folder);

  const std::string& folder() const;
  const CheckpointIndex& index() const;
  /// Its tensors in the order of their names, and its state. Reading a range reads only these bytes of the
  /// files, and is Errc::io if a file does not fit the index. Errc::config if a parameter and a buffer have
  /// one name.
  TensorSource tensors(TensorPart) const;

  /// Reads file number `file` as a whole, and compares it with the index and its checksums. Errc::io names
  /// the file and tensor that are damaged.
  void verify(std::size_t file) const;
  /// What verify() would throw, for each tensor that is damaged; of a file that cannot be read one error.
  std::vector<Error> find_damage(std::size_t file) const;

 private:
  struct State;
  void for_each_damage(std::size_t file, const std::function<void(const Error&)>& report) const;

  std::shared_ptr<State> state_;
};

}  // namespace rz
