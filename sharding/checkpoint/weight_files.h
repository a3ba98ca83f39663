#pragma once
/// The tensors of a model in files of Hugging Face, PyTorch and DeepSpeed.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rz {

/// A tensor in a file.
struct WeightTensor {
  std::string name;
  std::string dtype;  ///< as in safetensors: "F32", "BF16", …; may be unknown to this library
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 1;  ///< elements
  std::uint64_t bytes = 0;
};

/// Copies share the files; concurrent reads are safe.
class WeightFiles {
 public:
  /// `path` is one of:
  /// - a safetensors file (sharding/checkpoint/safetensors.h);
  /// - a state dict that torch.save() has written, usually NAME.bin, .pt or .pth
  ///   (sharding/checkpoint/torch_files/torch_file.h), or a dict with one under a key, such as "model";
  /// - an index of Hugging Face, NAME.index.json, whose weight_map has the file of each tensor, of one of
  ///   these kinds;
  /// - a folder of a checkpoint of DeepSpeed, or one whose file `latest` names it: f32 weights, consolidated
  ///   from the files of all ranks (sharding/checkpoint/zero_checkpoint.h), also if other files of
  ///   weights lie beside it;
  /// - another folder that holds, in this order of preference, model.safetensors,
  /// model.safetensors.index.json,
  ///   pytorch_model.bin or pytorch_model.bin.index.json. Errc::config if it is older than a checkpoint of
  ///   this library in the folder.
  /// Weights of shape [0], which a rank of ZeRO-3 has instead of its partitioned ones, are refused.
  /// The contents of a file decide on its kind. Errors as those of SafetensorsFile::open() and
  /// TorchFile::open(); Errc::config or Errc::io names the file or tensor where index and files differ.
  static WeightFiles open(const std::string& path);

  /// The file, index or folder.
  const std::string& path() const;
  /// If there were several sources of weights: which of them is read, and why. One line, else empty.
  const std::string& choice() const;
  /// In the order of the files.
  const std::vector<WeightTensor>& tensors() const;
  const WeightTensor* find(std::string_view name) const;
  /// Reads elements [begin, begin + out.size()) of a tensor of F32, F16, BF16 or F64, rounded to f32. Reads
  /// only those bytes of the files. Errc::unsupported for another dtype, Errc::io if a file was truncated
  /// meanwhile.
  void read_f32(const WeightTensor&, std::uint64_t begin, std::span<float> out) const;
  /// Reads a whole tensor in its dtype. Errc::invalid_argument unless `out` has its size.
  void read_bytes(const WeightTensor&, std::span<std::byte> out) const;
  /// Reads bytes [begin, begin + out.size()) of a tensor, which are whole elements. Errc::invalid_argument
  /// unless it has them.
  void read_bytes(const WeightTensor&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace rz
