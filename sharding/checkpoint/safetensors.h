#pragma once
/// The safetensors format (https://github.com/huggingface/safetensors, "Format"): an 8-byte little-endian
/// header length, a JSON header, and the bytes of the tensors without gaps. Every field of a file is
/// validated before use.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/tensor_source.h"

namespace rz {

/// Reads and validates the header of a file: its length (at most 100 MB, within the file), JSON without
/// duplicate keys and followed by spaces only, bytes = shape × dtype without overflow, and offsets that cover
/// the data exactly once, without overlap or hole. For an unknown dtype the size is only checked to be at
/// least one bit per element. Errors are Errc::config or Errc::io, "FILE: tensor 'x': …", in one line. The
/// tensors are in the order of their data.
TensorSource open_safetensors(const std::string& path);

struct SafetensorsSpec {
  std::string name;
  std::vector<std::uint64_t> shape;
  DType dtype = DType::f32;
  /// Its name in the file instead of that of `dtype`, if not empty: a dtype that the library lacks, such as
  /// BOOL, with elements of as many bytes.
  std::string stored_as{};
};

/// Writes tensors one at a time, in the given order: the constructor writes the header, then each tensor
/// takes one or more write() calls. finish() makes the file durable and visible under its name, so no reader
/// sees a partial file (sharding/io/file.h). Without finish() no file remains. Errc::io names file
/// and reason. Errc::invalid_argument is thrown before anything is written for a header above the 100 MB of
/// the format, and for a name that is duplicate, not UTF-8, or "__metadata__".
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::span<const SafetensorsSpec> tensors);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Appends the next elements, in the order of the tensors, in their dtypes.
  void write(std::span<const std::byte> elements);
  void write(std::span<const float> values) { write(std::as_bytes(values)); }
  /// Errc::invalid_argument unless every element was written.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
