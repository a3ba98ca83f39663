#pragma once
/// The files of a checkpoint of DeepSpeed, by their names.
///
/// DIR/latest holds the name TAG of the last checkpoint. DIR/TAG/ has mp_rank_00_model_states.pt, or in stage
/// 3 zero_pp_rank_R_mp_rank_00_model_states.pt of each rank R, and but for stage 0
/// zero_pp_rank_R_mp_rank_00_optim_states.pt of each rank, perhaps with bf16_ in front (DeepSpeed's
/// documentation, "Model Checkpointing").

#include <map>
#include <string>

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

}  // namespace rz
