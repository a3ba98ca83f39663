#pragma once
/// Import and export of a model as safetensors, with the names of Hugging Face, a slice of one tensor at a
/// time.

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>

#include "autograd_lite/parameter.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/strategies/strategy.h"

namespace rz::train_gpt {

/// Maps the parameters of a model to tensors of a checkpoint. Names may lack the prefix "transformer.".
/// Attention masks (attn.bias, attn.masked_bias) are ignored. An extra lm_head.weight is ignored for a model
/// with tied embeddings if it equals wte.
class Checkpoint {
 public:
  /// Compares names, shapes and dtypes. Errc::config lists, in one line, all missing, misshapen and
  /// superfluous tensors.
  Checkpoint(SafetensorsFile file, std::span<Parameter* const> parameters);

  /// Reads elements of a parameter.
  void read(const Parameter&, Range elements, float* out) const;
  std::size_t tensors() const { return entries_.size(); }

 private:
  void check_tied_head(const Parameter& wte) const;

  SafetensorsFile file_;
  std::unordered_map<const Parameter*, const SafetensorsEntry*> entries_;
};

/// Writes the model to `path`, one tensor at a time. Collective; rank 0 writes. Throws Diverged on every
/// rank, naming the first element that is not finite, unless `nonfinite` is set; an existing file is then
/// unchanged.
void save_model(const std::string& path, std::span<Parameter* const> parameters, Strategy&, int rank,
                const Stream&, bool nonfinite = false);

}  // namespace rz::train_gpt
