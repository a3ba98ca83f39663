#include "sharding/lm/run.h"

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/engine/engine.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/lm/engine_of_run.h"
#include "sharding/lm/inputs.h"
#include "sharding/lm/updates.h"
#include "sharding/lm/validation.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz::lm {
namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
  DurableFile file(path.string());
  file.write(text);
  file.commit();
}

/// That tokens are bytes is known of text, and assumed of a model that is only sampled from.
bool knows_tokenizer(const Options& o, const Inputs& in) {
  return in.tokenizer && (!in.tokenizer_name.empty() || !o.data.empty() || o.samples_only);
}

/// Writes the tokens of the beginning and the end of in.tokenizer to the text of a config.json that is saved,
/// if the run's own has no eos_token_id: defaults of its family are those of another tokenizer.
void follow_tokenizer(const Options& o, const Inputs& in, std::string& config) {
  const std::string path = config_file(o.model);
  if (parse_json(read_text_file(path), path, JsonDialect::relaxed).contains("eos_token_id")) return;
  auto json = nlohmann::ordered_json::parse(config);
  const auto set = [&](const char* key, std::optional<std::int32_t> token) {
    const bool known = token && static_cast<std::size_t>(*token) < in.model->facts().vocabulary;
    json[key] = known ? nlohmann::ordered_json(*token) : nlohmann::ordered_json();
  };
  set("bos_token_id", in.tokenizer->bos_token_id()), set("eos_token_id", in.tokenizer->eos_token_id());
  config = json.dump(2) + "\n";
}

/// A checkpoint has the files of a model's folder, and among them the tokenizer of the run.
std::map<std::string, std::string> files_of_model(const Options& o, const Inputs& in) {
  std::map<std::string, std::string> files = files_beside_weights(*in.model);
  if (!knows_tokenizer(o, in)) return files;
  std::erase_if(files, [](const auto& file) { return is_tokenizer_file(file.first); });
  for (const auto& [name, text] : in.tokenizer->files()) files[name] = text;
  follow_tokenizer(o, in, files["config.json"]);
  return files;
}

/// A run goes on with the tokenizer that it began with.
void check_resumed_tokenizer(const Options& o, const Inputs& in, const LoadedCheckpoint& resumed) {
  if (!knows_tokenizer(o, in) || !has_tokenizer(resumed.path)) return;
  require(Tokenizer::from_pretrained(resumed.path).checksum() == in.tokenizer->checksum(), Errc::config,
          resumed.path, ": was trained with another tokenizer than ",
          in.tokenizer_name.empty() ? "bytes" : in.tokenizer_name, "; resume it with --tokenizer ",
          resumed.path, ", or begin a new run with --init ", resumed.path);
}

/// A refused checkpoint of --resume-from-checkpoint, by that flag, and not by the key that it sets.
std::string by_flag(const Options& o, const Inputs& in, const std::string& text) {
  const std::string key = in.ds.file + ": ringzero.checkpoint.resume_from_checkpoint";
  if (!o.arguments.resume_from_checkpoint || !text.starts_with(key)) return text;
  return typed_flag(o.arguments, "resume_from_checkpoint") + text.substr(key.size());
}

Engine make_engine(const Options& o, const Inputs& in, World& world) {
  in.model->checkpoint_activations(o.recompute);
  try {
    return initialize(world, *in.model, engine_options(o, in));
  } catch (const Error& e) {
    if (e.code() != Errc::config) throw;
    throw Error(e.code(), by_flag(o, in, e.what()), e.culprit());
  }
}

/// Tokens to begin a text with: of a prompt, or of the beginning or end of a text, or a line break.
std::vector<std::int32_t> prompt_tokens(const Tokenizer& tokenizer, std::string& prompt) {
  std::vector<std::int32_t> tokens = tokenizer.encode(prompt);
  if (tokens.empty() && tokenizer.eos_token_id()) tokens = {*tokenizer.eos_token_id()};
  if (!tokens.empty()) return tokens;
  prompt = "\n";
  return tokenizer.encode(prompt);
}

}  // namespace

