#include "sharding/engine/checkpoints/training_checkpoints.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/checkpoints/checkpointer.h"
#include "sharding/engine/checkpoints/save_requests.h"
#include "sharding/engine/checkpoints/signal_handler.h"
#include "sharding/io/disk.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/world.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// A folder of checkpoints, and the tag of one of them; empty: the last.
struct ResumedCheckpoint {
  std::string dir, tag;
};

/// `path`: DIR, DIR/TAG, or the file DIR/best or DIR/latest.
ResumedCheckpoint resumed_checkpoint(const std::string& path) {
  const fs::path p = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  const std::string dir = p.has_parent_path() ? p.parent_path().string() : ".";
  if (p.filename() == latest_file) return {dir, ""};
  if (p.filename() == best_file || path_exists((p / checkpoint_index_file).string()))
    return {dir, p.filename()};
  return {p.string(), ""};
}

/// The last checkpoint of a folder, if one of these jobs has saved it; or empty.
std::string last_of_jobs(const std::string& dir, const std::vector<LauncherJob>& jobs) {
  remove_stale(dir);
  const std::string tag = read_tag_file(dir, latest_file).value_or("");
  const std::string path = (fs::path(dir) / tag).string();
  if (tag.empty() || !fs::exists(fs::path(path) / checkpoint_index_file)) return "";
  const EngineState saved = parse_engine_state(CheckpointReader::open(path).index().state, path);
  const bool own = std::ranges::any_of(jobs, [&](const LauncherJob& job) {
    return job.restarted && std::ranges::find(saved.jobs, job.name) != saved.jobs.end();
  });
  return own ? tag : "";
}

/// What a path that has no checkpoint has instead, and what to do.
std::string without_checkpoint(const fs::path& path) {
  std::error_code problem;
  for (const char* file : {"trainer_state.json", "model.safetensors", "pytorch_model.bin",
                           "model.safetensors.index.json", "pytorch_model.bin.index.json"})
    if (fs::exists(path / file, problem))
      return concat("is a checkpoint of Hugging Face, which has ", file,
                    ": begin a run with its weights, train_lm --init or Engine::load_model()");
  const fs::path dir = path.has_filename() ? path.parent_path() : path.parent_path().parent_path();
  std::vector<std::string> tags;
  if (!fs::exists(path, problem) && fs::is_directory(dir, problem)) tags = checkpoint_tags(dir.string());
  return concat(fs::exists(path, problem) ? "has no checkpoint" : "does not exist",
                tags.empty()
                    ? ""
                    : concat("; ", escaped(dir.string()), " has ", tags.size(),
                             tags.size() == 1 ? " checkpoint: " : " checkpoints, the last is ", tags.back()),
                "; name one that exists, or set it to true to begin without one in output_dir");
}

/// Whether an error that all ranks throw is one of the user; else a rank or the machine has failed.
bool is_wrong_checkpoint(const Error& e) {
  return e.code() == Errc::config || e.code() == Errc::io || e.code() == Errc::invalid_argument ||
         e.code() == Errc::unsupported;
}

double metric_named(const Metrics& metrics, const std::string& name, const std::string& file) {
  const std::size_t prefix = name.starts_with("eval_") ? 5 : 0;
  for (const std::string& key : {name, name.substr(prefix)})
    if (const auto found = metrics.find(key); found != metrics.end()) return found->second;
  std::string all;
  for (const auto& [key, value] : metrics) all += (all.empty() ? "" : ", ") + key;
  fail(Errc::config, file, ": ringzero.checkpoint.metric_for_best_model: the evaluation has no ", name,
       "; it has ", all.empty() ? "nothing" : all);
}

/// The maximum of a number and of its complement are complements of each other only if all ranks have it.
void require_equal_metric(Communicator& comm, const std::string& name, double value) {
  const auto bits = std::bit_cast<std::int64_t>(std::isnan(value) ? std::nan("") : value);
  std::array<std::int64_t, 2> both{bits, ~bits};
  comm.all_reduce(Buffer(both.data(), both.size()), ReduceOp::max).wait();
  require(both[0] == ~both[1], Errc::mismatch, "record(): the ranks have different values of ", name,
          ", rank ", comm.rank(), " has ", value,
          "; reduce it over the ranks first, e.g. by World::reduce()");
}

}  // namespace

