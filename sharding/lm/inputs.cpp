#include "sharding/lm/inputs.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <variant>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/layers.h"
#include "comm/bootstrap.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/topology.h"
#include "sharding/config/arguments.h"
#include "sharding/engine/engine_options.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/json.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz::lm {
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

// ---- the tokenizer

/// The tokens that end texts by config.json itself: none without the key.
std::vector<std::int64_t> end_tokens(const std::string& path) {
  const nlohmann::json config = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const auto found = config.find("eos_token_id");
  std::vector<std::int64_t> tokens;
  if (found == config.end()) return tokens;
  for (const nlohmann::json& token : found->is_array() ? *found : nlohmann::json::array({*found}))
    if (token.is_number_integer()) tokens.push_back(token.get<std::int64_t>());
  return tokens;
}

/// `place`: where the end token is from.
void check_end_token(const Options& o, std::optional<std::int32_t> end, const std::string& place) {
  const std::string path = config_file(o.model);
  const std::vector<std::int64_t> tokens = end_tokens(path);
  if (!end || tokens.empty() || std::ranges::find(tokens, *end) != tokens.end()) return;
  fail(Errc::config, path, ": eos_token_id: is ", tokens[0], ", and the end token of ", place, " is ", *end,
       "; use the tokenizer that belongs to the model, or correct the key");
}

void check_tokenizer(const Options& o, const Inputs& in) {
  const std::size_t vocabulary = in.model->facts().vocabulary;
  require(in.tokenizer->ordinary_vocab_size() <= vocabulary, Errc::config, in.tokenizer_name,
          ": the tokenizer has ", in.tokenizer->ordinary_vocab_size(), " tokens, and ", o.model,
          " only vocab_size ", vocabulary, "; use the tokenizer that belongs to the model, or ",
          "a larger vocab_size for a model without trained weights");
  check_end_token(o, in.tokenizer->eos_token_id(), in.tokenizer_name);
}

/// The tokenizer of a flag, of the model or of its weights, or of the folder of tokens; else none.
void find_tokenizer(const Options& o, Inputs& in, const std::string& of_tokens = "") {
  if (in.tokenizer) return;
  std::string& name = in.tokenizer_name;
  name = o.tokenizer;
  for (const std::string& folder : {in.model->origin().folder, o.init, of_tokens})
    if (name.empty() && !folder.empty() && has_tokenizer(folder)) name = folder;
  if (name.empty()) return;
  try {
    in.tokenizer = Tokenizer::from_pretrained(name);
  } catch (const Error& e) {
    if (o.tokenizer.empty()) throw;
    fail(e.code(), "--tokenizer: ", e.what());
  }
  check_tokenizer(o, in);
}

/// Bytes are the tokens of a vocabulary of 256 if nothing else is known.
void assume_bytes(Inputs& in) {
  const ModelFacts facts = in.model->facts();
  if (!in.tokenizer && facts.vocabulary == 256) in.tokenizer = Tokenizer::bytes(facts.positions);
}

void find_tokenizer_of_text(const Options& o, Inputs& in) {
  const bool evaluates_text = !o.eval_data.empty() && o.tokens.empty();
  const bool reads_text = !o.data.empty() || evaluates_text;
  if (!reads_text && !o.samples_only && o.tokenizer.empty()) return;
  find_tokenizer(o, in);
  if (!reads_text) return;
  assume_bytes(in);
  require(in.tokenizer.has_value(), Errc::config,
          o.data.empty() ? "--eval-data: " : "--data: ", o.data.empty() ? o.eval_data : o.data,
          ": there is no tokenizer beside ", o.model,
          ", and text read as bytes needs a model of vocab_size 256; it has ", in.model->facts().vocabulary,
          "; give --tokenizer FOLDER, or --tokens FILE");
}

/// Folders of the program tokenize name their tokenizer.
void check_indices(const Options& o, const Tokens& tokens, Inputs& in) {
  for (const TokensIndex& index : tokens.indices()) {
    const std::size_t vocabulary = in.model->facts().vocabulary;
    const std::string own = (fs::path(index.path).parent_path() / "tokenizer").string();
    const auto lacks_special_tokens_alone = [&] {
      return has_tokenizer(own) && Tokenizer::from_pretrained(own).ordinary_vocab_size() <= vocabulary;
    };
    require(index.vocab_size <= vocabulary || lacks_special_tokens_alone(), Errc::config, index.path,
            ": vocab_size: the tokens are of ", index.vocab_size, " kinds, and ", o.model, " has vocab_size ",
            vocabulary, "; use tokens of the model's tokenizer, or ",
            "a larger vocab_size for a model without trained weights");
    check_end_token(o, index.eos_token_id, index.path);
    find_tokenizer(o, in, own);
    require(!in.tokenizer || in.tokenizer->checksum() == index.tokenizer, Errc::config, index.path,
            ": tokenizer: its tokens are of another one than ", in.tokenizer_name,
            "; make them with that one, or give --tokenizer ", own);
  }
}

