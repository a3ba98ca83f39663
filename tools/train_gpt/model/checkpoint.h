#pragma once
/// A model in and out of safetensors, by Hugging Face's names, a slice of one tensor at a time.

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>

#include "autograd_lite/parameter.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/strategies/strategy.h"

namespace rz::train_gpt {

/// Where each parameter of a model lies in a checkpoint. Names may lack the prefix "transformer.". Attention
/// masks (attn.bias, attn.masked_bias) are ignored, and so is a lm_head.weight that a model with tied
/// embeddings does not have, if it holds the same values as wte.
class Checkpoint {
 public:
  /// Compares names, shapes and dtypes. Errc::config lists, in one line, everything that is missing,
  /// misshapen or too much.
  Checkpoint(SafetensorsFile file, std::span<Parameter* const> parameters);

  /// Elements of a parameter.
  void read(const Parameter&, Range elements, float* out) const;
  std::size_t tensors() const { return entries_.size(); }

 private:
  void check_tied_head(const Parameter& wte) const;

  SafetensorsFile file_;
  std::unordered_map<const Parameter*, const SafetensorsEntry*> entries_;
};

/// Writes path, one tensor at a time; rank 0 does, every rank calls it. Diverged on every rank names the
/// first element that is not finite, unless `nonfinite` allows it: path is then as it was.
void save_model(const std::string& path, std::span<Parameter* const> parameters, Strategy&, int rank,
                const Stream&, bool nonfinite = false);

}  // namespace rz::train_gpt
