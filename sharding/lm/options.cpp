#include "sharding/lm/options.h"

#include <filesystem>

#include "comm/core/byte_size.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"

namespace rz::lm {
namespace {

/// The number of updates has three names.
void read_steps(Options& o) {
  const TrainingArguments& a = o.arguments;
  const bool max_steps = a.max_steps && *a.max_steps >= 0;  // -1 is none, as in Trainer
  require(int{o.steps.has_value()} + int{max_steps} + int{a.num_train_epochs.has_value()} <= 1, Errc::config,
          "--steps, --max-steps and --num-train-epochs exclude each other");
  if (max_steps) o.steps = a.max_steps;
}

}  // namespace

void complete(Options& o) {
  read_steps(o);
  require(o.save_dtype == "f32" || o.save_dtype == "bf16" || o.save_dtype == "f16", Errc::config,
          "--save-dtype: is '", o.save_dtype, "', expected f32, bf16 or f16");
  require(o.long_samples == "cut" || o.long_samples == "refuse", Errc::config, "--long-samples: is '",
          o.long_samples, "', expected cut or refuse");
  require(o.sample_tokens >= 1 && o.seq_len.value_or(1) >= 1, Errc::config,
          "--sample-tokens and --seq-len: must be at least 1");
  require(o.data.empty() || o.tokens.empty(), Errc::config, "--data and --tokens: give one of them");
  require(o.eval_data.empty() || !o.validation_split_percentage, Errc::config,
          "--eval-data and --validation-split-percentage: give one of them");
  byte_size_of_flag("--max-shard-size", o.max_shard_size, 1);
  const bool data = !o.data.empty() || !o.tokens.empty();
  if (!data && o.sample && o.steps.value_or(0) == 0) {
    // A folder with weights is sampled from.
    if (o.init.empty() && o.resume().empty() && std::filesystem::is_directory(o.model)) o.init = o.model;
    require(
        !o.init.empty() || !o.resume().empty(), Errc::config,
        "--sample: without training, weights are needed; add --init MODEL.safetensors, or give their folder "
        "as --model");
    o.steps = 0, o.samples_only = true;
    return;
  }
  require_configuration(o);
  require(o.prompt_key.empty() == o.answer_key.empty(), Errc::config,
          "--prompt-key and --answer-key: give both, or none");
  require(o.prompt_key.empty() || !o.data.empty(), Errc::config,
          "--prompt-key: prompts and answers are of --data, in records of .jsonl");
  require(o.prompt_key.empty() || !o.document_mask, Errc::config,
          "--document-mask: has no use with --prompt-key, where a sample is one prompt and its answer");
  require(data, Errc::config, "nothing to train on; give --data FILE|DIR or --tokens TOKENS");
}

void require_configuration(const Options& o) {
  require(!o.config.empty() || !environment_variable("RZ_CONFIG").value_or("").empty() ||
              o.arguments.learning_rate,
          Errc::config,
          "--config is required, a DeepSpeed configuration, or RZ_CONFIG; or give --learning-rate X and "
          "--per-device-train-batch-size N, e.g. 0.001 and 8");
}

}  // namespace rz::lm