/// The token of an index, or of the tokenizer.
void find_document_end(const Options& o, Inputs& in) {
  if (!o.document_mask || o.samples_only) return;
  find_tokenizer(o, in);
  const std::span<const TokensIndex> indices = in.tokens.indices();
  in.document_end = !indices.empty() ? indices[0].eos_token_id
                    : in.tokenizer   ? in.tokenizer->eos_token_id()
                                     : std::nullopt;
  require(in.document_end.has_value(), Errc::config, "--document-mask: ",
          !indices.empty() ? indices[0].path
          : in.tokenizer
              ? concat("the tokenizer ", in.tokenizer_name.empty() ? "of bytes" : in.tokenizer_name)
              : in.tokens.name(),
          " has no token that ends documents; ",
          in.tokenizer ? "use another tokenizer" : "give --tokenizer FOLDER");
  require(static_cast<std::size_t>(*in.document_end) < in.model->facts().vocabulary, Errc::config,
          "--document-mask: the token that ends documents is ", *in.document_end, ", and ", o.model,
          " has vocab_size ", in.model->facts().vocabulary, "; use the tokenizer that belongs to the model");
  if (in.validation) in.validation->document_end = in.document_end;
}

void check_sample(const Options& o, Inputs& in) {
  if (!o.sample) return;
  find_tokenizer(o, in);
  assume_bytes(in);
  require(in.tokenizer.has_value(), Errc::config, "--sample: there is no tokenizer beside ", o.model,
          ", and a text of bytes needs vocab_size 256; it has ", in.model->facts().vocabulary,
          "; give --tokenizer FOLDER");
  std::vector<std::int32_t> tokens = in.tokenizer->encode(*o.sample);
  if (tokens.empty() && in.tokenizer->eos_token_id()) tokens = {*in.tokenizer->eos_token_id()};
  for (const std::int32_t t : tokens)
    require(static_cast<std::size_t>(t) < in.model->facts().vocabulary, Errc::config,
            "--sample: has the token \"", in.tokenizer->id_to_token(t), "\" (", t, "), and ", o.model,
            " has vocab_size ", in.model->facts().vocabulary, "; use a text without it");
}

/// What the configuration may ask for and this program does not have yet.
void check_optimizer(const Options& o, DsConfig& ds) {
  require(ds.optimizer.has_value(), Errc::config, ds.file,
          ": optimizer: missing; add the section, or give --learning-rate for AdamW");
  const auto optimizer = make_optimizer(*ds.optimizer, o.decay);
  check_schedule(ds, ds.schedule, *optimizer);
  if (!scheduled_betas(ds.schedule, 0)) return;
  if (!optimizer->has_betas(0))
    ds.warnings.push_back(concat(ds.file, ": scheduler.params.cycle_momentum: has no effect: ",
                                 name(ds.optimizer->type), " has no betas, as in DeepSpeed"));
}

void apply_trace_flags(const Options& o, TraceConfig& trace) {
  require(o.trace_steps.empty() || !o.trace.empty(), Errc::config, "--trace-steps needs --trace FILE");
  if (o.trace.empty()) return;
  trace.path = o.trace;
  if (o.trace_steps.empty()) return;
  const std::vector<std::string> ends = parts_of(o.trace_steps, ':');
  const auto first = parse_number<std::int64_t>(ends.front()), last = parse_number<std::int64_t>(ends.back());
  require(ends.size() == 2 && first && last && *first >= 1 && *last >= *first && *last - *first < 1000,
          Errc::config, "--trace-steps: ", o.trace_steps,
          ": expected A:B, the first and the last of at most ", "1000 updates, e.g. 4:5");
  trace.first_step = *first;
  trace.steps = *last - *first + 1;
}

/// Flags that stand for sections of the configuration.
void apply_report_flags(const Options& o, DsConfig& ds) {
  apply_trace_flags(o, ds.trace);
  if (o.tensorboard.empty()) return;
  ds.monitor.tensorboard_enabled = true;
  ds.monitor.tensorboard_output_path = o.tensorboard;
  ds.monitor.tensorboard_job_name = "";
}

