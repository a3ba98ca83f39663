#pragma once
/// Options of a run of a language model.

#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "../config/ds_config.h"
#include "../config/training_arguments.h"
#include "../data/text_documents.h"

namespace rz::lm {

/// Equal on all ranks, except for paths, threads and callbacks. Errors name an option as train_lm's flag:
/// --seq-len is seq_len.
struct Options {
  std::string model;                   ///< Hugging Face config.json
  std::string init;                    ///< model.safetensors; empty: random initial weights from the seed
  std::string adapter;                 ///< folder of PEFT's files; empty: none, or a new one
  std::string save_adapter;            ///< folder; empty: the adapter is not saved
  std::string data;                    ///< text, as for text_files()
  std::string tokenizer;               ///< of the text; empty: that of the model
  std::string text_key = "text";       ///< of records
  std::string prompt_key, answer_key;  ///< of records, of which the answers are learnt; or empty
  std::string long_samples = "cut";    ///< or "refuse": prompts with answers that are longer than a sample
  std::string tokens;                  ///< as for Tokens::from_file(); alternative to `data`
  std::string tokens_dtype = "auto";   ///< of files without a header
  std::string eval_data;               ///< what is evaluated, of the form of `data` or `tokens`; or empty
  std::optional<double> validation_split_percentage;  ///< of the data: evaluated, and not trained on
  std::string config;                   ///< DeepSpeed configuration; empty: RZ_CONFIG, or flags alone
  std::string strategy;                 ///< empty: from zero_optimization.stage
  std::string metrics;                  ///< metrics.jsonl; empty: not written
  std::string tensorboard;              ///< folder of event files; empty: as the configuration has it
  std::string trace;                    ///< file of a timeline; empty: as the configuration has it
  std::string trace_steps;              ///< "A:B", updates counted from 1; empty: the default
  std::string save;                     ///< directory; empty: the model is not saved
  std::string save_dtype = "f32";       ///< of the weights in it
  std::string max_shard_size = "50GB";  ///< of a file of weights in it
  std::optional<std::string> sample;    ///< prompt of a text sample at the end
  std::optional<std::int64_t> seq_len;  ///< default: the number of positions of the model
  std::optional<std::int64_t> steps;    ///< default: one pass over the data
  std::int64_t sample_tokens = 200;
  double sample_temperature = 0.8;
  std::int64_t sample_top_k = 0;  ///< 0: all tokens
  TrainingArguments arguments;    ///< what the DeepSpeed configuration leaves open
  Decay decay = Decay::matrices;
  std::uint64_t seed = 0;
  std::int64_t threads = 0;         ///< per rank; 0: this rank's share of the processors
  std::optional<double> bucket_mb;  ///< default: zero_optimization.reduce_bucket_size, or 25
  bool shuffle = true, overlap = true, recompute = false, graph = true, save_nonfinite = false;
  bool document_mask = false;  ///< attention stays within documents
  bool samples_only = false;   ///< nothing is trained: a sample is drawn from weights
  std::FILE* log = stdout;     ///< of rank 0, as EngineOptions::log
  /// Begins to show, on rank 0, how a text becomes tokens: the result is called meanwhile. Or empty.
  std::function<std::function<void(const TextProgress&)>()> show_text;

  /// The flag of this file or folder; absent: it is from the configuration, or there is none.
  std::string resume() const { return arguments.resume_from_checkpoint.value_or(""); }
  std::string checkpoint_dir() const { return arguments.output_dir.value_or(""); }
};

/// Settles, once, what several options say together: `steps`, and `samples_only` where there are no data. Run
/// calls it for options without inputs.
/// Errc::config for options that exclude each other, or that lack another one.
void complete(Options&);

/// Errc::config without a configuration and without the options that stand for one.
void require_configuration(const Options&);

}  // namespace rz::lm
