#include "sharding/engine/update/update_loop.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

UpdateLoop::UpdateLoop(World& world, Tape& tape, Strategy& strategy, TrainingStep&& training,
                       StepMonitor&& monitor, const UpdateLoopOptions& options)
    : world_(world),
      tape_(tape),
      strategy_(strategy),
      options_(options),
      training_(std::move(training)),
      monitor_(std::move(monitor)),
      accumulation_(options.accumulation),
      seeds_(options.seed, static_cast<std::size_t>(options.accumulation), {world.rank(), world.size()},
             tape.stream()),
      start_(std::chrono::steady_clock::now()) {
  if (options_.expected_terms) strategy_.settings().set_expected_terms(*options_.expected_terms);
  tape_.seed(seeds_.of_pass(0));
}

// ---- an update

void UpdateLoop::prepare() {
  const bool by_epoch = options_.schedule_unit == ScheduleUnit::epoch;
  training_.prepare(by_epoch ? epochs_ : training_.optimizer().updates(), tape_.stream());
}

void UpdateLoop::expect_terms(const nn::Loss& loss) {
  if (options_.expected_terms) return;
  const double terms = world_.reduce(static_cast<double>(loss.read(tape_.stream()).count), ReduceOp::sum);
  options_.expected_terms = std::max(1.0, terms * static_cast<double>(accumulation_.steps()));
  strategy_.settings().set_expected_terms(*options_.expected_terms);
}

void UpdateLoop::complete() {
  report_ = {.step = steps_++, .skipped_steps = report_.skipped_steps};
  report_.samples = steps_ * options_.samples;
  report_.ran_graph = graph_.defined();
  report_.exposed_seconds = report_.ran_graph ? std::nan("") : strategy_.exposed_seconds();
  accumulation_.next_update();
  tape_.seed(seeds_.of_pass(passes_));
  training_.complete(tape_.stream(), report_);
  report_.seconds = seconds_since(start_);
  start_ = std::chrono::steady_clock::now();
}

void UpdateLoop::write_report() {
  if (monitor_.needs_loss(report_.step)) monitor_.write(report_, loss(), strategy_.memory());
}

// ---- pass by pass

bool UpdateLoop::begin_pass() {
  monitor_.times().end(Phase::forward, tape_.stream());
  if (accumulation_.fresh()) {
    drop_graph();
    losses_.clear();
    prepare();
  }
  if (std::exchange(reducing_, false)) strategy_.finish_gradients(tape_.stream());
  return accumulation_.boundary() && holds_ == 0;
}

void UpdateLoop::end_pass(bool synchronised) {
  reducing_ = synchronised;
  tape_.reset();
  accumulation_.count_pass();
  monitor_.times().end(Phase::backward, tape_.stream());
  tape_.seed(seeds_.of_pass(++passes_));
}

void UpdateLoop::backward(const nn::Loss& loss) {
  const bool synchronise = begin_pass();
  expect_terms(loss);
  strategy_.backward(tape_, loss, synchronise);
  losses_.add(loss);
  end_pass(synchronise);
}

void UpdateLoop::backward(Var loss) {
  const bool synchronise = begin_pass();
  strategy_.begin_backward(synchronise);
  tape_.backward(loss,
                 static_cast<float>(training_.loss_scale() / static_cast<double>(accumulation_.steps())));
  end_pass(synchronise);
}

bool UpdateLoop::step() {
  require(holds_ == 0, Errc::unsynchronised,
          "step() inside NoSync: gradients would differ over the ranks, and so would the parameters; end "
          "NoSync before the last backward() of an update, or leave it out: micro-batches before the last "
          "do not synchronise anyway");
  require(accumulation_.passes() > 0, Errc::invalid_argument,
          "step() without a backward() since the last step()");
  if (!accumulation_.boundary()) {
    accumulation_.next_micro_batch();
    return false;
  }
  reducing_ = false;
  training_.apply(tape_.stream());
  monitor_.times().end(Phase::step, tape_.stream());
  strategy_.zero_grad();
  complete();
  write_report();
  return true;
}

void UpdateLoop::cancel() {
  tape_.reset();
  strategy_.cancel_update(tape_.stream());
  reducing_ = false;
  accumulation_.next_update();
  losses_.clear();
}

// ---- update by update

void UpdateLoop::run(const std::function<nn::Loss(std::size_t)>& forward,
                     std::chrono::steady_clock::time_point start) {
  require(
      accumulation_.fresh(), Errc::invalid_argument,
      "train_batch() in the middle of an update: call step() for the last backward(), or cancel_update()");
  start_ = start;
  seeds_.draw(passes_, tape_.stream());
  prepare();
  graph_.run(tape_.stream(), options_.graph && !monitor_.times().enabled(), [&] { run_passes(forward); });
  passes_ += static_cast<std::uint64_t>(accumulation_.steps());
  complete();
  write_report();
}

/// May be captured: everything that differs from one update to the next is in memory.
void UpdateLoop::run_passes(const std::function<nn::Loss(std::size_t)>& forward) {
  const auto steps = static_cast<std::size_t>(accumulation_.steps());
  strategy_.zero_grad();
  losses_.clear();
  for (std::size_t m = 0; m < steps; ++m) {
    tape_.seed_at(seeds_.at(m));
    const nn::Loss loss = forward(m);
    monitor_.times().end(Phase::forward, tape_.stream());
    expect_terms(loss);
    strategy_.backward(tape_, loss, m + 1 == steps);
    losses_.add(loss);
    tape_.reset();
    monitor_.times().end(Phase::backward, tape_.stream());
  }
  training_.apply(tape_.stream());
  monitor_.times().end(Phase::step, tape_.stream());
}

}  // namespace rz
