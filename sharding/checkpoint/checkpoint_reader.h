#pragma once
/// Reading of checkpoints by tensor and range, whatever ranks wrote them.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/safetensors.h"

namespace rz {

/// A checkpoint open for reading. Files are opened when they are read, at most 64 at a time. Not thread-safe.
class CheckpointReader {
 public:
  /// `folder` holds the index. Checks the index, and that its files exist with the right sizes. Errc::config
  /// or Errc::io names the file and what is wrong, in one line.
  static CheckpointReader open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const CheckpointIndex& index() const { return index_; }
  /// Null if there is no such tensor.
  const StoredTensor* find(std::string_view tensor) const;

  /// Reads elements [begin, begin + out.size()) of a tensor of F32, F16, BF16 or F64 in row-major order,
  /// rounded to f32. Reads only these bytes of the files. Errc::io if a file does not fit the index.
  void read_f32(std::string_view tensor, std::uint64_t begin, std::span<float> out);
  /// Reads a whole tensor in its dtype. Errc::invalid_argument unless `out` has its size.
  void read_bytes(std::string_view tensor, std::span<std::byte> out);
  /// Reads elements from `begin` on in their dtype, which is one of whole bytes that safetensors_bits()
  /// knows. Errc::invalid_argument unless the tensor has them, and `out` holds whole elements.
  void read_bytes(std::string_view tensor, std::uint64_t begin, std::span<std::byte> out);

  /// Reads file number `file` as a whole, and compares it with the index and its checksums. Errc::io names
  /// the file and tensor that are damaged.
  void verify(std::size_t file);
  /// What verify() would throw, for each tensor that is damaged; of a file that cannot be read one error.
  std::vector<Error> find_damage(std::size_t file);

 private:
  CheckpointReader(std::string folder, CheckpointIndex index);
  void for_each_damage(std::size_t file, const std::function<void(const Error&)>& report);
  /// Calls read(file, entry, element of the entry, index in the tensor, count) for all of elements
  /// [begin, end).
  template <class F>
  void for_each_stored_run(std::string_view tensor, std::uint64_t begin, std::uint64_t end, const F& read);
  const StoredTensor& at(std::string_view tensor) const;
  std::uint64_t bytes_of_element(std::string_view tensor, const StoredTensor&) const;
  const SafetensorsFile& file(std::size_t number);
  /// Errc::io unless the file has the slice.
  const SafetensorsEntry& entry(const SafetensorsFile&, std::string_view tensor, const StoredTensor&,
                                const StoredSlice&) const;

  std::string folder_;
  CheckpointIndex index_;
  std::map<std::size_t, SafetensorsFile> open_;
};

}  // namespace rz
