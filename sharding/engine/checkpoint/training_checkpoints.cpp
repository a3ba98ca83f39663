#include "sharding/engine/checkpoint/training_checkpoints.h"

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "comm/core/error.h"
#include "sharding/checkpoint/sharded/checkpoint_folder.h"
#include "sharding/checkpoint/sharded/checkpoint_index.h"
#include "sharding/io/disk.h"
#include "sharding/signals/slurm_end_time.h"
#include "sharding/world/gather_text.h"
#include "sharding/world/rank_agreement.h"

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

SaveRequestOptions save_request_options(const CheckpointConfig& c) {
  SaveRequestOptions o{.save_steps = static_cast<std::uint64_t>(c.save_steps),
                       .save_interval = std::chrono::minutes(c.save_minutes),
                       .allocation_margin = std::chrono::seconds(c.allocation_margin)};
  if (c.stop_before_allocation_end) o.allocation_end = slurm_job_end_time();
  return o;
}

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

void TrainingCheckpoints::resume() {
  if (config_.resume_from_checkpoint.empty()) return;
  const ResumedCheckpoint from = resumed_checkpoint(config_.resume_from_checkpoint);
  try {
    resumed_ = checkpointer_.load(from.dir, {.tag = from.tag});
  } catch (const Error& e) {
    if (!is_wrong_checkpoint(e)) throw;
    fail(Errc::config, file_, ": ringzero.checkpoint.resume_from_checkpoint: ", e.what());
  }
  if (!resumed_) return;
  client_state_ = resumed_->client_state;
  saved_ = decided_ = evaluated_ = resumed_->steps;
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
  if (resumed_) return concat("resumed: ", resumed_->path, ", after ", resumed_->steps, " updates");
  if (config_.resume_from_checkpoint.empty()) return "";
  return concat("resume: ", config_.resume_from_checkpoint, " has no checkpoint; the run starts afresh");
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
  checkpointer_.save(config_.output_dir,
                     {.client_state = client_state_,
                      .async = async,
                      .save_total_limit = static_cast<std::size_t>(config_.save_total_limit),
                      .files = files_,
                      .best = best_ == steps});
  saved_ = steps;
  best_ = -1;
}

bool TrainingCheckpoints::should_stop() {
  const std::int64_t steps = checkpointer_.steps();
  if (requests_ && steps != decided_) {
    decided_ = steps;
    decision_ = requests_->decide(static_cast<std::uint64_t>(steps));
    if (decision_.saves() || best_ == steps) save(config_.async_save && !decision_.stops());
  }
  return decision_.stops() || early_stopped();
}

std::optional<LoadedCheckpoint> TrainingCheckpoints::finish() {
  const std::int64_t steps = checkpointer_.steps();
  if (requests_ && (saved_ != steps || best_ == steps)) save(false);
  checkpointer_.wait();
  if (decision_.stops() || !config_.load_best_model_at_end || !best().value) return std::nullopt;
  return checkpointer_.load(config_.output_dir, {.tag = best_file, .load_module_only = true});
}

}  // namespace rz
