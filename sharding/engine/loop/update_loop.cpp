#include "sharding/engine/loop/update_loop.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "comm/os/flight_recorder.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

DropoutSeeds::DropoutSeeds(std::uint64_t seed, std::size_t micro_batches, Place place, const Stream& stream)
    : seed_(seed),
      place_(place),
      next_(micro_batches),
      on_device_(std::reinterpret_pointer_cast<std::uint64_t>(
          allocate_on(stream.device(), micro_batches * sizeof(std::uint64_t)))) {}

std::uint64_t DropoutSeeds::of_pass(std::uint64_t pass) const {
  const auto rank = static_cast<std::uint64_t>(place_.rank), ranks = static_cast<std::uint64_t>(place_.ranks);
  const std::uint64_t run = pass / place_.consecutive, within = pass % place_.consecutive;
  const std::uint64_t number = (run * ranks + rank) * place_.consecutive + within;
  return seed_ ^ (number + 1) * 0x9e3779b97f4a7c15u;
}

void DropoutSeeds::draw(std::uint64_t first_pass, const Stream& stream) {
  for (std::size_t m = 0; m < next_.size(); ++m) next_[m] = of_pass(first_pass + m);
  memcpy_async(on_device_.get(), next_.data(), next_.size() * sizeof(std::uint64_t), stream);
}

namespace {
constexpr int warmup_updates = 3;  // memory settles in the second update after buckets were rebuilt
}

bool UpdateGraph::replays(bool may_capture) const {
  return may_capture && uncaptured_updates_ >= warmup_updates;
}

bool UpdateGraph::run(const Stream& stream, bool may_capture, const std::function<void()>& update,
                      const std::function<void()>& before_launch) {
  if (!replays(may_capture)) {
    update();
    ++uncaptured_updates_;
    return false;
  }
  if (!graph_.defined()) graph_ = capture(stream, update);
  before_launch();
  graph_.launch(stream);
  return true;
}

void UpdateGraph::drop() {
  graph_ = {};
  uncaptured_updates_ = 0;
}

namespace {

DropoutSeeds::Place place_of(const Communicator& data, const UpdateLoopOptions& o) {
  const std::int64_t consecutive = o.world_size_invariant ? std::max<std::int64_t>(1, o.accumulation) : 1;
  return {data.rank(), data.size(), static_cast<std::uint64_t>(consecutive)};
}

}  // namespace

UpdateLoop::UpdateLoop(Communicator& all, Communicator& data, Tape& tape, Strategy& strategy,
                       TrainingStep&& training, UpdateReports&& reports, const UpdateLoopOptions& options)
    : all_(all),
      data_(data),
      tape_(tape),
      strategy_(strategy),
      options_(options),
      training_(std::move(training)),
      reports_(std::move(reports)),
      accumulation_(options.accumulation),
      seeds_(options.seed, static_cast<std::size_t>(options.accumulation), place_of(data, options),
             tape.stream()) {
  given_terms_ = options_.expected_terms.has_value();
  if (given_terms_) strategy_.settings().set_expected_terms(*options_.expected_terms);
  tape_.seed(seeds_.of_pass(0));
}

// ---- an update

/// By the first micro-batches of all ranks, or that of rank 0, which is the same for any number of ranks.
void UpdateLoop::expect_terms(const nn::Loss& loss) {
  if (options_.expected_terms) return;
  const double own = loss.has_terms() ? static_cast<double>(loss.read(tape_.stream()).count) : 1;
  const bool invariant = options_.world_size_invariant;
  first_terms_ = !invariant || data_.rank() == 0 ? own : 0;
  data_.all_reduce(Buffer(&first_terms_, 1), ReduceOp::sum).wait();
  const auto passes = static_cast<double>(accumulation_.steps() * (invariant ? data_.size() : 1));
  options_.expected_terms = std::max(1.0, first_terms_ * passes);
  new_terms_ = true;
  strategy_.settings().set_expected_terms(*options_.expected_terms);
}

