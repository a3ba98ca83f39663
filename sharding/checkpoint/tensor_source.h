#pragma once
/// The tensors of a model or checkpoint, whatever files hold them.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../../comm/core/types.h"

namespace rz {

/// The name of a dtype in files: "F32", "BF16", "I64", …
const char* safetensors_name(DType);
/// Bits of an element of a dtype in files; 0 if it is unknown.
unsigned safetensors_bits(std::string_view dtype);
/// F32, F16, BF16 or F64, which are read as f32.
bool is_float_dtype(std::string_view dtype);
std::string name(const std::vector<std::uint64_t>& shape);  ///< "[4, 64]"

/// A tensor in a file.
struct TensorInfo {
  std::string name;
  std::string dtype;  ///< as in safetensors: "F32", "BF16", …; may be unknown to this library
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 1;  ///< elements
  std::uint64_t bytes = 0;
};

/// Tensors that are read by range. Copies share the files; concurrent reads are safe.
class TensorSource {
 public:
  /// Reads bytes of a tensor from `begin` on, which it has.
  using Read = std::function<void(std::uint64_t begin, std::span<std::byte> out)>;

  /// Without tensors at first. `path`: the file, index or folder.
  explicit TensorSource(std::string path);
  /// Adds one, or those of another path. Errc::io names both paths if there is one of the name. Call before
  /// the object is copied, as the two below.
  void add(TensorInfo, Read);
  void add(const TensorSource&);
  void set_choice(std::string line);
  void set_state(std::string json);

  const std::string& path() const;
  /// If there were several sources: which of them is read. One line, else empty.
  const std::string& choice() const;
  /// JSON object of a checkpoint.
  const std::optional<std::string>& state() const;
  /// In the order of the files; those of a checkpoint by name. They live as long as a copy of the source.
  const std::vector<TensorInfo>& tensors() const&;
  void tensors() const&& = delete;
  /// Null if there is none of this name.
  const TensorInfo* find(std::string_view name) const;
  /// The path from which a tensor was added.
  const std::string& path_of(const TensorInfo&) const;

  /// Reads elements [begin, begin + out.size()) of a tensor of F32, F16, BF16 or F64, rounded to f32. Reads
  /// only those bytes of the files. Errc::invalid_argument unless the tensor has them, Errc::unsupported for
  /// another dtype, Errc::io if a file was truncated meanwhile.
  void read_f32(const TensorInfo&, std::uint64_t begin, std::span<float> out) const;
  /// All elements of the tensor of this name; T: float, as read_f32(), std::int32_t or std::int64_t, of a
  /// tensor of integers or BOOL. Errc::io if there is none of this name, or T does not have an element's
  /// value.
  template <class T>
  std::vector<T> read(std::string_view name) const;
  /// Reads bytes [begin, begin + out.size()) of a tensor, which are whole elements. Errc::invalid_argument
  /// unless the tensor has them.
  void read_bytes(const TensorInfo&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// A part of a checkpoint. `weights`: parameters and persistent buffers, by their names in the model. `all`:
/// also the optimizer's tensors, by their names in the checkpoint.
enum class TensorPart { weights, all };

/// Errc::unsupported names a tensor whose elements are no whole bytes, or of an unknown number.
void require_whole_bytes(const TensorSource&);

}  // namespace rz
