#pragma once
/// The safetensors format (https://github.com/huggingface/safetensors, "Format"): an 8-byte little-endian
/// header length, a JSON header, and the tensors' bytes, back to back. Nothing in a file is believed before
/// it was checked.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rz {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< as in the file: "F32", "BF16", …; also one that is not known here
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes from the start of the data
  std::uint64_t count = 1;           ///< elements
};
std::string name(const std::vector<std::uint64_t>& shape);  ///< "[4, 64]"

/// A file open for reading. Copies share it; reads from several threads are safe.
class SafetensorsFile {
 public:
  /// Reads and checks the header: its length (at most 100 MB, within the file), JSON without duplicate keys
  /// and with nothing but spaces behind it, bytes = shape × dtype without overflow, and offsets that cover
  /// the data exactly once, without overlap or hole. Of a dtype that is not known the shape is checked no
  /// further than that an element is a bit at least. Errc::config or Errc::io, "FILE: tensor 'x': …", in one
  /// line.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const;
  /// In the order of their bytes in the file.
  const std::vector<SafetensorsEntry>& tensors() const;
  const SafetensorsEntry* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;

  /// Elements [begin, begin + out.size()) of a tensor of F32, F16, BF16 or F64, rounded to f32. Touches only
  /// those bytes. Errc::unsupported for another dtype, Errc::io if the file has shrunk meanwhile.
  void read_f32(const SafetensorsEntry&, std::uint64_t begin, std::span<float> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

struct SafetensorsSpec {
  std::string name;
  std::vector<std::uint64_t> shape;
};

/// Writes tensors of f32, in the order given, one at a time: the header first, then each tensor by one or
/// more write() calls. finish() makes them durable and gives them their name, so that nobody ever sees half a
/// file (sharding/io/durable_file.h). Without finish() nothing is left behind. Errc::io names file and
/// reason; Errc::invalid_argument refuses, before anything is written, a header above the format's 100 MB, a
/// name that is given twice, is not UTF-8, or is "__metadata__".
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::span<const SafetensorsSpec> tensors);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next elements, in the order of the tensors.
  void write(std::span<const float> values);
  /// Errc::invalid_argument unless exactly every element was written.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