struct TrainingCheckpoints::State {
  State(World&, Checkpointer&, const CheckpointConfig&, std::string file_of_config);

  void receive_requests();
  void load_resumed();
  /// The tag of the last checkpoint in output_dir, if the launcher has started this run again and it has
  /// saved that one; or empty. Collective.
  std::string own_checkpoint();
  void find_others();
  /// A second run in output_dir is refused before its first update: in resume(), or in the first
  /// should_stop() if the folder is new.
  void lock_folder(bool make);
  bool should_evaluate() const;
  void save(bool async);
  /// The file best after a crash before it was written. The best checkpoint of another folder, or one that
  /// was removed, is no longer the best one.
  void restore_best(const std::string& dir);

  World& world;
  Checkpointer& checkpointer;
  CheckpointConfig config;
  std::string file;
  std::optional<SignalHandler> handler;
  std::optional<SaveRequests> requests;  // none: nothing is saved, and nothing stops the run
  std::optional<LoadedCheckpoint> resumed;
  bool restarted = false;           // by the launcher
  std::vector<std::string> others;  // rank 0: tags in output_dir that the run does not come from
  ClientState client_state;
  std::map<std::string, std::string> files;
  std::function<void(const Metrics&)> recorded;
  SaveDecision decision;
  bool locked = false, begun = false, nonfinite = false;
  bool stop_requested = false;                         // and not decided
  std::int64_t saved = 0, decided = 0, evaluated = 0;  // numbers of updates
  std::int64_t best_update = -1;                       // with a best value that is not saved
};

TrainingCheckpoints::State::State(World& w, Checkpointer& saver, const CheckpointConfig& c,
                                  std::string file_of_config)
    : world(w), checkpointer(saver), config(c), file(std::move(file_of_config)) {
  if (config.saves()) receive_requests();
}

void TrainingCheckpoints::State::receive_requests() {
  check_on_all_ranks(world.communicator(), [&] {
    try {
      if (config.signals) handler.emplace();
    } catch (const Error& e) {
      fail(Errc::config, file, ": ringzero.checkpoint.signals: ", e.what(),
           "; set it to false for the other engines of the process");
    }
    requests.emplace(world.communicator(), save_request_options(config),
                     [this] { return handler ? handler->received() : ReceivedSignals{}; });
  });
}

void TrainingCheckpoints::State::lock_folder(bool make) {
  if (!config.saves() || !checkpointer.trains()) return;
  try {
    checkpointer.lock(config.output_dir, make);
  } catch (const Error& e) {
    if (!is_wrong_checkpoint(e)) throw;
    fail(Errc::config, file, ": ringzero.checkpoint.output_dir: ", e.what());
  }
}

std::string TrainingCheckpoints::State::own_checkpoint() {
  if (!config.saves() || !checkpointer.trains()) return "";
  std::string tag;
  const auto jobs = jobs_of_launchers();
  restarted = std::ranges::any_of(jobs, &LauncherJob::restarted);
  check_on_all_ranks(world.communicator(), [&] {
    if (restarted && world.is_main()) tag = last_of_jobs(config.output_dir, jobs);
  });
  return broadcast_text(world.communicator(), tag, 0);
}

/// A run may go on beside checkpoints that it does not come from.
void TrainingCheckpoints::State::find_others() {
  std::error_code problem;
  if (!fs::is_directory(config.output_dir, problem)) return;
  const bool here =
      resumed && fs::equivalent(fs::path(resumed->path).parent_path(), config.output_dir, problem);
  const std::string first = here ? resumed->tag : "";
  const std::vector<std::string> tags = tags_by_time(config.output_dir);
  const auto from = std::ranges::find(tags, first);
  others = from == tags.end() ? tags : std::vector<std::string>(from + 1, tags.end());
}

