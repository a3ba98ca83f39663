#pragma once
/// The tensors of a model or checkpoint, whatever files hold them.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace rz {

struct SourceTensor {
  std::string name;
  std::string dtype;  ///< as in safetensors: "F32"
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 1, bytes = 0;
};

/// Tensors that are read by range. Not thread-safe.
struct TensorSource {
  std::string path;
  std::string choice;                ///< of several sources, which is read: one line, or empty
  std::optional<std::string> state;  ///< JSON object of a checkpoint
  std::vector<SourceTensor> tensors;
  /// Reads elements [begin, begin + out.size()) of one of `tensors`, of F32, F16, BF16 or F64, rounded to
  /// f32.
  std::function<void(const SourceTensor&, std::uint64_t begin, std::span<float> out)> read_f32;
  /// Reads elements from `begin` on in their dtype; `out` holds whole elements.
  std::function<void(const SourceTensor&, std::uint64_t begin, std::span<std::byte> out)> read_bytes;
};

/// F32, F16, BF16 or F64, which read_f32 reads.
bool is_floating_point(const SourceTensor&);

/// `weights`: parameters and persistent buffers, by their names in the model. `all`: also the optimizer's
/// tensors, by their names in the checkpoint.
enum class TensorPart { weights, all };

/// Opens a checkpoint's folder (sharding/checkpoint/checkpoint_index.h), or the files of
/// WeightFiles::open(). Errors name the file, in one line; Errc::unsupported for a tensor whose elements
/// are no whole bytes.
TensorSource open_tensors(const std::string& path, TensorPart);

/// The folder of a checkpoint: the path itself, or for a folder DIR of checkpoints DIR/TAG with the tag of
/// DIR/latest. Errc::config if there is none.
std::string checkpoint_at(const std::string& path);
/// Whether a path is a folder of a checkpoint, or of checkpoints.
bool has_checkpoint(const std::string& path);

}  // namespace rz
