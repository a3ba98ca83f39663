#pragma once
/// The weights of a checkpoint of DeepSpeed, ZeRO stages 0 to 3, consolidated while they are read.
///
/// DIR/latest holds the name TAG of the last checkpoint. DIR/TAG/ has mp_rank_00_model_states.pt, or in stage
/// 3 zero_pp_rank_R_mp_rank_00_model_states.pt of each rank R, and, except for stage 0,
/// zero_pp_rank_R_mp_rank_00_optim_states.pt of each rank, perhaps with bf16_ in front (DeepSpeed's
/// documentation, "Model Checkpointing").
///
/// A model file has `module`, the state dict of the 16-bit model, in which stage 3 has empty placeholders;
/// `buffer_names`; `param_shapes`, for each group of the optimizer the names and shapes of its parameters in
/// their order; `shared_params`, names of further uses of a parameter; `frozen_param_shapes` and
/// `frozen_param_fragments`. The optimizer file of a rank has its part of the f32 masters. Stages 1 and 2:
/// `single_partition_of_fp32_groups`, a part of each group, whose parts in the order of the ranks are the
/// parameters one after the other, and padding up to a multiple of 2 × ranks. Stage 3: `fp32_flat_groups`,
/// which one after the other have ceil(elements / ranks) elements of each parameter, the last ones padding
/// (DeepSpeed's documentation, "Model Checkpointing", and what its zero_to_fp32 reads).

#include <cstddef>
#include <map>
#include <string>

#include "sharding/checkpoint/tensor_source.h"

namespace rz {

struct DeepSpeedFiles {
  std::string folder;                             ///< DIR/TAG
  std::map<std::size_t, std::string> models;      ///< paths by rank; the only one of stages 0 to 2 has rank 0
  std::map<std::size_t, std::string> optimizers;  ///< paths by rank
};

/// Whether a path is a folder with such files, or DIR/latest names one.
bool is_deepspeed_checkpoint(const std::string& path);
/// The files of such a path. Errc::unsupported names a file that belongs to tensor or pipeline parallelism,
/// to experts, or to a universal checkpoint; Errc::config the file of a rank that is missing.
DeepSpeedFiles find_deepspeed_files(const std::string& path);

/// The f32 weights of a path for which is_deepspeed_checkpoint() holds; TensorSource::path() is the folder of
/// the checkpoint. Trainable parameters and what shares them are the masters; stage 0, frozen parameters and
/// buffers are as the model has them. In the order of the state dict. Placeholders of stage 3 without
/// elements are left out. Errors are one line, "FILE: …", as those of find_deepspeed_files() and
/// TorchFile::open(); Errc::io where parts do not fit together, Errc::config where a rank's file is missing,
/// Errc::unsupported for experts.
TensorSource open_deepspeed(const std::string& path);

}  // namespace rz
