// train_lm: trains a language model on the ranks of a launcher. See --help.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/device/cuda_runtime.h"
#include "comm/os/error_file.h"
#include "comm/os/flight_recorder.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/durable_file.h"
#include "sharding/io/json.h"
#include "sharding/lm/engine_options.h"
#include "sharding/lm/inputs.h"
#include "sharding/lm/language_model.h"
#include "sharding/lm/sample_text.h"
#include "sharding/lm/validation.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/strategy/strategy.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"
#include "tools/train_lm/options.h"
#include "tools/train_lm/report/progress.h"
#include "tools/train_lm/report/throughput.h"
#include "tools/train_lm/report/tracker.h"

namespace rz::train_lm {
namespace {

using namespace lm;

enum Status { done = 0, failed = 1, wrong_input = 2, stopped = stopped_exit_status };

void print_error(const std::string& what) { std::fprintf(stderr, "train_lm: %s\n", what.c_str()); }

/// Whether an error that all ranks throw before anything is written is one of the user; else a rank or the
/// machine has failed.
bool is_wrong_input(const Error& e) {
  return e.code() == Errc::invalid_argument || e.code() == Errc::config || e.code() == Errc::mismatch ||
         e.code() == Errc::io || e.code() == Errc::unsupported;
}

std::string plural(std::uint64_t n, const char* thing) { return concat(n, " ", thing, n == 1 ? "" : "s"); }

/// The parameters with and without weight decay.
void print_groups(const Options& o, const Inputs& in) {
  const auto print_group = [&](const char* what, bool decayed) {
    std::size_t parameters = 0, elements = 0;
    for (const Parameter* p : in.model->parameters())
      if (p->requires_grad && decays(o, *p) == decayed) ++parameters, elements += p->count();
    if (parameters > 0)
      std::printf("  group %s: %s of %zu elements, weight decay %g\n", what,
                  plural(parameters, "parameter").c_str(), elements,
                  decayed ? in.ds.optimizer->weight_decay : 0);
  };
  print_group(o.decay == Decay::all ? "all" : "matrices", true);
  print_group("the rest", false);
}

void print_optimizer(const Options& o, const Inputs& in) {
  const OptimizerConfig& optimizer = *in.ds.optimizer;
  const double max_norm = in.ds.gradient_clipping;
  std::printf("optimizer: %s, lr %g, schedule %s, %s; a parameter that no loss reaches is %s\n",
              name(optimizer.type), optimizer.lr, name(in.ds.schedule),
              max_norm > 0 ? concat("gradients clipped to a norm of ", max_norm).c_str() : "no clipping",
              in.ds.unused_parameters == UnusedParameterPolicy::pytorch
                  ? "skipped, as in PyTorch"
                  : "updated with a gradient of zero, as in DeepSpeed");
  print_groups(o, in);
  if (const PrecisionConfig& p = in.ds.precision; p.parameters != DType::f32)
    std::printf("precision: model in %s, gradients in %s, updates in f32\n", name(p.parameters),
                name(p.gradients));
  if (const auto& autocast = in.ds.precision.autocast)
    std::printf("autocast: products in %s\n", name(*autocast));
}

/// "4 ranks" with other data, and how the ranks are divided.
std::string describe_ranks(const MeshSizes& mesh) {
  const std::string data = plural(static_cast<std::uint64_t>(mesh.data()), "rank");
  return mesh.tp == 1 ? data : concat(data, " of ", mesh.tp, " that share layers");
}

void print_run_summary(const Options& o, const Inputs& in, const Communicator& comm, const MeshSizes& mesh,
                       int threads, std::uint64_t steps) {
  std::fputs(resolved_table(in.ds).c_str(), stdout);
  std::printf("model: %s\n", describe_model(*in.model).c_str());
  if (const std::string lora = describe_lora(*in.model); !lora.empty())
    std::printf("adapter: %s\n", lora.c_str());
  const bool pairs = in.tokens.has_answers();
  std::printf("data: %s, %llu tokens, %s of %s%zu + 1%s\n", in.tokens.name().c_str(),
              static_cast<unsigned long long>(in.tokens.count()), plural(in.samples, "sample").c_str(),
              pairs ? "a prompt and its answer, up to " : "", in.seq_len, pairs ? " tokens" : "");
  if (in.tokenizer)
    std::printf("tokenizer: %s, %zu tokens%s\n",
                in.tokenizer_name.empty() ? "bytes" : in.tokenizer_name.c_str(), in.tokenizer->vocab_size(),
                in.tokenize_seconds > 0
                    ? concat("; text read in ", fixed(in.tokenize_seconds, 1), " s").c_str()
                    : "");
  if (in.validation)
    std::printf("evaluation: %s, %s, after every %s\n", in.validation->tokens.name().c_str(),
                plural(in.validation->samples, "sample").c_str(),
                plural(static_cast<std::uint64_t>(in.ds.checkpoint.eval_steps), "update").c_str());
  std::printf("run: %s on %s with %s each (%s), %s of batch %lld = %lld × accumulation %lld × %s\n",
              name(in.strategy), plural(comm.size(), "rank").c_str(), plural(threads, "thread").c_str(),
              comm.describe().c_str(), plural(steps, "update").c_str(),
              static_cast<long long>(in.sizes.train), static_cast<long long>(in.sizes.micro),
              static_cast<long long>(in.sizes.accumulation), describe_ranks(mesh).c_str());
  if (mesh.replicate > 1 || mesh.tp > 1) std::printf("mesh: %s\n", describe(mesh).c_str());
  print_optimizer(o, in);
  std::fflush(stdout);
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  DurableFile file(path.string());
  file.write(text);
  file.commit();
}

void save_adapter(const Options& o, Engine& engine) {
  if (o.save_adapter.empty()) return;
  engine.evaluate([&](Tape&) { engine.save_adapter(o.save_adapter); });  // not inside a graph's memory
  engine.world().print("saved: ",
                       (std::filesystem::path(o.save_adapter) / "adapter_model.safetensors").string());
}

/// That tokens are bytes is known of text, and assumed of a model that is only sampled from.
bool knows_tokenizer(const Options& o, const Inputs& in) {
  return in.tokenizer && (!in.tokenizer_name.empty() || !o.data.empty() || o.samples_only);
}

void save_model(const Options& o, Inputs& in, Engine& engine) {
  save_adapter(o, engine);
  if (o.save.empty()) return;
  const std::filesystem::path folder = o.save;
  try {
    save(engine, *in.model, o.save,
         {.nonfinite = o.save_nonfinite,
          .dtype = dtype_from_name(o.save_dtype),
          .max_shard_size = byte_size_of_flag("--max-shard-size", o.max_shard_size, 1)});
  } catch (const Error& e) {
    if (e.code() != Errc::diverged) throw;
    fail(Errc::diverged, e.what(), " (--save-nonfinite)");
  }
  if (!engine.world().is_main()) return;
  write_text(folder / "ds_config.json", resolved_json(in.ds));
  if (knows_tokenizer(o, in)) {
    in.tokenizer->save_pretrained(o.save);
    std::string config = read_text_file((folder / "config.json").string());
    follow_tokenizer(o, in, config);
    write_text(folder / "config.json", config);
  }
  const bool one = std::filesystem::exists(folder / "model.safetensors");
  std::printf("saved: %s\n", (folder / (one ? "model.safetensors" : "model.safetensors.index.json")).c_str());
}

/// Tokens to begin a text with: of a prompt, or of the beginning or end of a text, or a line break.
std::vector<std::int32_t> prompt_tokens(const Tokenizer& tokenizer, std::string& prompt) {
  std::vector<std::int32_t> tokens = tokenizer.encode(prompt);
  if (tokens.empty() && tokenizer.eos_token_id()) tokens = {*tokenizer.eos_token_id()};
  if (!tokens.empty()) return tokens;
  prompt = "\n";
  return tokenizer.encode(prompt);
}

/// Rank 0 prints the text while it is made.
void show_sample(const Options& o, Inputs& in, Engine& engine) {
  if (!o.sample) return;
  std::string prompt = *o.sample, text;
  const std::vector<std::int32_t> start = prompt_tokens(*in.tokenizer, prompt);
  GenerationConfig how{.max_new_tokens = static_cast<std::size_t>(o.sample_tokens),
                       .temperature = o.sample_temperature,
                       .top_k = static_cast<std::size_t>(o.sample_top_k),
                       .seed = o.seed};
  if (const auto eos = in.tokenizer->eos_token_id()) how.eos_token_id = {*eos};
  DecodeStream stream(*in.tokenizer, true, start);
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (!engine.world().is_main()) return;
    std::fputs(printable(piece).c_str(), stdout);
    std::fflush(stdout);
  };
  engine.world().print("sample:");
  if (engine.world().is_main()) std::fputs(printable(prompt).c_str(), stdout);
  how.on_token = [&](std::size_t, std::int32_t token) { show(stream.push(token)); };
  sample(engine, *in.model, start, how);
  show(stream.finish());
  if (!engine.world().is_main()) return;
  std::fputc('\n', stdout);
  const KnownWords words = known_words(prompt, text, o.samples_only ? "" : in.tokens.text());
  if (words.all > 0) std::printf("%s\n", describe(words).c_str());
}

/// What the updates of a run reported.
struct Course {
  double first_loss = 0, last_loss = 0;
  std::vector<double> speeds;
  double seconds = 0;
  MeshTraffic last_update;
};

/// Sends the checkpoint that the engine has begun to save since `saved`.
void track_checkpoint(Engine& engine, Tracker& tracker, std::int64_t saved) {
  const std::int64_t now = engine.checkpoints().saved_steps();
  if (now == saved) return;
  tracker.send("checkpoint", concat(R"("step": )", now - 1, R"(, "folder": )",
                                    json_text(engine.checkpoints().config().output_dir)));
}

/// Collective.
bool should_stop(Engine& engine, Tracker& tracker) {
  const std::int64_t saved = engine.checkpoints().saved_steps();
  const bool stops = engine.should_stop();
  track_checkpoint(engine, tracker, saved);
  return stops;
}

Course run_updates(const Options& o, Inputs& in, Engine& engine, Loader& loader, std::uint64_t steps,
                   Tracker& tracker) {
  const bool first = engine.world().is_main();
  const auto first_step = static_cast<std::uint64_t>(engine.global_steps());
  MetricsLog log(first ? o.metrics : "", first_step);
  const std::int64_t interval = print_interval(in.ds.monitor);
  Progress progress(stdout, ::isatty(STDOUT_FILENO) == 1, steps, first_step,
                    interval > 0 ? std::optional(interval) : std::nullopt);
  std::optional<Validation> validation;
  if (in.validation) validation.emplace(engine, *in.validation, in.seq_len);
  Course course;
  const auto start = std::chrono::steady_clock::now();
  const auto evaluate = [&]() -> std::optional<double> {
    if (!validation || !engine.checkpoints().should_evaluate()) return {};
    const std::optional<double> loss = validation->loss(engine, *in.model);
    if (!loss) return {};
    engine.checkpoints().record({{"eval_loss", *loss}});
    if (std::holds_alternative<ReduceLrOnPlateau>(in.ds.schedule)) engine.lr_scheduler_step(*loss);
    return loss;
  };
  const auto track_evaluation = [&](double loss) {
    tracker.send("evaluation", concat(R"("step": )", engine.global_steps() - 1, R"(, "eval_loss": )",
                                      std::isfinite(loss) ? concat(loss) : "null"));
  };
  if (const auto loss = evaluate()) {  // the run was stopped in this evaluation
    track_evaluation(*loss);
    engine.world().print("evaluated after ", first_step, " updates: eval_loss ", fixed(*loss, 4));
  }
  for (std::uint64_t step = first_step; step < steps && !should_stop(engine, tracker); ++step) {
    const MeshTraffic before = engine.strategy().traffic();
    std::optional<UpdateReport> made = update(engine, *in.model, loader, in.seq_len, o.document_mask);
    if (!made) {
      should_stop(engine, tracker);  // saves
      break;
    }
    UpdateReport& report = *made;
    course.last_update = engine.strategy().traffic() - before;
    if (report.diverged.empty()) report.eval_loss = evaluate();
    if (step == first_step) course.first_loss = report.loss;
    course.last_loss = report.loss;
    course.speeds.push_back(report.tokens_per_second);
    log.write(report);
    const std::string line = to_json(report);
    tracker.send("update", line.substr(1, line.size() - 2));
    if (report.eval_loss) track_evaluation(*report.eval_loss);
    engine.add_scalar("Train/Samples/tokens_per_second", report.tokens_per_second);
    if (first) progress.update(report);
    std::fputs(engine.breakdown().c_str(), stdout);
    require_finite(report);
  }
  course.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return course;
}

/// Returns whether a signal or the end of an allocation has stopped the run.
bool finish_checkpoints(Engine& engine) {
  TrainingCheckpoints& checkpoints = engine.checkpoints();
  const CheckpointConfig& config = checkpoints.config();
  const World& world = engine.world();
  const SaveDecision& decision = checkpoints.decision();
  const auto best = checkpoints.finish();
  if (decision.stops()) {
    const bool saved = engine.global_steps() > 0;
    world.print("stopped by ", describe(decision), " after ", engine.global_steps(), " updates; ",
                !saved            ? "there is nothing to save"
                : !config.saves() ? "no checkpoint is saved without --output-dir"
                                  : "saved to " + config.output_dir);
    return true;
  }
  if (checkpoints.early_stopped())
    world.print("early stopping after ", engine.global_steps(), " updates: eval_loss has not improved in ",
                plural(static_cast<std::uint64_t>(*config.early_stopping_patience), "evaluation"));
  if (const BestMetric& b = checkpoints.best(); b.value)
    world.print("best: eval_loss ", fixed(*b.value, 4), " after ", b.step, " updates",
                best ? "; loaded " : "", best ? best->path : "");
  return false;
}

/// With --plan beside the plan of rank 0.
void print_memory(const Options& o, const Inputs& in, Engine& engine, const Course& course) {
  const MemoryUse held = engine.memory();
  std::printf("memory: %s\n", describe(held).c_str());
  if (!o.plan) return;
  const MeshSizes& mesh = engine.strategy().mesh().sizes();
  const TrainingPlan plan = plan_run(o, in, {0, mesh.ranks()}, engine.stream().device().kind);
  std::printf("planned: %s\n", describe(plan.memory).c_str());
  if (engine.report().ran_graph) return;  // replays are not counted
  std::printf("sent in an update: %s, planned: %s\n", human_bytes(course.last_update.sent(mesh)).c_str(),
              human_bytes(plan.update.sent(mesh)).c_str());
}

/// What a run that was stopped has done, and how it goes on.
void print_stopped(const Options& o, const Course& course, const Inputs& in, Engine& engine) {
  const std::size_t updates = course.speeds.size();
  const double tokens =
      static_cast<double>(updates) * static_cast<double>(in.sizes.train) * static_cast<double>(in.seq_len);
  std::printf("so far: %s, loss %.4f → %.4f, %.0f tokens in %s\n", plural(updates, "update").c_str(),
              course.first_loss, course.last_loss, tokens, human_duration(course.seconds).c_str());
  if (const BestMetric& best = engine.checkpoints().best(); best.value)
    std::printf("best: eval_loss %.4f after %llu updates\n", *best.value,
                static_cast<unsigned long long>(best.step));
  if (engine.checkpoints().config().saves())
    std::printf("to go on: the same command%s\n", o.resume() == "true" ? "" : " with --resume true");
}

/// Collective.
void print_course(const Options& o, const Course& course, const Inputs& in, Engine& engine,
                  bool was_stopped) {
  const Devices devices = devices_of(engine.world().communicator());
  if (!engine.world().is_main() || course.speeds.empty()) return;
  const double flops = flops_per_token(*in.model, in.seq_len);
  if (was_stopped)
    print_stopped(o, course, in, engine);
  else
    std::printf("done: %s, loss %.4f → %.4f\n", plural(course.speeds.size(), "update").c_str(),
                course.first_loss, course.last_loss);
  std::printf("%s\n", describe_throughput(median(course.speeds), flops, devices).c_str());
  print_memory(o, in, engine, course);
  std::fputs(engine.log_summary().c_str(), stdout);
}

/// JSON has line ends between its tokens only.
std::string one_line_of(std::string json) {
  std::erase(json, '\n');
  return json;
}

/// Members of the first object of --track.
std::string start_of_run(const Inputs& in, Engine& engine, std::uint64_t steps) {
  return concat(R"("program": "train_lm", "ranks": )", engine.world().size(), R"(, "first_step": )",
                engine.global_steps(), R"(, "steps": )", steps, R"(, "config": )",
                one_line_of(resolved_json(in.ds)));
}

Status run_engine(const Options& o, Inputs& in, Engine& engine) {
  World& world = engine.world();
  if (o.samples_only) {
    if (world.is_main()) std::printf("model: %s\n", describe_model(*in.model).c_str());
    if (const std::string line = engine.checkpoints().describe_resume(); !line.empty()) world.print(line);
    show_sample(o, in, engine);
    save_model(o, in, engine);
    world.wait_for_everyone();
    return done;
  }
  const ContinuousBatchSampler sampler = batch_sampler(engine, in.samples, o.shuffle, o.seed);
  Loader loader = token_loader(engine, in.tokens, in.seq_len, sampler, in.document_end);
  std::optional<EvaluatedData> evaluated;
  if (in.validation) evaluated.emplace(engine, *in.validation, in.seq_len);
  const std::uint64_t steps =
      static_cast<std::uint64_t>(o.steps ? *o.steps : updates_of_passes(o, sampler.updates()));
  if (world.is_main())
    print_run_summary(o, in, world.communicator(), engine.mesh().sizes(), engine.stream().threads(), steps);
  if (const std::string line = engine.checkpoints().describe_resume(); !line.empty()) world.print(line);
  for (const std::string& line : in.tokens.left_out()) world.print("warning: ", line);
  if (in.validation)
    for (const std::string& line : in.validation->tokens.left_out())
      if (std::ranges::find(in.tokens.left_out(), line) == in.tokens.left_out().end())
        world.print("warning: ", line);
  for (const std::string& line : engine.loader_positions()->differences()) world.print("warning: ", line);
  Tracker tracker(world.is_main() ? o.track : "");
  tracker.send("start", start_of_run(in, engine, steps));
  const Course course = run_updates(o, in, engine, loader, steps, tracker);
  const std::int64_t saved = engine.checkpoints().saved_steps();
  const bool was_stopped = finish_checkpoints(engine);
  track_checkpoint(engine, tracker, saved);
  tracker.end(was_stopped ? "stopped" : "done", engine.global_steps() - 1);
  print_course(o, course, in, engine, was_stopped);
  if (was_stopped) {
    if (!engine.checkpoints().config().saves()) save_model(o, in, engine);
    world.wait_for_everyone();
    return stopped;
  }
  show_sample(o, in, engine);
  save_model(o, in, engine);
  world.wait_for_everyone();
  return done;
}

/// A checkpoint that does not fit or is damaged. All ranks throw it, and nothing has been written yet.
struct WrongCheckpoint : Error {
  using Error::Error;
};

Engine make_engine(const Options& o, Inputs& in, World& world) {
  in.model->checkpoint_activations(o.recompute);
  try {
    return initialize(world, *in.model, engine_options(o, in));
  } catch (const Error& e) {
    if (e.code() != Errc::config) throw;
    throw WrongCheckpoint(e.code(), e.what());
  }
}

/// A run that is resumed has its adapter in the checkpoint.
void start_from_adapter(const Options& o, Engine& engine) {
  if (o.adapter.empty() || engine.checkpoints().resumed()) return;
  try {
    engine.load_adapter(o.adapter, {.nonfinite = o.save_nonfinite});
  } catch (const Error& e) {
    throw WrongCheckpoint(Errc::config, concat("--adapter: ", e.what()));
  }
}

/// Another run may save to the folder of checkpoints.
void begin_run(Engine& engine) {
  try {
    engine.should_stop();
  } catch (const Error& e) {
    if (e.code() != Errc::config) throw;
    throw WrongCheckpoint(e.code(), e.what());
  }
}

/// A checkpoint has the files of a model's folder, and among them the tokenizer of the run.
void put_files_of_model(const Options& o, const Inputs& in, Engine& engine) {
  if (!engine.world().is_main()) return;  // its files are written
  std::map<std::string, std::string>& files = engine.checkpoints().files();
  files = files_beside_weights(*in.model);
  if (!knows_tokenizer(o, in)) return;
  std::erase_if(files, [](const auto& file) { return is_tokenizer_file(file.first); });
  for (const auto& [name, text] : in.tokenizer->files()) files[name] = text;
  follow_tokenizer(o, in, files["config.json"]);
}

/// A run goes on with the tokenizer that it began with.
void check_resumed_tokenizer(const Options& o, const Inputs& in, Engine& engine) {
  const auto& resumed = engine.checkpoints().resumed();
  if (!resumed || !knows_tokenizer(o, in)) return;
  try {
    check_on_all_ranks(engine.world().communicator(), [&] {
      if (!engine.world().is_main() || !has_tokenizer(resumed->path)) return;
      require(Tokenizer::from_pretrained(resumed->path).checksum() == in.tokenizer->checksum(), Errc::config,
              resumed->path, ": was trained with another tokenizer than ",
              in.tokenizer_name.empty() ? "bytes" : in.tokenizer_name, "; resume it with --tokenizer ",
              resumed->path, ", or begin a new run with --init ", resumed->path);
    });
  } catch (const Error& e) {
    if (e.code() != Errc::config) throw;
    throw WrongCheckpoint(e.code(), e.what());
  }
}

Status train(const Options& o, Inputs& in, World& world) {
  Engine engine = make_engine(o, in, world);
  start_from_adapter(o, engine);
  check_resumed_tokenizer(o, in, engine);
  engine.checkpoints().save_nonfinite(o.save_nonfinite);
  put_files_of_model(o, in, engine);
  if (!o.samples_only) {
    engine.checkpoints().stop_without_saving();
    begin_run(engine);
  }
  try {
    return run_engine(o, in, engine);
  } catch (const Error& e) {
    if (e.code() != Errc::diverged) engine.abort(e.what());  // the other ranks wait in operations of it
    throw;
  }
}

/// Reads and checks all inputs. Errors are user errors here, and nothing has been written yet.
Status check_inputs(const Options& o, World& world, Inputs& in) {
  Communicator& comm = world.communicator();
  try {
    const int per_node = world.ranks_per_node();
    check_on_all_ranks(comm, [&] { in = read_inputs(o, comm.rank(), comm.size(), per_node); });
    require_same_run(o, in, comm);
  } catch (const Error& e) {
    write_error_file(e);
    if (comm.rank() == 0) print_error(e.what());
    return is_wrong_input(e) ? wrong_input : failed;
  }
  if (comm.rank() == 0)
    for (const auto& warning : in.ds.warnings) print_error("warning: " + warning);
  return done;
}

/// A refused checkpoint of --resume-from-checkpoint, by that flag, and not by the key that it sets.
std::string by_flag(const Options& o, const Inputs& in, const std::string& text) {
  const std::string key = in.ds.file + ": ringzero.checkpoint.resume_from_checkpoint";
  if (!o.arguments.resume_from_checkpoint || !text.starts_with(key)) return text;
  return typed_flag(o.arguments, "resume_from_checkpoint") + text.substr(key.size());
}

/// An error that another rank has shared names that rank already.
std::string of_rank(int rank, const std::string& text) {
  const auto end = text.find(": ");
  const bool is_named = text.starts_with("rank ") && end != std::string::npos &&
                        parse_number<int>(std::string_view(text).substr(5, end - 5));
  return is_named ? text : concat("rank ", rank, ": ", text);
}

Status train_or_abort(const Options& o, World& world, Inputs& in) {
  try {
    return train(o, in, world);
  } catch (const WrongCheckpoint& wrong) {
    const Error e(Errc::config, by_flag(o, in, wrong.what()));
    write_error_file(e);
    if (world.is_main()) print_error(e.what());
    world.wait_for_everyone();
    return wrong_input;
  } catch (const Error& e) {
    write_error_file(e);
    if (e.code() == Errc::diverged) {  // thrown on every rank
      if (world.is_main()) print_error(e.what());
      world.wait_for_everyone();
      return failed;
    }
    // The rank that called abort() has printed the error itself.
    if (e.code() != Errc::aborted) print_error(of_rank(world.rank(), e.what()));
    world.communicator().abort(e.what());
  } catch (const std::exception& e) {
    write_error_file(e);
    print_error(of_rank(world.rank(), one_line(e)));
    world.communicator().abort(one_line(e));
  }
  return failed;
}

Status run(const LaunchInfo& launch, const Options& options) {
  try {
    WorldOptions world_options{.device = options.device};
    if (!options.backend.empty()) world_options.comm.backend = options.backend;
    if (!world_options.comm.on_wait) world_options.comm.on_wait = print_wait;
    World world = World::from_environment(world_options);
    Inputs in;
    const Status checked = check_inputs(options, world, in);
    return checked == done ? train_or_abort(options, world, in) : checked;
  } catch (const std::exception& e) {
    write_error_file(e);
    print_error(of_rank(launch.rank, one_line(e)));
    return failed;
  }
}

Status main(int argc, char** argv) {
  reserve_standard_descriptors();
  LaunchInfo launch;
  ParsedOptions parsed;
  try {
    flight::record_crashes();
    launch = launch_info_from_environment();
    parsed = parse_options(argc, argv);
    parsed.options.show_text = [] {
      return [bar = std::make_shared<TokenizeProgress>("train_lm")](const TextProgress& p) {
        bar->show(p.bytes, p.all_bytes, p.tokens);
      };
    };
    if (parsed.help.empty()) cuda::device_from_name(parsed.options.device, launch.local_rank);
  } catch (const std::exception& e) {
    write_error_file(e);
    if (launch.rank == 0) print_error(one_line(e));
    return wrong_input;
  }
  if (parsed.help.empty()) return run(launch, parsed.options);
  if (launch.rank == 0) std::fputs(parsed.help.c_str(), stdout);
  return done;
}

}  // namespace
}  // namespace rz::train_lm

int main(int argc, char** argv) { return rz::train_lm::main(argc, argv); }
