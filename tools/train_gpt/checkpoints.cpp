#include "tools/train_gpt/checkpoints.h"

#include <chrono>

#include "sharding/signals/slurm_end_time.h"

namespace rz::train_gpt {

Checkpoints::Checkpoints(Engine& engine, const CheckpointFlags& flags) : engine_(engine), flags_(flags) {
  if (flags_.folder().empty()) return;
  handler_.emplace();
  requests_.emplace(engine.world().communicator(),
                    SaveRequestOptions{.save_steps = static_cast<std::uint64_t>(flags_.save_steps),
                                       .save_interval = std::chrono::minutes(flags_.save_minutes),
                                       .allocation_end = slurm_job_end_time()},
                    [this] { return handler_->received(); });
}

void Checkpoints::resume() {
  if (flags_.resume.empty()) return;
  const auto loaded = engine_.load_checkpoint(flags_.resume);
  if (!loaded) {
    engine_.world().print("resume: ", flags_.resume, " has no checkpoint; the run starts afresh");
    return;
  }
  saved_ = loaded->steps;
  engine_.world().print("resumed: ", loaded->path, ", after ", loaded->steps, " updates");
}

void Checkpoints::save(bool async) {
  engine_.save_checkpoint(
      flags_.folder(),
      {.async = async, .save_total_limit = static_cast<std::size_t>(flags_.save_total_limit)});
  saved_ = engine_.global_steps();
}

bool Checkpoints::after_update() {
  if (!requests_) return false;
  const SaveDecision decision = requests_->decide(static_cast<std::uint64_t>(engine_.global_steps()));
  if (!decision.saves()) return false;
  save(flags_.async && !decision.stops());
  if (decision.stops())
    engine_.world().print("stopped by ", describe(decision), " after ", saved_, " updates; saved to ",
                          flags_.folder());
  return decision.stops();
}

void Checkpoints::finish() {
  if (requests_ && saved_ != engine_.global_steps()) save(false);
  engine_.wait_for_checkpoint();
}

}  // namespace rz::train_gpt
