#pragma once
/// Export of models in the format of Hugging Face.

#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/models/language_model.h"
#include "comm/device/stream.h"

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
};

/// Writes the parameters of a module that a strategy shards to a safetensors file, in f32, one at a time, and
/// the persistent buffers of rank 0 in their dtypes, with their names from the module, as in PyTorch's
/// state_dict(). Collective; rank 0 writes. Errc::diverged on every rank, naming the first element of a
/// parameter that is not finite, unless `nonfinite` is set; an existing file is then unchanged.
/// Errc::unsupported for parameters that are parts of tensors, Errc::invalid_argument for buffers without
/// memory.
void save_weights(const std::string& path, Module&, Strategy&, int rank, const Stream&,
                  const SaveOptions& = {});

/// Writes model.safetensors, as save_weights(), and config.json to a folder, which is made. Hugging Face's
/// from_pretrained() reads it.
void save_pretrained(const std::string& folder, LanguageModel&, Strategy&, int rank, const Stream&,
                     const SaveOptions& = {});

/// Writes parameters as they are, by these names; as save_weights() otherwise.
void save_parameters(const std::string& path, const std::vector<std::pair<std::string, Parameter*>>&,
                     Strategy&, int rank, const Stream&, const SaveOptions& = {});

}  // namespace rz
