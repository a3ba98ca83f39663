#pragma once
/// The tensors of a model in one or several safetensors files.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/checkpoint/safetensors.h"

namespace rz {

/// Copies share the files; concurrent reads are safe.
class SafetensorsFiles {
 public:
  /// `path` is a safetensors file, an index in the format of Hugging Face (NAME.index.json, whose weight_map
  /// has the file of each tensor), or a folder that holds model.safetensors or model.safetensors.index.json,
  /// of which the first is preferred. Errors as those of SafetensorsFile::open(); Errc::config or Errc::io
  /// names the file or tensor where index and files differ.
  static SafetensorsFiles open(const std::string& path);

  /// The file or index.
  const std::string& path() const;
  /// In the order of their data in the files.
  const std::vector<SafetensorsEntry>& tensors() const;
  const SafetensorsEntry* find(std::string_view name) const;
  /// As SafetensorsFile::read_f32(), of an entry of tensors().
  void read_f32(const SafetensorsEntry&, std::uint64_t begin, std::span<float> out) const;
  /// As SafetensorsFile::read_bytes(), of an entry of tensors().
  void read_bytes(const SafetensorsEntry&, std::span<std::byte> out) const;
  void read_bytes(const SafetensorsEntry&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace rz