struct Run::State {
  State(World& w, Options options, Inputs inputs)
      : world(w), o(std::move(options)), in(std::move(inputs)), engine(make_engine(o, in, world)) {
    begin();
    if (!o.samples_only) begin_training();
  }

  void begin();
  void begin_training();
  bool ended() { return engine.global_steps() >= static_cast<std::int64_t>(steps) || engine.should_stop(); }

  World& world;
  const Options o;
  const Inputs in;
  Engine engine;
  // Of a run that trains:
  std::unique_ptr<Loader> loader;
  std::optional<EvaluatedData> evaluated;
  std::optional<Validation> validation;
  std::optional<MetricsLog> log;
  std::uint64_t steps = 0;
  UpdateReport last{};
  bool begun = false;
};

/// Errors are alike on every rank.
void Run::State::begin() {
  TrainingCheckpoints& checkpoints = engine.checkpoints();
  check_on_all_ranks(world.communicator(), [&] {
    // A run that is resumed has its adapter in the checkpoint.
    if (!o.adapter.empty() && !checkpoints.resumed()) try {
        engine.load_adapter(o.adapter, {.nonfinite = o.save_nonfinite});
      } catch (const Error& e) {
        fail(Errc::config, "--adapter: ", e.what());
      }
    if (!world.is_main()) return;
    if (checkpoints.resumed()) check_resumed_tokenizer(o, in, *checkpoints.resumed());
    checkpoints.files() = files_of_model(o, in);  // rank 0 writes them
  });
  checkpoints.save_nonfinite(o.save_nonfinite);
}

void Run::State::begin_training() {
  engine.checkpoints().stop_without_saving();
  engine.should_stop();  // Errc::config if another run saves to the folder of checkpoints
  const ContinuousBatchSampler sampler = batch_sampler(engine, in.samples, o.shuffle, o.seed);
  loader.reset(new Loader(token_loader(engine, in.tokens, in.seq_len, sampler, in.document_end)));
  if (in.validation) {
    evaluated.emplace(engine, *in.validation, in.seq_len);
    validation.emplace(engine, *in.validation, in.seq_len);
  }
  steps = static_cast<std::uint64_t>(o.steps ? *o.steps : updates_of_passes(o, sampler.updates()));
  check_on_all_ranks(world.communicator(), [&] {
    log.emplace(world.is_main() ? o.metrics : "", static_cast<std::uint64_t>(engine.global_steps()));
  });
}

Run::Run(World& world, Options o) {
  check_on_all_ranks(world.communicator(), [&] { complete(o); });
  Inputs in = read_inputs(o, world);
  state_ = std::make_unique<State>(world, std::move(o), std::move(in));
}

Run::Run(World& world, Options o, Inputs in)
    : state_(std::make_unique<State>(world, std::move(o), std::move(in))) {}

Run::~Run() = default;

const Inputs& Run::inputs() const { return state_->in; }

Engine& Run::engine() { return state_->engine; }

std::uint64_t Run::steps() const { return state_->steps; }

std::optional<UpdateReport> Run::update() {
  State& s = *state_;
  require_finite(s.last);
  if (!std::exchange(s.begun, true)) evaluate();
  if (s.ended()) return std::nullopt;
  auto report = lm::update(s.engine, *s.in.model, *s.loader, s.in.seq_len, s.o.document_mask);
  if (!report) {
    s.engine.should_stop();  // saves
    return std::nullopt;
  }
  if (report->diverged.empty()) report->eval_loss = evaluate();
  s.log->write(*report);
  s.engine.add_scalar("Train/Samples/tokens_per_second", report->tokens_per_second);
  return s.last = *report;
}

std::optional<double> Run::evaluate() {
  State& s = *state_;
  if (!s.validation || !s.engine.checkpoints().should_evaluate()) return std::nullopt;
  const std::optional<double> loss = s.validation->loss(s.engine, *s.in.model);
  if (!loss) return std::nullopt;
  s.engine.checkpoints().record({{"eval_loss", *loss}});
  if (std::holds_alternative<ReduceLrOnPlateau>(s.in.ds.schedule)) s.engine.lr_scheduler_step(*loss);
  return loss;
}

