#include "sharding/engine/update/update_loop.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

DropoutSeeds::Place place_of(const World& world, const UpdateLoopOptions& o) {
  const std::int64_t consecutive = o.world_size_invariant ? std::max<std::int64_t>(1, o.accumulation) : 1;
  return {world.rank(), world.size(), static_cast<std::uint64_t>(consecutive)};
}

}  // namespace

UpdateLoop::UpdateLoop(World& world, Tape& tape, Strategy& strategy, TrainingStep&& training,
                       UpdateReports&& reports, const UpdateLoopOptions& options)
    : world_(world),
      tape_(tape),
      strategy_(strategy),
      options_(options),
      training_(std::move(training)),
      reports_(std::move(reports)),
      accumulation_(options.accumulation),
      seeds_(options.seed, static_cast<std::size_t>(options.accumulation), place_of(world, options),
             tape.stream()) {
  given_terms_ = options_.expected_terms.has_value();
  if (given_terms_) strategy_.settings().set_expected_terms(*options_.expected_terms);
  tape_.seed(seeds_.of_pass(0));
}

// ---- an update

/// By the first micro-batches of all ranks, or that of rank 0, which is the same for any number of ranks.
double UpdateLoop::terms_of_update(const nn::Loss& first) {
  const auto own = static_cast<double>(first.read(tape_.stream()).count);
  const auto steps = static_cast<double>(accumulation_.steps());
  if (!options_.world_size_invariant) return world_.reduce(own, ReduceOp::sum) * steps;
  return world_.reduce(world_.is_main() ? own : 0, ReduceOp::sum) * steps * world_.size();
}

void UpdateLoop::expect_terms(const nn::Loss& loss) {
  if (options_.expected_terms) return;
  options_.expected_terms = std::max(1.0, terms_of_update(loss));
  strategy_.settings().set_expected_terms(*options_.expected_terms);
}

void UpdateLoop::complete() {
  StepReport& report = reports_.add(graph_.defined());
  accumulation_.next_update();
  passes_of_updates_ = passes_;
  tape_.seed(seeds_.of_pass(passes_));
  training_.complete(tape_.stream(), report, reports_.losses(), world_.communicator());
  reports_.finish(tape_.stream());
}

// ---- a run that is resumed

UpdateLoop::State UpdateLoop::state() const {
  return {reports_.count(), training_.state(), passes_of_updates_,
          given_terms_ ? std::nullopt : options_.expected_terms};
}

void UpdateLoop::require_between_updates(const char* what) const {
  require(accumulation_.fresh(), Errc::invalid_argument, what,
          " in the middle of an update: call step() for the last backward(), or cancel_update()");
}

void UpdateLoop::set_state(const State& state) {
  drop_graph();
  reports_.set_count(state.count);
  training_.set_state(state.training);
  passes_ = passes_of_updates_ = state.passes;
  tape_.seed(seeds_.of_pass(passes_));
  if (given_terms_) return;
  options_.expected_terms = state.expected_terms;
  if (state.expected_terms) strategy_.settings().set_expected_terms(*state.expected_terms);
}

// ---- pass by pass

bool UpdateLoop::begin_pass() {
  reports_.times().end(Phase::forward, tape_.stream());
  if (accumulation_.fresh()) {
    drop_graph();
    reports_.losses().clear();
    training_.prepare(tape_.stream());
  }
  if (std::exchange(reducing_, false)) strategy_.finish_gradients(tape_.stream());
  return accumulation_.boundary() && holds_ == 0;
}

void UpdateLoop::end_pass(bool synchronised) {
  reducing_ = synchronised;
  tape_.reset();
  accumulation_.count_pass();
  reports_.times().end(Phase::backward, tape_.stream());
  tape_.seed(seeds_.of_pass(++passes_));
}

void UpdateLoop::backward(const nn::Loss& loss) {
  const bool synchronise = begin_pass();
  expect_terms(loss);
  strategy_.backward(tape_, loss, synchronise);
  reports_.losses().add(loss);
  end_pass(synchronise);
}

void UpdateLoop::backward(Var loss) {
  const bool synchronise = begin_pass();
  strategy_.begin_backward(synchronise);
  reports_.losses().add_scalar(tape_.value(loss), tape_.stream());
  const int ranks = options_.world_size_invariant ? world_.size() : 1;  // else the mean divides by them
  tape_.backward(
      loss, static_cast<float>(training_.loss_scale() / static_cast<double>(accumulation_.steps() * ranks)));
  end_pass(synchronise);
}

void UpdateLoop::backward_without_data() {
  const bool synchronise = begin_pass();
  strategy_.backward_without_data(synchronise);
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
  reports_.times().end(Phase::step, tape_.stream());
  strategy_.zero_grad();
  complete();
  return true;
}

void UpdateLoop::cancel() {
  tape_.reset();
  strategy_.cancel_update(tape_.stream());
  reducing_ = false;
  accumulation_.next_update();
  reports_.losses().clear();
  // Ranks may have failed in different passes.
  const auto steps = static_cast<std::uint64_t>(accumulation_.steps());
  passes_ = passes_of_updates_ = std::max(passes_, passes_of_updates_ + steps);
  tape_.seed(seeds_.of_pass(passes_));
}

// ---- update by update

void UpdateLoop::run(const std::function<nn::Loss(std::size_t)>& forward,
                     UpdateReports::Clock::time_point start) {
  require_between_updates("train_batch()");
  reports_.begin(start);
  seeds_.draw(passes_, tape_.stream());
  training_.prepare(tape_.stream());
  graph_.run(tape_.stream(), options_.graph && !reports_.times().enabled(), [&] { run_passes(forward); });
  passes_ += static_cast<std::uint64_t>(accumulation_.steps());
  complete();
}

/// May be captured: everything that differs from one update to the next is in memory.
void UpdateLoop::run_passes(const std::function<nn::Loss(std::size_t)>& forward) {
  const auto steps = static_cast<std::size_t>(accumulation_.steps());
  strategy_.zero_grad();
  reports_.losses().clear();
  for (std::size_t m = 0; m < steps; ++m) {
    tape_.seed_at(seeds_.at(m));
    const nn::Loss loss = forward(m);
    reports_.times().end(Phase::forward, tape_.stream());
    expect_terms(loss);
    strategy_.backward(tape_, loss, m + 1 == steps);
    reports_.losses().add(loss);
    tape_.reset();
    reports_.times().end(Phase::backward, tape_.stream());
  }
  training_.apply(tape_.stream());
  reports_.times().end(Phase::step, tape_.stream());
}

}  // namespace rz
