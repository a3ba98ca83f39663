#pragma once
/// The weights of a checkpoint of DeepSpeed, ZeRO stages 0 to 3, consolidated while they are read.
///
/// A model file has `module`, the state dict of the 16-bit model, in which stage 3 has empty placeholders;
/// `buffer_names`; `param_shapes`, for each group of the optimizer the names and shapes of its parameters in
/// their order; `shared_params`, names of further uses of a parameter; `frozen_param_shapes` and
/// `frozen_param_fragments`. The optimizer file of a rank has its part of the f32 masters. Stages 1 and 2:
/// `single_partition_of_fp32_groups`, a part of each group, whose parts in the order of the ranks are the
/// parameters one after the other, and padding up to a multiple of 2 × ranks. Stage 3: `fp32_flat_groups`,
/// which one after the other have ceil(elements / ranks) elements of each parameter, the last ones padding
/// (DeepSpeed's documentation, "Model Checkpointing", and what its zero_to_fp32 reads).

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace rz {

struct ZeroTensor {
  std::string name;
  std::string dtype;  ///< as in safetensors
  std::uint64_t element_bytes = 4;
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 1;
  /// Elements [begin, begin + count) of a tensor in a file are the elements from `at` on.
  struct Piece {
    std::size_t tensor = 0;
    std::uint64_t begin = 0, count = 0, at = 0;
  };
  std::vector<Piece> pieces;
};

/// Copies share the files; concurrent reads are safe.
class ZeroCheckpoint {
 public:
  /// A path for which is_deepspeed_checkpoint() holds. Errors are one line, "FILE: …", as those of
  /// find_deepspeed_files() and TorchFile::open(); Errc::io where parts do not fit together, Errc::config
  /// where a rank's file is missing, Errc::unsupported for experts.
  static ZeroCheckpoint open(const std::string& path);

  /// The folder of the checkpoint.
  const std::string& path() const;
  /// Trainable parameters and what shares them are the f32 masters; stage 0, frozen parameters and buffers
  /// are as the model has them. In the order of the state dict. Placeholders of stage 3 without elements are
  /// left out.
  const std::vector<ZeroTensor>& tensors() const;
  /// Reads elements [begin, begin + out.size() / element_bytes).
  void read(const ZeroTensor&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace rz