bool Run::finish() {
  State& s = *state_;
  if (s.o.samples_only) return false;
  TrainingCheckpoints& checkpoints = s.engine.checkpoints();
  const CheckpointConfig& config = checkpoints.config();
  const std::int64_t steps = s.engine.global_steps();
  const auto best = checkpoints.finish();
  if (const SaveDecision& decision = checkpoints.decision(); decision.stops()) {
    s.world.print("stopped by ", describe(decision), " after ", steps, " updates; ",
                  steps == 0        ? "there is nothing to save"
                  : !config.saves() ? "no checkpoint is saved without --output-dir"
                                    : "saved to " + config.output_dir);
    return true;
  }
  if (checkpoints.early_stopped())
    s.world.print("early stopping after ", steps, " updates: eval_loss has not improved in ",
                  *config.early_stopping_patience, " evaluation",
                  *config.early_stopping_patience == 1 ? "" : "s");
  if (const BestMetric& b = checkpoints.best(); b.value)
    s.world.print("best: eval_loss ", fixed(*b.value, 4), " after ", b.step, " updates",
                  best ? "; loaded " : "", best ? best->path : "");
  return false;
}

void Run::save() {
  State& s = *state_;
  const std::filesystem::path adapter = s.o.save_adapter, folder = s.o.save;
  if (!adapter.empty()) {  // evaluate(): not inside a graph's memory
    s.engine.evaluate([&](Tape&) { s.engine.save_adapter(adapter.string()); });
    s.world.print("saved: ", (adapter / "adapter_model.safetensors").string());
  }
  if (folder.empty()) return;
  const SaveOptions how{.nonfinite = s.o.save_nonfinite,
                        .dtype = dtype_from_name(s.o.save_dtype),
                        .max_shard_size = byte_size_of_flag("--max-shard-size", s.o.max_shard_size, 1)};
  try {
    lm::save(s.engine, *s.in.model, s.o.save, how);
  } catch (const Error& e) {
    if (e.code() != Errc::diverged) throw;
    fail(Errc::diverged, e.what(), " (--save-nonfinite)");
  }
  if (!s.world.is_main()) return;
  write_text(folder / "ds_config.json", resolved_json(s.in.ds));
  if (knows_tokenizer(s.o, s.in)) {
    s.in.tokenizer->save_pretrained(s.o.save);
    std::string config = read_text_file((folder / "config.json").string());
    follow_tokenizer(s.o, s.in, config);
    write_text(folder / "config.json", config);
  }
  const bool one = std::filesystem::exists(folder / "model.safetensors");
  s.world.print("saved: ", (folder / (one ? "model.safetensors" : "model.safetensors.index.json")).string());
}

Run::Sample Run::sample(const std::function<void(const std::string&)>& show) {
  State& s = *state_;
  require(s.o.sample.has_value(), Errc::invalid_argument, "Run::sample(): Options::sample has no prompt");
  Sample made{.prompt = *s.o.sample, .text = ""};
  const std::vector<std::int32_t> start = prompt_tokens(*s.in.tokenizer, made.prompt);
  GenerationConfig how{.max_new_tokens = static_cast<std::size_t>(s.o.sample_tokens),
                       .temperature = s.o.sample_temperature,
                       .top_k = static_cast<std::size_t>(s.o.sample_top_k),
                       .seed = s.o.seed};
  if (const auto eos = s.in.tokenizer->eos_token_id()) how.eos_token_id = {*eos};
  DecodeStream stream(*s.in.tokenizer, true, start);
  const auto add = [&](const std::string& piece) {
    made.text += piece;
    if (show) show(piece);
  };
  if (show) show(made.prompt);
  how.on_token = [&](std::size_t, std::int32_t token) { add(stream.push(token)); };
  lm::sample(s.engine, *s.in.model, start, how);
  add(stream.finish());
  return made;
}

}  // namespace rz::lm