void TrainingCheckpoints::State::load_resumed() {
  const std::string own = own_checkpoint();
  if (own.empty() && config.resume_from_checkpoint.empty()) return;
  const ResumedCheckpoint from = own.empty() ? resumed_checkpoint(config.resume_from_checkpoint)
                                             : ResumedCheckpoint{config.output_dir, own};
  try {
    resumed = checkpointer.load(from.dir, {.tag = from.tag});
  } catch (const Error& e) {
    if (!is_wrong_checkpoint(e)) throw;
    fail(Errc::config, file, ": ringzero.checkpoint.resume_from_checkpoint: ", e.what());
  }
  require(resumed || !config.resume_required, Errc::config, file,
          ": ringzero.checkpoint.resume_from_checkpoint: ", escaped(config.resume_from_checkpoint), ": ",
          without_checkpoint(config.resume_from_checkpoint));
  if (!resumed) return;
  client_state = resumed->client_state;
  saved = decided = evaluated = resumed->steps;
  if (std::exchange(checkpointer.trainer().evaluation_due, false)) evaluated = -1;
  restore_best(from.dir);
}

void TrainingCheckpoints::State::restore_best(const std::string& dir) {
  BestMetric& best = checkpointer.trainer().best;
  if (!config.saves() || best.tag.empty()) return;
  std::string present;
  check_on_all_ranks(world.communicator(), [&] {
    const fs::path checkpoint = fs::path(config.output_dir) / best.tag;
    if (!world.is_main() || !path_exists((checkpoint / checkpoint_index_file).string())) return;
    std::error_code problem;
    if (!fs::equivalent(dir, config.output_dir, problem) || problem) return;
    present = best.tag;
    if (read_tag_file(config.output_dir, best_file) != present)
      write_tag_file(config.output_dir, best_file, present);
  });
  if (broadcast_text(world.communicator(), present, 0).empty())
    best = {.greater_is_better = best.greater_is_better};
}

bool TrainingCheckpoints::State::should_evaluate() const {
  const std::int64_t steps = checkpointer.steps();
  return config.eval_steps > 0 && steps % config.eval_steps == 0 && steps != evaluated;
}

void TrainingCheckpoints::State::save(bool async) {
  if (!config.saves()) return;
  const std::int64_t steps = checkpointer.steps();
  checkpointer.trainer().evaluation_due = should_evaluate();
  checkpointer.save(config.output_dir, {.client_state = client_state,
                                        .async = async,
                                        .save_total_limit = static_cast<std::size_t>(config.save_total_limit),
                                        .files = files,
                                        .best = best_update == steps,
                                        .exclude_frozen_parameters = config.exclude_frozen_parameters,
                                        .nonfinite = nonfinite});
  saved = steps;
  best_update = -1;
}

TrainingCheckpoints::TrainingCheckpoints(World& world, Checkpointer& checkpointer,
                                         const CheckpointConfig& config, std::string file)
    : state_(std::make_unique<State>(world, checkpointer, config, std::move(file))) {}

TrainingCheckpoints::~TrainingCheckpoints() = default;

void TrainingCheckpoints::stop_without_saving() {
  if (!state_->requests) state_->receive_requests();
}

const std::optional<LoadedCheckpoint>& TrainingCheckpoints::resumed() const { return state_->resumed; }

const SaveDecision& TrainingCheckpoints::decision() const { return state_->decision; }

ClientState& TrainingCheckpoints::client_state() { return state_->client_state; }

std::map<std::string, std::string>& TrainingCheckpoints::files() { return state_->files; }

void TrainingCheckpoints::save_nonfinite(bool nonfinite) { state_->nonfinite = nonfinite; }

const BestMetric& TrainingCheckpoints::best() const { return state_->checkpointer.trainer().best; }

const CheckpointConfig& TrainingCheckpoints::config() const { return state_->config; }

bool TrainingCheckpoints::should_evaluate() const { return state_->should_evaluate(); }

// ---- resuming

void TrainingCheckpoints::resume() {
  State& s = *state_;
  s.load_resumed();
  if (s.config.saves() && s.checkpointer.trains() && s.world.is_main()) s.find_others();
  s.lock_folder(false);
}

