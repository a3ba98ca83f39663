#include "tools/train_lm/inputs.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <variant>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/config/arguments.h"
#include "sharding/engine/engine_options.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/engine/training_step.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/huggingface/families.h"

namespace rz::train_lm {
namespace {

namespace fs = std::filesystem;

StrategyKind strategy_of(const Options& o, const DsConfig& ds) {
  if (!o.strategy.empty()) try {
      return strategy_from_name(o.strategy);
    } catch (const Error& e) {
      fail(e.code(), "--strategy: ", e.what());
    }
  return strategy_kind(ds);
}

std::size_t seq_len_of(const Options& o, std::size_t positions) {
  const std::size_t length = o.seq_len ? static_cast<std::size_t>(*o.seq_len) : positions;
  require(length <= positions, Errc::config, "--seq-len: ", length, " is beyond the model's ", positions,
          " positions (", o.model, "); give at most that");
  return length;
}

void check_sample(const Options& o, std::size_t vocabulary) {
  require(!o.sample || vocabulary == 256, Errc::config,
          "--sample: text samples need a byte vocabulary, vocab_size 256; ", o.model, " has ", vocabulary);
}

/// Text is read as bytes, which are tokens of no other vocabulary.
void check_text(const Options& o, std::size_t vocabulary) {
  const bool evaluates_text = !o.eval_data.empty() && o.tokens.empty();
  if ((o.data.empty() && !evaluates_text) || vocabulary == 256) return;
  fail(Errc::config, o.data.empty() ? "--eval-data: " : "--data: ", o.data.empty() ? o.eval_data : o.data,
       ": text is read as bytes, which need a model of vocab_size 256; ", o.model, " has ", vocabulary,
       "; encode the text with the tokenizer of that model and give --tokens FILE");
}

/// What the configuration may ask for and this program does not have yet.
void check_optimizer(const Options& o, DsConfig& ds) {
  require(ds.optimizer.has_value(), Errc::config, ds.file,
          ": optimizer: missing; add the section, or give --learning-rate for AdamW");
  const auto optimizer = make_optimizer(*ds.optimizer, o.decay);
  try {
    check(ds.schedule, *optimizer);
  } catch (const Error& e) {
    fail(Errc::config, ds.file, ": scheduler.params: ", e.what());
  }
  if (!scheduled_betas(ds.schedule, 0)) return;
  if (!optimizer->has_betas(0))
    ds.warnings.push_back(concat(ds.file, ": scheduler.params.cycle_momentum: has no effect: ",
                                 name(ds.optimizer->type), " has no betas, as in DeepSpeed"));
}

/// Reports of an engine that this program replaces by its own.
void warn_of_reports(DsConfig& ds) {
  const auto warn = [&](bool on, const char* key, const char* instead) {
    if (on) ds.warnings.push_back(concat(ds.file, ": ", key, ": has no effect: ", instead));
  };
  warn(ds.monitor.wall_clock_breakdown, "wall_clock_breakdown", "train_lm prints the time of whole updates");
  warn(ds.monitor.memory_breakdown, "memory_breakdown", "train_lm prints what is held at the end");
}

Tokens tokens_of(const Options& o, const std::string& data, const std::string& flag) {
  try {
    if (!o.tokens.empty()) return Tokens::from_file(data, o.tokens_dtype);
    return Tokens::from_text(data, std::array{o.save, o.metrics, o.checkpoint_dir(), o.resume()});
  } catch (const Error& e) {
    if (flag.empty()) throw;
    fail(e.code(), flag, ": ", e.what());
  }
}

/// The last samples are evaluated, at least one, and the others trained on.
void split_samples(double percentage, Inputs& in) {
  const auto all = static_cast<double>(in.samples);
  const auto held_out = static_cast<std::uint64_t>(std::ceil(all * percentage / 100));
  require(held_out < in.samples, Errc::config, "--validation-split-percentage: ", percentage, " % of ",
          in.samples, " samples of ", in.tokens.name(), " leave none to train on; use less, or more data");
  in.samples -= held_out;
  in.validation = {in.tokens, in.samples, held_out};
}

void read_tokens(const Options& o, Inputs& in) {
  if (in.samples > 0 || o.samples_only) return;
  in.tokens = tokens_of(o, o.tokens.empty() ? o.data : o.tokens, "");
  in.samples = in.tokens.samples(in.seq_len);
  if (o.validation_split_percentage) split_samples(*o.validation_split_percentage, in);
  if (o.eval_data.empty()) return;
  const Tokens tokens = tokens_of(o, o.eval_data, "--eval-data");
  in.validation = {tokens, 0, tokens.samples(in.seq_len)};
}

/// Data and times of evaluations belong together.
void check_evaluation(const Options& o, const DsConfig& ds) {
  const CheckpointConfig& c = ds.checkpoint;
  const bool has_data = !o.eval_data.empty() || o.validation_split_percentage;
  require(has_data || c.eval_steps == 0, Errc::config,
          o.arguments.eval_steps ? typed_flag(o.arguments, "eval_steps") : o.config,
          ": there is nothing to evaluate; add --eval-data FILE|DIR or --validation-split-percentage P");
  require(!has_data || c.eval_steps > 0, Errc::config,
          o.eval_data.empty() ? "--validation-split-percentage" : "--eval-data",
          ": is never evaluated; add --eval-steps N");
  const bool decides = c.early_stopping_patience || c.load_best_model_at_end;
  require(!decides || c.eval_steps > 0, Errc::config,
          typed_flag(o.arguments,
                     c.early_stopping_patience ? "early_stopping_patience" : "load_best_model_at_end"),
          ": needs evaluations; add --eval-steps N");
  require(!std::holds_alternative<ReduceLrOnPlateau>(ds.schedule) || c.eval_steps > 0, Errc::config, ds.file,
          ": scheduler.type: ReduceLROnPlateau follows eval_loss and needs evaluations; add --eval-steps N");
  require(c.eval_steps == 0 || c.metric_for_best_model == "eval_loss", Errc::config, o.config,
          ": ringzero.checkpoint.metric_for_best_model: train_lm measures eval_loss, found ",
          c.metric_for_best_model);
}

/// Updates of the run: given, or passes over the data, which are read only if the schedule depends on them.
std::int64_t updates_of(const Options& o, Inputs& in, const BatchSizes& sizes) {
  if (o.steps) return std::max<std::int64_t>(1, *o.steps);
  read_tokens(o, in);
  return std::max<std::int64_t>(1,
                                updates_of_passes(o, in.samples / static_cast<std::uint64_t>(sizes.train)));
}

/// Flags about saving need a folder, from a flag or from the file.
void check_save_flags(const Options& o, const RunFacts& facts) {
  TrainingArguments a = o.arguments;
  if (a.output_dir || a.resume_from_checkpoint) return;
  const char* argument = a.save_steps               ? "save_steps"
                         : a.save_minutes           ? "save_minutes"
                         : a.save_total_limit       ? "save_total_limit"
                         : a.async_save             ? "async_save"
                         : a.load_best_model_at_end ? "load_best_model_at_end"
                                                    : nullptr;
  if (!argument) return;
  a.save_steps = a.save_minutes = a.save_total_limit = std::nullopt;
  a.async_save = a.load_best_model_at_end = std::nullopt;
  require(read_ds_config(o.config, a, facts).checkpoint.saves(), Errc::config, typed_flag(a, argument),
          ": there is no folder for checkpoints; add --output-dir DIR, or ringzero.checkpoint.output_dir to ",
          o.config);
}

DsConfig read_config(const Options& o, Inputs& in, int ranks) {
  const RunFacts facts{.ranks = ranks,
                       .hidden_size = static_cast<std::int64_t>(in.model->facts().channels),
                       .updates = [&](const BatchSizes& sizes) { return updates_of(o, in, sizes); },
                       .adamw_by_default = o.arguments.learning_rate.has_value()};
  check_save_flags(o, facts);
  if (o.config.empty()) return parse_ds_config("{}", "no --config", o.arguments, facts);
  return read_ds_config(o.config, o.arguments, facts);
}

/// The nearest existing ancestor of a path that will be created.
fs::path existing_parent(fs::path path) {
  path = fs::absolute(path).lexically_normal();
  while (!fs::exists(path) && path.has_parent_path() && path != path.parent_path()) path = path.parent_path();
  return path;
}

void require_writable(const char* flag, const std::string& path, const fs::path& what) {
  if (::access(what.c_str(), W_OK) == 0) return;
  const int reason = errno;  // of access(): what forms the text may change it
  fail(Errc::config, flag, ": ", path, ": cannot be written: ", what.string(), ": ", std::strerror(reason));
}

/// A folder that exists, or can be made.
void check_folder(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  const fs::path parent = existing_parent(path);
  require(fs::is_directory(parent), Errc::config, flag, ": ", path, ": ", parent.string(),
          " is not a folder");
  require_writable(flag.c_str(), path, parent);
}

void check_checkpoints(const Options& o, const CheckpointConfig& c) {
  const std::string keys = "ringzero.checkpoint.";
  const TrainingArguments& a = o.arguments;
  const std::string resume =
      a.resume_from_checkpoint ? typed_flag(a, "resume_from_checkpoint") : keys + "resume_from_checkpoint";
  const std::string dir = a.output_dir               ? typed_flag(a, "output_dir")
                          : a.resume_from_checkpoint ? resume
                                                     : keys + "output_dir";
  const fs::path resumed = c.resume_from_checkpoint;
  const bool is_file = fs::exists(resumed) && !fs::is_directory(resumed);
  require(!is_file || resumed.filename() == "best" || resumed.filename() == "latest", Errc::config, resume,
          ": ", c.resume_from_checkpoint, ": is not a folder");
  check_folder(dir, c.output_dir);
}

void check_outputs(const Options& o, const CheckpointConfig& checkpoint) {
  if (!o.metrics.empty()) {
    const fs::path parent = fs::absolute(o.metrics).parent_path();
    require(fs::is_directory(parent), Errc::config, "--metrics: ", o.metrics, ": there is no folder ",
            parent.string(), "; make it first");
    require(!fs::is_directory(o.metrics), Errc::config, "--metrics: ", o.metrics,
            " is a folder; name a file");
    require_writable("--metrics", o.metrics, fs::exists(o.metrics) ? fs::path(o.metrics) : parent);
  }
  check_folder("--save", o.save);
  check_folder("--save-adapter", o.save_adapter);
  check_checkpoints(o, checkpoint);
}

/// That of the configuration, or of --adapter.
void add_adapter(const Options& o, Inputs& in) {
  if (!o.adapter.empty() && !in.ds.lora) try {
      in.ds.lora = read_adapter_config(o.adapter);
    } catch (const Error& e) {
      fail(e.code(), "--adapter: ", e.what());
    }
  require(o.save_adapter.empty() || in.ds.lora, Errc::config, "--save-adapter: there is no adapter; add ",
          "ringzero.lora to the configuration, --lora-target-modules or --adapter");
  prepare_model(*in.model, in.ds);
}

PretrainedWeights open_checkpoint(const Options& o, Inputs& in) {
  try {
    PretrainedWeights weights(o.init, *in.model, {.seed = o.seed, .nonfinite = o.save_nonfinite});
    if (const std::string what = weights.describe(); !what.empty())
      in.ds.warnings.push_back(concat("--init: ", what));
    return weights;
  } catch (const Error& e) {
    fail(e.code(), "--init: ", e.what());
  }
}

}  // namespace

std::int64_t updates_of_passes(const Options& o, std::uint64_t updates_of_a_pass) {
  return static_cast<std::int64_t>(
      std::ceil(o.arguments.num_train_epochs.value_or(1) * static_cast<double>(updates_of_a_pass)));
}

Inputs read_model_inputs(const Options& o, int ranks) {
  Inputs in;
  std::vector<std::string> absent;
  in.model = language_model_from_config(o.model, &absent);
  const ModelFacts facts = in.model->facts();
  check_text(o, facts.vocabulary);
  in.seq_len = seq_len_of(o, facts.positions);
  in.ds = read_config(o, in, ranks);
  if (!o.samples_only) {
    in.sizes = required_sizes(in.ds);
    check_optimizer(o, in.ds);
  }
  warn_of_reports(in.ds);
  if (!o.samples_only) in.ds.warnings.insert(in.ds.warnings.end(), absent.begin(), absent.end());
  in.strategy = strategy_of(o, in.ds);
  strategy_options(in.ds, in.strategy);  // checks
  add_adapter(o, in);
  return in;
}

std::string describe_model(LanguageModel& model) {
  const ModelFacts facts = model.facts();
  std::size_t parameters = 0;
  for (const Parameter* p : model.parameters()) parameters += p->count();
  return concat(facts.name, ", ", facts.layers, " layers, ", facts.heads, " heads, ", facts.channels,
                " channels, vocabulary ", facts.vocabulary, ", ",
                fixed(static_cast<double>(parameters) * 1e-6, 2), " M parameters");
}

Inputs read_inputs(const Options& o, int rank, int ranks) {
  Inputs in = read_model_inputs(o, ranks);
  const std::size_t vocabulary = in.model->facts().vocabulary;
  check_sample(o, vocabulary);
  check_evaluation(o, in.ds);
  if (rank == 0) check_outputs(o, in.ds.checkpoint);
  if (!o.init.empty()) in.checkpoint = open_checkpoint(o, in);
  read_tokens(o, in);
  require(o.samples_only || !o.shuffle || !in.ds.drop_last || in.samples >= static_cast<std::uint64_t>(ranks),
          Errc::config, in.tokens.name(), ": ", in.samples, " samples are too few for ", ranks,
          " ranks when dataloader_drop_last is true; give more data, or set it to false");
  for (Tokens* tokens : {&in.tokens, in.validation ? &in.validation->tokens : nullptr}) {
    if (!tokens || o.samples_only) continue;
    tokens->limit_vocabulary(vocabulary);
    if (rank == 0) tokens->check_vocabulary();
  }
  return in;
}

}  // namespace rz::train_lm
