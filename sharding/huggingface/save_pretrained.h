#pragma once
/// Export of models in the format of Hugging Face.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../autograd_lite/models/language_model.h"
#include "../../comm/core/types.h"
#include "../../comm/device/stream.h"

namespace rz {

class Strategy;

struct SaveOptions {
  bool nonfinite = false;  ///< write parameters that are not finite
  /// Only parameters and buffers that one of these patterns matches are written, by matches_part() of their
  /// names from the module. Empty: all. Errc::config names a pattern without a match.
  std::vector<std::string> only{};
  /// Adds low-rank updates of LoRA to the weights (merge_lora()), as merge_and_unload() of PEFT: the file is
  /// of the model without LoRA. False: weights and updates are written as they are.
  bool merge_lora = true;
  /// The parameters' type in the files: f32, or f16 or bf16, rounded to nearest even. Errc::diverged names a
  /// value that overflows, unless `nonfinite`. Buffers keep their dtypes.
  DType dtype = DType::f32;
  /// The most bytes of a file's tensors by save_pretrained(). A larger tensor has a file of its own.
  std::uint64_t max_shard_size = 50'000'000'000;
};

/// Writes the parameters of a module that a strategy shards to a safetensors file, one at a time, and the
/// persistent buffers of rank 0 in their dtypes, with their names from the module, as in PyTorch's
/// state_dict(). Collective; rank 0 writes, and every rank returns when the file exists, or throws the error
/// of rank 0. Errc::diverged, naming the first element of a parameter that is not finite, unless `nonfinite`
/// is set; an existing file is then unchanged. Errc::unsupported for parts of tensors without a tp group,
/// whose parts are joined, Errc::invalid_argument for buffers without memory, Errc::io for what cannot be
/// written.
void save_weights(const std::string& path, Module&, Strategy&, int rank, const Stream&,
                  const SaveOptions& = {});

/// Writes model.safetensors, as save_weights(), or files of SaveOptions::max_shard_size with their index, and
/// config.json to a folder, which is made. Files of the tokenizer, chat_template.* and generation_config.json
/// are copied from the folder of a language_model_from_config(), which may be the same. Then it removes other
/// files of these names and other files of weights, which are an earlier model's, unless only parts are
/// written. Errc::config for a folder that holds an adapter. Each file appears complete. Hugging
/// Face's from_pretrained() reads the folder. Collective, as save_weights().
void save_pretrained(const std::string& folder, LanguageModel&, Strategy&, int rank, const Stream&,
                     const SaveOptions& = {});

/// Errc::config if a folder holds an adapter, which would be applied to a model that is saved there.
void require_no_adapter_in(const std::string& folder);

/// What save_pretrained() writes beside weights of a dtype, by file name: config.json and the copied files,
/// e.g. for TrainingCheckpoints::files(). Errc::config for a file that cannot be read.
std::map<std::string, std::string> files_beside_weights(const LanguageModel&, DType = DType::f32);

/// Writes parameters and buffers as they are, by these names; as save_weights() otherwise.
void save_tensors(const std::string& path, const std::vector<std::pair<std::string, Parameter*>>&,
                  const std::vector<std::pair<std::string, ModuleBuffer*>>&, Strategy&, int rank,
                  const Stream&, const SaveOptions& = {});

}  // namespace rz
