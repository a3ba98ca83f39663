#pragma once
/// A DeepSpeed configuration: JSON with comments, trailing commas and integers like 1e9. Each supported key
/// is a field below; options that DeepSpeed has no key for are under "ringzero". A key of DeepSpeed that is
/// not supported is an error if it would change results or memory ("not supported in this build yet"),
/// otherwise a warning. An unknown key is an error that suggests the nearest known key.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/optim/loss_scaler.h"
#include "sharding/optim/precision.h"
#include "sharding/optim/unused_parameters.h"

namespace rz {

/// The "optimizer" section.
struct OptimizerConfig {
  enum class Type { adam, adamw, sgd };
  Type type = Type::adamw;  ///< "Adam" means AdamW too, unless adam_w_mode or torch_adam is set otherwise (as
                            ///< in DeepSpeed)
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< Adam, AdamW
  double momentum = 0;                            ///< SGD
  bool nesterov = false;                          ///< SGD
  double weight_decay = 0;                        ///< SGD, Adam: added to the gradient; AdamW: decoupled
};
const char* name(OptimizerConfig::Type);  ///< "Adam", "AdamW", "SGD"

/// All positive; train = micro × accumulation × ranks.
struct BatchSizes {
  std::int64_t train = 0, micro = 0, accumulation = 0;
  bool operator==(const BatchSizes&) const = default;
};

/// The keys that this library supports, with their defaults.
struct DsConfig {
  std::string file;  ///< path, for messages
  std::optional<std::int64_t> train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;
  double gradient_clipping = 0;  ///< limit of the global norm; 0: no clipping
  OptimizerConfig optimizer;
  int zero_stage = 0;
  bool overlap_comm = true;
  Precision precision;                 ///< bf16, fp16, data_types
  LossScaleOptions loss_scale;         ///< fp16
  bool skip_overflow = false;          ///< skip updates whose gradients are not finite
  bool drop_last = false;              ///< dataloader_drop_last
  bool decay_one_dimensional = false;  ///< ringzero: weight decay applies to biases and norms, too
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;  ///< ringzero.unused_parameters
  std::vector<std::string> warnings;
};

/// Errors are Errc::config, "FILE: key.path: reason; remedy", or Errc::unsupported.
DsConfig read_ds_config(const std::string& path);
DsConfig parse_ds_config(std::string_view text, const std::string& file);

/// Two of the three sizes determine the third. Errc::config, with the numbers, if they do not divide exactly.
/// Train or micro alone imply accumulation 1. Accumulation alone, or none of the three, is an error.
BatchSizes resolve_batch(const DsConfig&, int ranks);

/// The effective configuration, with every supported key written out, as JSON that parse_ds_config accepts.
std::string resolved_json(const DsConfig&, const BatchSizes&);

}  // namespace rz