/// Ranks that share layers combine parts of one loss: other data on one of them would give wrong gradients.
void UpdateLoop::require_equal_losses(std::int64_t update) {
  if (options_.tp == 1 || tape_.stream().device().kind != Device::host) return;
  const std::vector<Mean> losses = reports_.losses().read(tape_.stream());
  std::array<double, 2> own{};  // their hash, and the sum
  for (const Mean& m : losses) own[1] += m.sum;
  const std::uint64_t hash = hash_bytes(losses.data(), losses.size() * sizeof(Mean));
  std::memcpy(&own[0], &hash, sizeof hash);
  std::vector<std::array<double, 2>> all(static_cast<std::size_t>(all_.size()));
  all_.all_gather(ConstBuffer(own.data(), 2), Buffer(all[0].data(), 2 * all.size())).wait();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::size_t first = rank - rank % static_cast<std::size_t>(options_.tp);
    require(std::memcmp(&all[rank][0], &all[first][0], sizeof(double)) == 0, Errc::mismatch, "update ",
            update, ": ranks ", first, " and ", rank, " share layers (tp) and have different losses, ",
            all[first][1], " and ", all[rank][1], ": give both the same batches, as Engine::loader() does");
  }
}

void UpdateLoop::complete() {
  StepReport& report = reports_.add(graph_.defined());
  require_equal_losses(report.step);
  accumulation_.next_update();
  passes_of_updates_ = passes_;
  new_terms_ = false;
  tape_.seed(seeds_.of_pass(passes_));
  training_.complete(tape_.stream(), report, reports_.losses(), all_);
  reports_.finish(tape_.stream());
  flight::set_update(static_cast<std::uint64_t>(reports_.count().steps) + 1);
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
  flight::set_update(static_cast<std::uint64_t>(state.count.steps) + 1);
  training_.set_state(state.training);
  passes_ = passes_of_updates_ = state.passes;
  tape_.seed(seeds_.of_pass(passes_));
  if (given_terms_) return;
  options_.expected_terms = state.expected_terms;
  if (state.expected_terms) strategy_.settings().set_expected_terms(*state.expected_terms);
}

// ---- pass by pass

void UpdateLoop::begin_pass(bool has_terms) {
  require_no_failed_pass("backward()");
  in_pass_ = true;
  strategy_.require_may_follow(has_terms, follows());
  begin_pass();
}

void UpdateLoop::begin_pass() {
  in_pass_ = true;
  reports_.times().end(Phase::forward, tape_.stream());
  if (accumulation_.fresh()) {
    drop_graph();
    if (strategy_.reduced()) strategy_.zero_grad();  // those of run()
    reports_.losses().clear();
    training_.set_scale_and_rates(tape_.stream());
  }
  if (strategy_.reducing()) on_every_rank([&] { strategy_.finish_gradients(tape_.stream()); });
}

void UpdateLoop::end_pass() {
  in_pass_ = false;
  tape_.reset();
  accumulation_.count_pass();
  reports_.times().end(Phase::backward, tape_.stream());
  tape_.seed(seeds_.of_pass(++passes_));
}

void UpdateLoop::backward(const nn::Loss& loss) {
  const flight::Phase phase("backward");
  begin_pass(loss.has_terms());
  expect_terms(loss);
  reports_.losses().add(loss, tape_);
  strategy_.backward(tape_, loss, accumulation_.boundary(), follows());
  end_pass();
}

void UpdateLoop::backward_without_data() {
  const flight::Phase phase("backward");
  require_no_failed_pass("backward_without_data()");
  begin_pass();
  strategy_.backward_without_data(accumulation_.boundary());
  end_pass();
}

void UpdateLoop::reduce_and_apply() {
  const flight::Phase phase("step");
  on_every_rank([&] {
    strategy_.finish_gradients(tape_.stream());
    reports_.times().end(Phase::reduction, tape_.stream());
    // An update that is not finite never happens; TrainingStep::complete() decides whether it is an error.
    strategy_.clip_and_step(training_.optimizer(), {.max_norm = options_.max_norm, .skip_overflow = true},
                            tape_.stream());
    reports_.times().end(Phase::step, tape_.stream());
  });
}

