#pragma once
/// The safetensors format (https://github.com/huggingface/safetensors, "Format"): an 8-byte little-endian
/// header length, a JSON header, and the bytes of the tensors without gaps. Every field of a file is
/// validated before use.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/types.h"

namespace rz {

/// The name of a dtype in files: "F32", "BF16", "I64", …
const char* safetensors_name(DType);
/// Bits of an element of a dtype in files; 0 if it is unknown.
unsigned safetensors_bits(std::string_view dtype);

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< as in the file: "F32", "BF16", …; may be unknown to this library
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes from the start of the data section
  std::uint64_t count = 1;           ///< elements
};
std::string name(const std::vector<std::uint64_t>& shape);  ///< "[4, 64]"

/// A file open for reading. Copies share the file; concurrent reads are safe.
class SafetensorsFile {
 public:
  /// Reads and validates the header: its length (at most 100 MB, within the file), JSON without duplicate
  /// keys and followed by spaces only, bytes = shape × dtype without overflow, and offsets that cover the
  /// data exactly once, without overlap or hole. For an unknown dtype the size is only checked to be at least
  /// one bit per element. Errors are Errc::config or Errc::io, "FILE: tensor 'x': …", in one line.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const;
  /// In the order of their data in the file.
  const std::vector<SafetensorsEntry>& tensors() const;
  const SafetensorsEntry* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;

  /// Reads elements [begin, begin + out.size()) of a tensor of F32, F16, BF16 or F64, rounded to f32. Reads
  /// only those bytes of the file. Errc::unsupported for another dtype, Errc::io if the file was truncated
  /// meanwhile.
  void read_f32(const SafetensorsEntry&, std::uint64_t begin, std::span<float> out) const;
  /// Reads a whole tensor in the dtype of the file. Errc::invalid_argument unless `out` has its size.
  void read_bytes(const SafetensorsEntry&, std::span<std::byte> out) const;
  /// Reads bytes [begin, begin + out.size()) of a tensor. Errc::invalid_argument unless it has them.
  void read_bytes(const SafetensorsEntry&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

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
/// sees a partial file (sharding/io/durable_file.h). Without finish() no file remains. Errc::io names file
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
