#include "sharding/engine/training_checkpoints.h"

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
#include "sharding/engine/save_requests.h"
#include "sharding/io/disk.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"

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
                    ": begin a run with its weights, train_gpt --init or Engine::load_model()");
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

TrainingCheckpoints::TrainingCheckpoints(World& world, Checkpointer& checkpointer, const CheckpointConfig& c,
                                         std::string file)
    : world_(world), checkpointer_(checkpointer), config_(c), file_(std::move(file)) {
  if (!config_.saves()) return;
  check_on_all_ranks(world.communicator(), [&] {
    try {
      if (config_.signals) handler_.emplace();
    } catch (const Error& e) {
      fail(Errc::config, file_, ": ringzero.checkpoint.signals: ", e.what(),
           "; set it to false for the other engines of the process");
    }
    requests_.emplace(world_.communicator(), save_request_options(config_),
                      [this] { return handler_ ? handler_->received() : ReceivedSignals{}; });
  });
}

// ---- resuming

void TrainingCheckpoints::lock_folder(bool make) {
  if (!config_.saves() || !checkpointer_.trains()) return;
  try {
    checkpointer_.lock(config_.output_dir, make);
  } catch (const Error& e) {
    if (!is_wrong_checkpoint(e)) throw;
    fail(Errc::config, file_, ": ringzero.checkpoint.output_dir: ", e.what());
  }
}

void TrainingCheckpoints::resume() {
  load_resumed();
  if (config_.saves() && checkpointer_.trains() && world_.is_main()) find_others();
  lock_folder(false);
}

std::string TrainingCheckpoints::own_checkpoint() {
  if (!config_.saves() || !checkpointer_.trains()) return "";
  std::string tag;
  const auto jobs = jobs_of_launchers();
  restarted_ = std::ranges::any_of(jobs, &LauncherJob::restarted);
  check_on_all_ranks(world_.communicator(), [&] {
    if (restarted_ && world_.is_main()) tag = last_of_jobs(config_.output_dir, jobs);
  });
  return broadcast_text(world_.communicator(), tag, 0);
}

/// A run may go on beside checkpoints that it does not come from.
void TrainingCheckpoints::find_others() {
  std::error_code problem;
  if (!fs::is_directory(config_.output_dir, problem)) return;
  const bool here =
      resumed_ && fs::equivalent(fs::path(resumed_->path).parent_path(), config_.output_dir, problem);
  const std::string first = here ? resumed_->tag : "";
  const std::vector<std::string> tags = tags_by_time(config_.output_dir);
  const auto from = std::ranges::find(tags, first);
  others_ = from == tags.end() ? tags : std::vector<std::string>(from + 1, tags.end());
}

void TrainingCheckpoints::load_resumed() {
  const std::string own = own_checkpoint();
  if (own.empty() && config_.resume_from_checkpoint.empty()) return;
  const ResumedCheckpoint from = own.empty() ? resumed_checkpoint(config_.resume_from_checkpoint)
                                             : ResumedCheckpoint{config_.output_dir, own};
  try {
    resumed_ = checkpointer_.load(from.dir, {.tag = from.tag});
  } catch (const Error& e) {
    if (!is_wrong_checkpoint(e)) throw;
    fail(Errc::config, file_, ": ringzero.checkpoint.resume_from_checkpoint: ", e.what());
  }
  require(resumed_ || !config_.resume_required, Errc::config, file_,
          ": ringzero.checkpoint.resume_from_checkpoint: ", escaped(config_.resume_from_checkpoint), ": ",
          without_checkpoint(config_.resume_from_checkpoint));
  if (!resumed_) return;
  client_state_ = resumed_->client_state;
  saved_ = decided_ = evaluated_ = resumed_->steps;
  if (std::exchange(checkpointer_.trainer().evaluation_due, false)) evaluated_ = -1;
  restore_best(from.dir);
}

void TrainingCheckpoints::restore_best(const std::string& dir) {
  BestMetric& best = checkpointer_.trainer().best;
  if (!config_.saves() || best.tag.empty()) return;
  std::string present;
  check_on_all_ranks(world_.communicator(), [&] {
    const fs::path checkpoint = fs::path(config_.output_dir) / best.tag;
    if (!world_.is_main() || !path_exists((checkpoint / checkpoint_index_file).string())) return;
    std::error_code problem;
    if (!fs::equivalent(dir, config_.output_dir, problem) || problem) return;
    present = best.tag;
    if (read_tag_file(config_.output_dir, best_file) != present)
      write_tag_file(config_.output_dir, best_file, present);
  });
  if (broadcast_text(world_.communicator(), present, 0).empty())
    best = {.greater_is_better = best.greater_is_better};
}