bool UpdateLoop::step() {
  require_no_failed_pass("step()");
  require_synchronises("step()");
  require(accumulation_.passes() > 0, Errc::invalid_argument,
          "step() without a backward() since the last step()");
  if (!accumulation_.boundary()) {
    accumulation_.next_micro_batch();
    return false;
  }
  require(
      strategy_.reducing(), Errc::unsynchronised,
      "step() at the end of an update whose last backward() did not synchronise, inside NoSync or before a "
      "boundary was forced: gradients would differ over the ranks; call cancel_update(), and propagate "
      "the last micro-batch as the boundary, outside of NoSync");
  reduce_and_apply();
  strategy_.zero_grad();
  complete();
  return true;
}

// ---- updates that fail

void UpdateLoop::require_no_failed_pass(const char* call) const {
  require(!in_pass_, Errc::unsynchronised, call,
          " after a backward() that failed: call cancel_update(), which drops the update on every rank");
}

void UpdateLoop::require_synchronises(const char* call) const {
  require(strategy_.synchronises(), Errc::unsynchronised, call,
          " inside NoSync: gradients would differ over the ranks, and so would the parameters; end NoSync "
          "before the last backward() of an update, or leave it out: micro-batches before the last do not "
          "synchronise anyway");
}

template <class F>
void UpdateLoop::on_every_rank(const F& body) {
  try {
    body();
  } catch (...) {
    if (strategy_.dropped()) drop();  // else an error of the communicator, or of this rank alone
    throw;
  }
}

void UpdateLoop::drop() {
  rewind();
  if (options_.when_dropped) options_.when_dropped();
}

void UpdateLoop::abandon() {
  strategy_.zero_grad();
  rewind();
}

void UpdateLoop::rewind() {
  drop_graph();
  tape_.reset();
  in_pass_ = false;
  accumulation_.force_boundary({});
  accumulation_.next_update();
  reports_.losses().clear();
  reports_.restart();
  training_.cancel();
  if (std::exchange(new_terms_, false)) options_.expected_terms.reset();
  passes_ = passes_of_updates_;
  tape_.seed(seeds_.of_pass(passes_));
}

void UpdateLoop::cancel() {
  tape_.reset();
  strategy_.drop_update();
  drop();
}

// ---- update by update

void UpdateLoop::run(const std::function<nn::Loss(std::size_t)>& forward,
                     UpdateReports::Clock::time_point start) {
  require_no_failed_pass("train_batch()");
  require_synchronises("train_batch()");
  require_between_updates("train_batch()");
  in_pass_ = true;
  reports_.begin(start);
  seeds_.draw(passes_, tape_.stream());
  training_.set_scale_and_rates(tape_.stream());
  if (reports_.profiling()) drop_graph();
  graph_.run(
      tape_.stream(), captures(), [&] { run_passes(forward); },
      [&] { on_every_rank([&] { strategy_.agree_on_replay(training_.optimizer()); }); });
  passes_ += static_cast<std::uint64_t>(accumulation_.steps());
  in_pass_ = false;
  complete();
}

/// May be captured: everything that differs from one update to the next is in memory.
void UpdateLoop::run_passes(const std::function<nn::Loss(std::size_t)>& forward) {
  const auto steps = static_cast<std::size_t>(accumulation_.steps());
  strategy_.zero_grad();
  reports_.losses().clear();
  for (std::size_t m = 0; m < steps; ++m) {
    tape_.seed_at(seeds_.at(m));
    std::optional<flight::Phase> phase(std::in_place, "forward");
    const nn::Loss loss = forward(m);
    reports_.times().end(Phase::forward, tape_.stream());
    expect_terms(loss);
    phase.reset();
    phase.emplace("backward");
    reports_.losses().add(loss, tape_);
    strategy_.backward(tape_, loss, m + 1 == steps);
    tape_.reset();
    reports_.times().end(Phase::backward, tape_.stream());
  }
  reduce_and_apply();
}

}  // namespace rz
