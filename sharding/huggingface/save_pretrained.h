#pragma once
/// Export of models in the format of Hugging Face.

#include <string>

#include "autograd_lite/models/language_model.h"
#include "comm/device/stream.h"

namespace rz {

class Strategy;

struct SaveOptions {
  bool nonfinite = false;  ///< write parameters that are not finite
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

}  // namespace rz