std::string TrainingCheckpoints::describe_resume() const {
  const State& s = *state_;
  std::vector<std::string> lines;
  if (s.resumed) {
    lines.push_back(concat("resumed: ", s.resumed->path, ", after ", s.resumed->steps, " updates"));
    if (!s.resumed->differences.empty())
      lines.push_back(concat("warning: differs from the checkpoint: ", s.resumed->differences));
  } else if (!s.config.resume_from_checkpoint.empty()) {
    lines.push_back(
        concat("resume: ", s.config.resume_from_checkpoint, " has no checkpoint; the run starts afresh"));
  } else if (s.restarted) {
    lines.push_back(concat("warning: the launcher has started the run again, and ", s.config.output_dir,
                           " has no checkpoint of it; the run starts afresh"));
  }
  if (!s.others.empty())
    lines.push_back(concat("warning: ", s.config.output_dir, " has ", s.others.size(),
                           s.others.size() == 1 ? " checkpoint" : " checkpoints",
                           " that this run does not go on from: ", s.others.front(),
                           s.others.size() > 1 ? concat(" to ", s.others.back()) : "",
                           s.config.save_total_limit > 0 ? "; save_total_limit removes them first" : ""));
  std::string all;
  for (const std::string& line : lines) all += (all.empty() ? "" : "\n") + line;
  return all;
}

// ---- evaluation

void TrainingCheckpoints::record(const Metrics& metrics) {
  State& s = *state_;
  TrainerState& trainer = s.checkpointer.trainer();
  const double value = metric_named(metrics, trainer.metric, s.file);
  require_equal_metric(s.world.communicator(), trainer.metric, value);
  const bool decides = trainer.early_stopping || s.config.load_best_model_at_end;
  require(!decides || !std::isnan(value), Errc::diverged, "record(): ", trainer.metric, " is nan after ",
          s.checkpointer.steps(),
          " updates: the evaluation counted no target (are all of them ignored, -100?), or the model has "
          "diverged");
  s.evaluated = s.checkpointer.steps();
  if (trainer.best.update(value, static_cast<std::uint64_t>(s.evaluated), step_tag(s.evaluated)))
    s.best_update = s.evaluated;
  if (trainer.early_stopping) trainer.early_stopping->update(value);
  if (s.recorded) s.recorded(metrics);
}

void TrainingCheckpoints::on_record(std::function<void(const Metrics&)> f) {
  state_->recorded = std::move(f);
}

std::int64_t TrainingCheckpoints::saved_steps() const { return state_->saved; }

bool TrainingCheckpoints::early_stopped() const {
  const State& s = *state_;
  const auto& stopping = s.checkpointer.trainer().early_stopping;
  return stopping && stopping->should_stop();
}

// ---- saving

bool TrainingCheckpoints::stop_requested() {
  State& s = *state_;
  if (s.requests && s.requests->stop_requested()) s.stop_requested = true;
  return s.stop_requested;
}

bool TrainingCheckpoints::stop_requested_in_update(std::int64_t micro_batch,
                                                   std::chrono::duration<double> elapsed) {
  State& s = *state_;
  if (!s.requests || !s.begun) return false;
  if (s.requests->stop_requested_in_update(micro_batch, elapsed)) s.stop_requested = true;
  return s.stop_requested;
}

bool TrainingCheckpoints::should_stop() {
  State& s = *state_;
  const std::int64_t steps = s.checkpointer.steps();
  if (s.requests && (steps != s.decided || std::exchange(s.stop_requested, false))) {
    if (!std::exchange(s.locked, true)) s.lock_folder(true);
    s.decided = steps;
    s.decision = s.requests->decide(static_cast<std::uint64_t>(steps));
    const bool is_saved = s.decision.stops() && s.saved == steps;  // a stop in the update after it
    if ((s.decision.saves() && !is_saved) || s.best_update == steps)
      s.save(s.config.async_save && !s.decision.stops());
  }
  // A signal while the program read its inputs; there is nothing to save.
  if (s.requests && !std::exchange(s.begun, true) && !s.decision.stops() && s.requests->stop_requested(true))
    s.decision = s.requests->decide(static_cast<std::uint64_t>(steps));
  const bool stops = s.decision.stops() || early_stopped();
  if (s.requests && !stops && !std::exchange(s.locked, true)) s.lock_folder(true);
  return stops;
}

std::optional<LoadedCheckpoint> TrainingCheckpoints::finish() {
  State& s = *state_;
  const std::int64_t steps = s.checkpointer.steps();
  if (s.requests && (s.saved != steps || s.best_update == steps)) s.save(false);
  s.checkpointer.wait();
  if (s.decision.stops() || !s.config.load_best_model_at_end || !best().value) return std::nullopt;
  return s.checkpointer.load(s.config.output_dir, {.tag = best_file, .load_module_only = true});
}

}  // namespace rz
