// train_lm: trains a language model on the ranks of a launcher. See --help.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/device/cuda_runtime.h"
#include "comm/flight_dump.h"
#include "comm/os/error_file.h"
#include "comm/os/flight_recorder.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "sharding/engine/engine.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/lm/engine_of_run.h"
#include "sharding/lm/inputs.h"
#include "sharding/lm/run.h"
#include "sharding/lm/sample_text.h"
#include "sharding/strategy/strategy.h"
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
              in.ds.strategy.unused_parameters == UnusedParameterPolicy::pytorch
                  ? "skipped, as in PyTorch"
                  : "updated with a gradient of zero, as in DeepSpeed");
  print_groups(o, in);
  if (const Precision& p = in.ds.strategy.precision; p.mixed())
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

/// Rank 0 prints the text while it is made.
void show_sample(const Options& o, Run& run) {
  if (!o.sample) return;
  const World& world = run.engine().world();
  world.print("sample:");
  const Run::Sample made = run.sample([&](const std::string& piece) {
    if (!world.is_main()) return;
    std::fputs(printable(piece).c_str(), stdout);
    std::fflush(stdout);
  });
  if (!world.is_main()) return;
  std::fputc('\n', stdout);
  const KnownWords words =
      known_words(made.prompt, made.text, o.samples_only ? "" : run.inputs().tokens.text());
  if (words.all > 0) std::printf("%s\n", describe(words).c_str());
}

/// What the updates of a run reported.
struct Course {
  double first_loss = 0, last_loss = 0;
  std::vector<double> speeds;
  double seconds = 0;
  MeshTraffic last_update;
};

/// Returns f(), and sends the checkpoint that the engine has begun to save in it. Collective.
template <class F>
auto tracked(Engine& engine, Tracker& tracker, const F& f) {
  const std::int64_t before = engine.checkpoints().saved_steps();
  const auto result = f();
  if (const std::int64_t now = engine.checkpoints().saved_steps(); now != before)
    tracker.send("checkpoint", concat(R"("step": )", now - 1, R"(, "folder": )",
                                      json_text(engine.checkpoints().config().output_dir)));
  return result;
}

Course run_updates(Run& run, Tracker& tracker) {
  Engine& engine = run.engine();
  const bool first = engine.world().is_main();
  const auto first_step = static_cast<std::uint64_t>(engine.global_steps());
  const std::int64_t interval = print_interval(run.inputs().ds.monitor);
  Progress progress(stdout, ::isatty(STDOUT_FILENO) == 1, run.steps(), first_step,
                    interval > 0 ? std::optional(interval) : std::nullopt);
  Course course;
  const auto start = std::chrono::steady_clock::now();
  const auto track_evaluation = [&](double loss) {
    tracker.send("evaluation", concat(R"("step": )", engine.global_steps() - 1, R"(, "eval_loss": )",
                                      std::isfinite(loss) ? concat(loss) : "null"));
  };
  if (const auto loss = run.evaluate()) {  // the run was stopped in this evaluation
    track_evaluation(*loss);
    engine.world().print("evaluated after ", first_step, " updates: eval_loss ", fixed(*loss, 4));
  }
  const auto may_update = [&] {
    return engine.global_steps() < static_cast<std::int64_t>(run.steps()) &&
           !tracked(engine, tracker, [&] { return engine.should_stop(); });
  };
  while (may_update()) {
    const auto report = tracked(engine, tracker, [&] { return run.update(); });
    if (!report) break;
    course.last_update = report->sent;
    if (course.speeds.empty()) course.first_loss = report->loss;
    course.last_loss = report->loss;
    course.speeds.push_back(report->tokens_per_second);
    const std::string line = to_json(*report);
    tracker.send("update", line.substr(1, line.size() - 2));
    if (report->eval_loss) track_evaluation(*report->eval_loss);
    if (first) progress.update(*report);
    std::fputs(engine.breakdown().c_str(), stdout);
    require_finite(*report);
  }
  course.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return course;
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

void print_beginning(const Options& o, Run& run) {
  Engine& engine = run.engine();
  World& world = engine.world();
  const Inputs& in = run.inputs();
  if (world.is_main() && o.samples_only) std::printf("model: %s\n", describe_model(*in.model).c_str());
  if (world.is_main() && !o.samples_only)
    print_run_summary(o, in, world.communicator(), engine.mesh().sizes(), engine.stream().threads(),
                      run.steps());
  if (const std::string line = engine.checkpoints().describe_resume(); !line.empty()) world.print(line);
  if (o.samples_only) return;
  std::vector<std::string> warnings{in.tokens.left_out().begin(), in.tokens.left_out().end()};
  if (in.validation)
    for (const std::string& line : in.validation->tokens.left_out())
      if (std::ranges::find(warnings, line) == warnings.end()) warnings.push_back(line);
  for (const std::string& line : engine.loader_positions()->differences()) warnings.push_back(line);
  for (const std::string& line : warnings) world.print("warning: ", line);
}

/// Returns whether the run was stopped.
bool train(const Options& o, Run& run) {
  Engine& engine = run.engine();
  Tracker tracker(engine.world().is_main() ? o.track : "");
  tracker.send("start", start_of_run(run.inputs(), engine, run.steps()));
  const Course course = run_updates(run, tracker);
  const bool was_stopped = tracked(engine, tracker, [&] { return run.finish(); });
  tracker.end(was_stopped ? "stopped" : "done", engine.global_steps() - 1);
  print_course(o, course, run.inputs(), engine, was_stopped);
  return was_stopped;
}

Status run_to_the_end(const Options& o, Run& run) {
  Engine& engine = run.engine();
  try {
    print_beginning(o, run);
    const bool was_stopped = !o.samples_only && train(o, run);
    if (!was_stopped) show_sample(o, run);
    if (!was_stopped || !engine.checkpoints().config().saves()) run.save();
    engine.world().wait_for_everyone();
    return was_stopped ? stopped : done;
  } catch (const Error& e) {
    if (e.code() != Errc::diverged) engine.abort(e.what());  // the other ranks wait in operations of it
    throw;
  }
}

/// An error that another rank has shared names that rank already.
std::string of_rank(int rank, const std::string& text) {
  const auto end = text.find(": ");
  const bool is_named = text.starts_with("rank ") && end != std::string::npos &&
                        parse_number<int>(std::string_view(text).substr(5, end - 5));
  return is_named ? text : concat("rank ", rank, ": ", text);
}

/// All ranks throw the error, and nothing has been written.
Status refuse(const World& world, const Error& e) {
  write_error_file(e);
  if (world.is_main()) print_error(e.what());
  return is_wrong_input(e) ? wrong_input : failed;
}

Status train_or_abort(const Options& o, World& world, Inputs in) {
  try {
    std::optional<Run> run;
    try {
      run.emplace(world, o, std::move(in));
    } catch (const Error& e) {  // others are of one rank
      if (e.code() != Errc::config) throw;
      const Status status = refuse(world, e);
      world.wait_for_everyone();
      return status;
    }
    return run_to_the_end(o, *run);
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
    try {
      in = read_inputs(options, world);
    } catch (const Error& e) {
      return refuse(world, e);
    }
    if (world.is_main())
      for (const auto& warning : in.ds.warnings) print_error("warning: " + warning);
    return train_or_abort(options, world, std::move(in));
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
  std::optional<flight::DumpOnSignal> dumps;
  try {
    flight::record_crashes();
    dumps.emplace();
    launch = launch_info_from_environment();
    parsed = parse_options(argc, argv);
    parsed.options.log = nullptr;  // the summary of the run has the configuration
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