std::string TrainingCheckpoints::describe_resume() const {
  std::vector<std::string> lines;
  if (resumed_) {
    lines.push_back(concat("resumed: ", resumed_->path, ", after ", resumed_->steps, " updates"));
    if (!resumed_->differences.empty())
      lines.push_back(concat("warning: differs from the checkpoint: ", resumed_->differences));
  } else if (!config_.resume_from_checkpoint.empty()) {
    lines.push_back(
        concat("resume: ", config_.resume_from_checkpoint, " has no checkpoint; the run starts afresh"));
  } else if (restarted_) {
    lines.push_back(concat("warning: the launcher has started the run again, and ", config_.output_dir,
                           " has no checkpoint of it; the run starts afresh"));
  }
  if (!others_.empty())
    lines.push_back(concat("warning: ", config_.output_dir, " has ", others_.size(),
                           others_.size() == 1 ? " checkpoint" : " checkpoints",
                           " that this run does not go on from: ", others_.front(),
                           others_.size() > 1 ? concat(" to ", others_.back()) : "",
                           config_.save_total_limit > 0 ? "; save_total_limit removes them first" : ""));
  std::string all;
  for (const std::string& line : lines) all += (all.empty() ? "" : "\n") + line;
  return all;
}

// ---- evaluation

bool TrainingCheckpoints::should_evaluate() const {
  const std::int64_t steps = checkpointer_.steps();
  return config_.eval_steps > 0 && steps % config_.eval_steps == 0 && steps != evaluated_;
}

void TrainingCheckpoints::record(const Metrics& metrics) {
  TrainerState& trainer = checkpointer_.trainer();
  const double value = metric_named(metrics, trainer.metric, file_);
  require_equal_metric(world_.communicator(), trainer.metric, value);
  const bool decides = trainer.early_stopping || config_.load_best_model_at_end;
  require(!decides || !std::isnan(value), Errc::diverged, "record(): ", trainer.metric, " is nan after ",
          checkpointer_.steps(),
          " updates: the evaluation counted no target (are all of them ignored, -100?), or the model has "
          "diverged");
  evaluated_ = checkpointer_.steps();
  if (trainer.best.update(value, static_cast<std::uint64_t>(evaluated_), step_tag(evaluated_)))
    best_ = evaluated_;
  if (trainer.early_stopping) trainer.early_stopping->update(value);
}

bool TrainingCheckpoints::early_stopped() const {
  const auto& stopping = checkpointer_.trainer().early_stopping;
  return stopping && stopping->should_stop();
}

// ---- saving

void TrainingCheckpoints::save(bool async) {
  const std::int64_t steps = checkpointer_.steps();
  checkpointer_.trainer().evaluation_due = should_evaluate();
  checkpointer_.save(config_.output_dir,
                     {.client_state = client_state_,
                      .async = async,
                      .save_total_limit = static_cast<std::size_t>(config_.save_total_limit),
                      .files = files_,
                      .best = best_ == steps,
                      .nonfinite = nonfinite_});
  saved_ = steps;
  best_ = -1;
}

bool TrainingCheckpoints::stop_requested() {
  if (requests_ && requests_->stop_requested()) stop_requested_ = true;
  return stop_requested_;
}

bool TrainingCheckpoints::stop_requested_in_update(std::int64_t micro_batch,
                                                   std::chrono::duration<double> elapsed) {
  if (!requests_ || !begun_) return false;
  if (requests_->stop_requested_in_update(micro_batch, elapsed)) stop_requested_ = true;
  return stop_requested_;
}

bool TrainingCheckpoints::should_stop() {
  const std::int64_t steps = checkpointer_.steps();
  if (requests_ && (steps != decided_ || std::exchange(stop_requested_, false))) {
    if (!std::exchange(locked_, true)) lock_folder(true);
    decided_ = steps;
    decision_ = requests_->decide(static_cast<std::uint64_t>(steps));
    const bool is_saved = decision_.stops() && saved_ == steps;  // a stop in the update after it
    if ((decision_.saves() && !is_saved) || best_ == steps) save(config_.async_save && !decision_.stops());
  }
  // A signal while the program read its inputs; there is nothing to save.
  if (requests_ && !std::exchange(begun_, true) && !decision_.stops() && requests_->stop_requested(true))
    decision_ = requests_->decide(static_cast<std::uint64_t>(steps));
  const bool stops = decision_.stops() || early_stopped();
  if (requests_ && !stops && !std::exchange(locked_, true)) lock_folder(true);
  return stops;
}

std::optional<LoadedCheckpoint> TrainingCheckpoints::finish() {
  const std::int64_t steps = checkpointer_.steps();
  if (requests_ && (saved_ != steps || best_ == steps)) save(false);
  checkpointer_.wait();
  if (decision_.stops() || !config_.load_best_model_at_end || !best().value) return std::nullopt;
  return checkpointer_.load(config_.output_dir, {.tag = best_file, .load_module_only = true});
}

}  // namespace rz