TextOptions text_options(const Options& o, const Inputs& in) {
  TextOptions t{.text_key = o.text_key,
                .prompt_key = o.prompt_key,
                .answer_key = o.answer_key,
                .outputs = {o.save, o.metrics, o.tensorboard, o.trace, o.checkpoint_dir(), o.resume()}};
  const bool as_bytes = in.tokenizer->checksum() == Tokenizer::bytes().checksum() && o.prompt_key.empty();
  if (!as_bytes) t.tokenizer = in.tokenizer;
  if (o.long_samples == "refuse") t.max_pair_tokens = in.seq_len + 1;
  const LaunchInfo launch = launch_info_from_environment();
  t.threads = o.threads > 0 ? static_cast<int>(o.threads)
                            : std::max(1, usable_processors() / std::max(1, launch.local_size));
  if (launch.rank == 0 && o.show_text) t.on_progress = o.show_text();
  return t;
}

Tokens tokens_of(const Options& o, Inputs& in, const std::string& data, const std::string& flag) {
  try {
    if (!o.tokens.empty()) return Tokens::from_file(data, o.tokens_dtype);
    const auto start = std::chrono::steady_clock::now();
    const Tokens tokens = Tokens::from_text(data, text_options(o, in));
    in.tokenize_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return tokens;
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
  in.tokens = tokens_of(o, in, o.tokens.empty() ? o.data : o.tokens, "");
  in.samples = in.tokens.samples(in.seq_len);
  if (o.validation_split_percentage) split_samples(*o.validation_split_percentage, in);
  if (o.eval_data.empty()) return;
  const Tokens tokens = tokens_of(o, in, o.eval_data, "--eval-data");
  in.validation = {tokens, 0, tokens.samples(in.seq_len)};
}

/// Data and times of evaluations belong together.
void check_evaluation(const Options& o, const DsConfig& ds) {
  const CheckpointConfig& c = ds.checkpoint;
  const bool has_data = !o.eval_data.empty() || o.validation_split_percentage;
  require(has_data || c.eval_steps == 0, Errc::config,
          o.arguments.eval_steps ? typed_flag(o.arguments, "eval_steps") : ds.file,
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
  require(c.eval_steps == 0 || c.metric_for_best_model == "eval_loss", Errc::config, ds.file,
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

constexpr const char* no_config = "no --config";  // in messages

DsConfig configuration(const Options& o, const TrainingArguments& a, const RunFacts& facts) {
  return find_ds_config(o.config, o.config.empty() ? no_config : "--config", a, facts);
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
  const DsConfig ds = configuration(o, a, facts);
  require(ds.checkpoint.saves(), Errc::config, typed_flag(a, argument),
          ": there is no folder for checkpoints; add --output-dir DIR, or ringzero.checkpoint.output_dir to ",
          ds.file == no_config ? "a configuration" : ds.file);
}

DsConfig read_config(const Options& o, Inputs& in, int ranks, int ranks_per_node) {
  const RunFacts facts{.ranks = ranks,
                       .ranks_per_node = ranks_per_node,
                       .hidden_size = static_cast<std::int64_t>(in.model->facts().channels),
                       .updates = [&](const BatchSizes& sizes) { return updates_of(o, in, sizes); },
                       .adamw_by_default = o.arguments.learning_rate.has_value()};
  check_save_flags(o, facts);
  return configuration(o, o.arguments, facts);
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

void check_file(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  const fs::path parent = fs::absolute(path).parent_path();
  require(fs::is_directory(parent), Errc::config, flag, ": ", path, ": there is no folder ", parent.string(),
          "; make it first");
  require(!fs::is_directory(path), Errc::config, flag, ": ", path, " is a folder; name a file");
  require_writable(flag.c_str(), path, fs::exists(path) ? fs::path(path) : parent);
}

bool is_same_folder(const std::string& a, const std::string& b) {
  return !a.empty() && !b.empty() && fs::weakly_canonical(a) == fs::weakly_canonical(b);
}

/// A saved model has its folder for itself: neither an adapter nor files of another model may be read with
/// it, and those of --init are not removed.
void check_saved_folder(const Options& o, const Inputs& in) {
  if (o.save.empty()) return;
  require(
      !is_same_folder(o.save, o.save_adapter), Errc::config, "--save-adapter: ", o.save_adapter,
      " is the folder of --save, too, and from_pretrained() of transformers would apply the adapter to the "
      "model, in which it is merged; name another folder");
  try {
    require_no_adapter_in(o.save);
  } catch (const Error& e) {
    fail(e.code(), "--save: ", e.what());
  }
  if (!is_same_folder(o.save, o.init) || is_same_folder(o.save, in.model->origin().folder)) return;
  const bool loses_files =
      (!in.tokenizer && has_tokenizer(o.save)) || fs::exists(fs::path(o.save) / "generation_config.json");
  require(!loses_files, Errc::config, "--save: ", o.save,
          " is the folder of --init, and its tokenizer or generation_config.json would be removed, as the "
          "model of --model has none; give --model ",
          o.save, ", or name another folder");
}

void check_outputs(const Options& o, const Inputs& in) {
  check_file("--metrics", o.metrics);
  check_file("--trace", o.trace);
  check_folder("--tensorboard", o.tensorboard);
  check_folder("--save", o.save);
  check_folder("--save-adapter", o.save_adapter);
  check_saved_folder(o, in);
  check_checkpoints(o, in.ds.checkpoint);
}

/// That of the configuration, or of --adapter.
void add_adapter(const Options& o, Inputs& in) {
  const bool is_of_adapter = !o.adapter.empty() && !in.ds.lora;
  if (is_of_adapter) try {
      in.ds.lora = read_adapter_config(o.adapter);
    } catch (const Error& e) {
      fail(e.code(), "--adapter: ", e.what());
    }
  require(o.save_adapter.empty() || in.ds.lora, Errc::config, "--save-adapter: there is no adapter; add ",
          "ringzero.lora to the configuration, --lora-target-modules or --adapter");
  if (is_of_adapter) try {
      add_lora(*in.model, *in.ds.lora);
    } catch (const Error& e) {
      fail(Errc::config, "--adapter: ", o.adapter, ": ", e.what());
    }
  prepare_model(*in.model, in.ds);
}

PretrainedWeights open_checkpoint(const Options& o, Inputs& in) {
  try {
    PretrainedWeights weights(o.init, *in.model, {.seed = o.seed, .nonfinite = o.save_nonfinite});
    if (const std::string what = weights.describe(); !what.empty())
      in.ds.warnings.push_back(concat("--init: ", what));
    if (const std::string line = adapter_beside(o.init); o.adapter.empty() && !line.empty())
      in.ds.warnings.push_back(concat("--init: ", line));
    const bool has_adapter = std::ranges::any_of(
        lora_layers(*in.model), [&](const auto& named) { return weights.contains(named.second->lora->a); });
    require(o.adapter.empty() || !has_adapter, Errc::config, o.init,
            ": has an adapter of its own, in whose place --adapter would come; merge it before: checkpoint "
            "merge ",
            o.init, " OUT");
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

Inputs read_model_inputs(const Options& o, int ranks, int ranks_per_node) {
  Inputs in;
  std::vector<std::string> absent;
  in.model = language_model_from_config(o.model, &absent);
  const ModelFacts facts = in.model->facts();
  find_tokenizer_of_text(o, in);
  in.seq_len = seq_len_of(o, facts.positions);
  in.ds = read_config(o, in, ranks, ranks_per_node);
  const auto tp = static_cast<std::size_t>(in.ds.mesh.tp);
  require(!in.ds.sequence_parallel || in.seq_len % tp == 0, Errc::config, "--seq-len: ", in.seq_len,
          " tokens cannot be divided between the ", tp,
          " ranks of a tp group, as ringzero.sequence_parallel of ", in.ds.file, " requires; use ",
          std::max(in.seq_len / tp, std::size_t{1}) * tp, " tokens, or set it to false");
  if (!o.samples_only) {
    in.sizes = required_sizes(in.ds);
    check_optimizer(o, in.ds);
  }
  apply_report_flags(o, in.ds);
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

Inputs read_inputs(const Options& o, int rank, int ranks, int ranks_per_node) {
  Inputs in = read_model_inputs(o, ranks, ranks_per_node);
  const int readers = resolved(in.ds.mesh, ranks, ranks_per_node).data();
  const std::size_t vocabulary = in.model->facts().vocabulary;
  check_evaluation(o, in.ds);
  if (rank == 0) check_outputs(o, in);
  if (!o.init.empty()) in.checkpoint = open_checkpoint(o, in);
  read_tokens(o, in);
  require(
      o.samples_only || !o.shuffle || !in.ds.drop_last || in.samples >= static_cast<std::uint64_t>(readers),
      Errc::config, in.tokens.name(), ": ", in.samples, " samples are too few for ", readers,
      " ranks when dataloader_drop_last is true; give more data, or set it to false");
  for (Tokens* tokens : {&in.tokens, in.validation ? &in.validation->tokens : nullptr}) {
    if (!tokens || o.samples_only) continue;
    check_indices(o, *tokens, in);
    tokens->limit_vocabulary(vocabulary);
    if (rank == 0) tokens->check_vocabulary();
  }
  find_document_end(o, in);
  check_sample(o, in);
  return in;
}

Inputs read_inputs(const Options& o, World& world) {
  Inputs in;
  Communicator& comm = world.communicator();
  const int per_node = world.ranks_per_node();
  check_on_all_ranks(comm, [&] { in = read_inputs(o, comm.rank(), comm.size(), per_node); });
  require_same_run(o, in, comm);
  return in;
}

}  // namespace rz::lm
