#include "sharding/strategy/strategy.h"

#include <cmath>
#include <utility>

#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/drain.h"
#include "comm/device/meta.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/replicas.h"
#include "sharding/strategy/sharding_plan.h"
#include "sharding/strategy/step_control.h"
#include "sharding/strategy/training_passes.h"
#include "sharding/strategy/updater.h"
#include "tensor/ops.h"

namespace rz {

namespace {

/// The device may still use memory that is freed next. The wait for a hung device is bounded.
void wait_for_device(const Stream& stream) noexcept {
  try {
    const Event last = stream.record();
    drain([&] { return last.done(); }, Deadline::after(drain_timeout));
  } catch (const std::exception&) {  // a failed stream uses no memory any more
  }
}

void require_same_options(StrategyKind kind, const StrategyOptions& options, Communicator& communicator) {
  Facts facts;
  facts("the strategy", kind);
  fields(facts, options);
  require_same("StrategyOptions", facts.list, "give every rank the same", communicator);
}

/// Of ranks that have the same options. A meta communicator sums nothing.
Mesh mesh_for(Mesh given, StrategyKind kind, const StrategyOptions& options) {
  require_same_options(kind, options, given.communicator());
  const MeshSizes sizes = mesh_of(given.sizes(), options);
  const Mesh mesh = sizes == given.sizes() ? std::move(given) : given.resized(sizes);
  const Communicator& c = mesh.communicator();
  const bool has_order = c.size() <= 3 || c.options().reduction_order == ReductionOrder::pairwise;
  require(options.pairwise_passes == 0 || has_order || is_meta(c.options().device), Errc::invalid_argument,
          "pairwise_passes needs a communicator whose CommOptions::reduction_order is pairwise");
  require(!mesh.tp() || !options.communication_hook, Errc::unsupported,
          "a communication hook on a mesh with tp: it may mix the gradients of different parts of a layer; "
          "remove the hook, or choose tp 1");
  return mesh;
}

}  // namespace

struct Strategy::State {
  State(StrategyKind, const ShardingPlan&, Module&, Mesh, StrategyOptions);

  void begin_pass(bool synchronise);
  /// backward() of a loss; `sum_count` is undefined for a scalar.
  void propagate(Tape&, Var loss, const Tensor& sum_count, bool synchronise, bool same_micro_batch);
  Tensor times_loss_gradient(const Tensor& ratio, const Stream&);
  void reset_gradients();
  /// Every rank drops the update, for what all of them throw next.
  void set_dropped();
  void require_whole_updates();
  void update(Optimizer&, const UpdateScale&, const Stream&);
  /// Drops the update, whose optimizers differ over the ranks.
  [[noreturn]] void fail_different(const Optimizer&);

  StrategyKind kind;
  StrategyOptions options;
  Runtime runtime;
  InstalledHooks hooks;
  ShardedModel model;
  TrainingPasses passes;
  OptimizerState optimizer_state;
  Updater updater;
  ParameterValues values;
  StepControl control;
  const Optimizer* announced = nullptr;  // by next_update()
  std::int64_t begun = 0, ended = 0;     // updates that all ranks have decided on, without those of graphs
  bool weightless = false;               // an update of begin_backward(), whose losses have no weights
  std::int64_t passes_without_data = 0;  // of the update
};

Strategy::State::State(StrategyKind of, const ShardingPlan& plan, Module& module, Mesh mesh,
                       StrategyOptions given)
    : kind(of),
      options(checked(std::move(given), plan)),
      runtime(mesh_for(std::move(mesh), of, options), offloads(options), options.zero_hpz_partition_size > 1),
      hooks(module.parameters(), passes, concat("a ", name(of), " strategy")),
      model(module, agree_on_model(module, runtime),
            storage_options(options, plan, module.parameters(), runtime.data.size(),
                            runtime.stream.device().kind),
            runtime),
      passes(module, model, runtime),
      optimizer_state(model, runtime),
      updater(model, optimizer_state, passes.rules(), runtime),
      values(model, passes.rules(), runtime),
      control(model, runtime) {
  allocate_buffers(module, allocator_on(runtime.stream.device()), runtime.stream);
}

void Strategy::State::begin_pass(bool synchronise) {
  values.release();
  passes.begin_backward(synchronise);
}

void Strategy::State::propagate(Tape& tape, Var loss, const Tensor& sum_count, bool synchronise,
                                bool follows) {
  begin_pass(synchronise);
  const Stream& stream = tape.stream();
  try {
    control.terms().check(tape.value(loss), stream);
    const Tensor ratio =
        follows ? control.terms().ratio(sum_count, tape.empty({2}), tape.empty({2}, DType::f64), stream)
                : Tensor();
    if (ratio.defined())
      tape.backward(loss, times_loss_gradient(ratio, stream));
    else if (stream.device().kind == Device::host)
      tape.backward(loss, control.loss_gradient());
    else
      tape.backward(loss, control.device_loss_gradient(stream));
  } catch (...) {
    passes.state().set_failed();
    throw;
  }
  if (!follows) control.terms().count(sum_count, stream);
}

Tensor Strategy::State::times_loss_gradient(const Tensor& ratio, const Stream& stream) {
  if (stream.device().kind == Device::host)
    ops::scale(ratio, ratio, control.loss_gradient(), stream);
  else
    ops::binary(ratio, ratio, control.device_loss_gradient(stream), ops::Binary::mul, stream);
  return ratio;
}

void Strategy::State::reset_gradients() {
  control.terms().reset();
  weightless = false;
  passes_without_data = 0;
  passes.reset();
  if (const auto before = passes.reduction().rebuild_buckets()) optimizer_state.move(*before);
}

void Strategy::State::set_dropped() {
  reset_gradients();
  passes.state().set_dropped();
}

/// Ranks decide on an update in a collective that each of them ends if one has. So they differ only if one
/// has failed between that and the end of the update.
void Strategy::State::require_whole_updates() {
  struct Count {
    std::int64_t begun, ended;
  };
  const Count mine{std::exchange(begun, ended), ended};
  std::vector<Count> all(static_cast<std::size_t>(runtime.communicator.size()));
  runtime.communicator.all_gather(ConstBuffer(&mine.begun, 2), Buffer(&all.data()->begun, 2 * all.size()))
      .wait();
  for (std::size_t r = 0; r < all.size(); ++r)
    if (all[r].begun != all[r].ended || all[r].ended != all[0].ended)
      throw Error(Errc::mismatch,
                  concat("update ", all[r].begun, " was ended by an error on rank ", r,
                         " while it changed the parameters, so it cannot be dropped: load the last "
                         "checkpoint, or start again from it"),
                  static_cast<int>(r));
}

void Strategy::State::fail_different(const Optimizer& optimizer) {
  set_dropped();
  updater.fail_different(optimizer);
}

void Strategy::State::update(Optimizer& optimizer, const UpdateScale& scale, const Stream& stream) {
  model.parameters().require_trainable("step()");
  values.release();
  updater.update(optimizer, scale, stream);
  model.values().release();
  passes.reduction().end_update();
}

// ---- the strategy

Strategy::Strategy(StrategyKind kind, const ShardingPlan& plan, Module& module, Mesh mesh,
                   StrategyOptions options)
    : state_(std::make_unique<State>(kind, plan, module, std::move(mesh), std::move(options))) {}

Strategy::~Strategy() {
  State& s = *state_;
  // Reductions in flight use buffers that are freed now.
  if (s.passes.state().reducing()) s.passes.reduction().abort();
  wait_for_device(s.runtime.stream);
}

StrategyKind Strategy::kind() const { return state_->kind; }

UpdateSettings& Strategy::settings() { return state_->control.settings(); }

ParameterValues& Strategy::values() { return state_->values; }

const ParameterValues& Strategy::values() const { return state_->values; }

OptimizerState& Strategy::optimizer_state() { return state_->optimizer_state; }

const OptimizerState& Strategy::optimizer_state() const { return state_->optimizer_state; }

NoSync::NoSync(Strategy& strategy) : strategy_(strategy) { strategy.state_->passes.state().hold(); }

NoSync::~NoSync() { strategy_.state_->passes.state().release(); }

// ---- a pass

void Strategy::attach(Tape& tape) {
  State& s = *state_;
  Stream& stream = s.runtime.stream;
  require(tape.stream().device() == stream.device(), Errc::invalid_argument, "the tape's stream is of ",
          name(tape.stream().device()), ", the strategy's communicator of ", name(stream.device()));
  tape.stream().wait(stream.record());  // values may still be in flight on the old stream
  stream = tape.stream();
}

void Strategy::begin_backward(bool synchronise) {
  State& s = *state_;
  require(s.control.terms().counted() == LossTerms::Counted::nothing, Errc::invalid_argument,
          "begin_backward() in an update whose other losses went to backward(): their weights are unknown to "
          "it; propagate all losses of an update by backward(), or one sum, a + b");
  s.begin_pass(synchronise);
  s.weightless = true;
}

void Strategy::backward(Tape& tape, const nn::Loss& loss, bool synchronise, bool same_micro_batch) {
  require_may_follow(loss.has_terms(), same_micro_batch);
  state_->propagate(tape, loss.sum, loss.sum_count, synchronise, same_micro_batch);
}

void Strategy::require_may_follow(bool has_terms, bool same_micro_batch) {
  State& s = *state_;
  require(!s.weightless, Errc::invalid_argument,
          "backward() in an update whose other losses went to begin_backward() and Tape::backward(): their "
          "weights are unknown to it; propagate all losses of an update by backward(), or one sum, a + b");
  s.control.terms().require_may_follow(has_terms, same_micro_batch);
}

void Strategy::backward_without_data(bool synchronise) {
  State& s = *state_;
  require(!s.runtime.mesh.tp(), Errc::unsupported,
          "backward_without_data() on a mesh with tp: the layers of other ranks need this one; give every "
          "rank as many batches (drop_last)");
  require(
      !s.model.flat_parameters(), Errc::unsupported,
      "backward_without_data(): zero3 gathers values in forward and backward, on all ranks; run the model "
      "on a batch of which all targets are ignored (-100), which counts no terms");
  s.values.release();
  s.passes.begin_without_data(synchronise);
  ++s.passes_without_data;
}

void Strategy::finish_gradients(const Stream& given) {
  State& s = *state_;
  const Stream& stream = s.runtime.stream_for(given);
  PassRules& rules = s.passes.rules();
  LossTerms& terms = s.control.terms();
  s.passes.finish(stream, static_cast<int>(terms.counted()));
  if (rules.failed()) {
    s.set_dropped();
    rules.fail();
  }
  if (!rules.same_optimizer()) s.fail_different(*s.announced);
  // A mean over scalars is one over all ranks; losses with terms are means over those that there are.
  const auto counted = static_cast<LossTerms::Counted>(rules.counted());
  if (counted == LossTerms::Counted::terms && s.passes_without_data > 0) terms.add_none(stream);
  if (counted == LossTerms::Counted::scalars) terms.add_ones(std::exchange(s.passes_without_data, 0), stream);
  if (const ScopeTrace* trace = s.model.trace()) rules.require_same_scopes(*trace);
  if (rules.values_need_check() && !stream.capturing()) s.values.compare();
  s.passes.state().set_reduced();
  s.control.reset_clipping();
}

void Strategy::agree_on_replay(const Optimizer& optimizer) {
  State& s = *state_;
  PassRules& rules = s.passes.rules();
  rules.exchange_before_replay();
  if (!rules.same_optimizer()) s.fail_different(optimizer);
}

void Strategy::cancel_update() {
  Communicator& all = state_->runtime.communicator;
  all.renew(concat("rank ", all.rank(), " cancelled the update: call cancel_update() on every rank"));
  drop_update();
}

void Strategy::drop_update() {
  State& s = *state_;
  s.passes.drop();
  s.reset_gradients();
  s.require_whole_updates();
}

void Strategy::zero_grad() {
  State& s = *state_;
  s.passes.state().require_may_reset();
  s.reset_gradients();
}

bool Strategy::synchronises() const { return state_->passes.state().synchronises(); }

bool Strategy::reducing() const { return state_->passes.state().reducing(); }

bool Strategy::reduced() const { return state_->passes.state().reduced(); }

bool Strategy::dropped() const {
  const PassState& state = state_->passes.state();
  return state.dropped() && !state.in_forward();
}

// ---- an update

double Strategy::gradient_norm(const Stream& given) {
  State& s = *state_;
  s.passes.state().require_reduced("gradient_norm()");
  return s.control.norm(s.runtime.stream_for(given));
}

double Strategy::clip_gradients(double max_norm, const Stream& given) {
  State& s = *state_;
  require(max_norm > 0, Errc::invalid_argument, "clip_gradients(", max_norm, "): the limit must be above 0");
  s.passes.state().require_reduced("clip_gradients()");
  return s.control.clip(max_norm, s.runtime.stream_for(given));
}

void Strategy::step(Optimizer& optimizer, const Stream& given) {
  State& s = *state_;
  s.passes.state().require_reduced("step()");
  const Stream& stream = s.runtime.stream_for(given);
  const StepControl::Decision decision = s.control.scale(s.updater.hash(optimizer), stream);
  if (decision.differs) s.fail_different(optimizer);
  const bool counts = !stream.capturing();
  s.begun += counts;
  s.update(optimizer, decision.scale, stream);
  s.updater.count_missed();
  s.passes.end_step();
  s.ended += counts;
}

void Strategy::clip_and_step(Optimizer& optimizer, const StepPolicy& policy, const Stream& given) {
  State& s = *state_;
  s.passes.state().require_reduced("clip_and_step()");
  settings().set_policy(policy);
  const Stream& stream = s.runtime.stream_for(given);
  const StepControl::Decision decision = s.control.decide(s.updater.hash(optimizer), stream);
  if (decision.differs) s.fail_different(optimizer);
  const bool counts = !stream.capturing();
  s.begun += counts;
  if (!decision.skip) s.update(optimizer, decision.scale, stream);
  if (!decision.skip && !decision.scale.device_outcome) s.updater.count_missed();
  s.passes.end_step();
  s.ended += counts;
}

Strategy::Outcome Strategy::outcome(Optimizer& optimizer, const Stream& given) {
  State& s = *state_;
  const Stream& stream = s.runtime.stream_for(given);
  const StepOutcome made = s.control.outcome(stream);
  const bool skipped = made.skip != 0;
  const double norm = std::isnan(made.norm) ? std::nan("") : made.norm;  // without a sign, "-nan" in lines
  if (stream.device().kind == Device::host) return {norm, skipped};
  if (skipped)
    optimizer.set_updates(optimizer.updates() - 1);
  else
    s.updater.count_missed();
  return {norm, skipped};
}

void Strategy::next_update(Optimizer& optimizer, const Stream& given) {
  State& s = *state_;
  const Stream& stream = s.runtime.stream_for(given);
  require(stream.device().kind == Device::cuda, Errc::unsupported,
          "next_update() is for updates on a CUDA device");
  s.passes.rules().set_optimizer(s.updater.hash(optimizer));
  s.announced = &optimizer;
  s.updater.prepare(optimizer, stream);
  s.control.write_settings(stream);
}

std::string Strategy::reason_against_capture() const {
  const State& s = *state_;
  const auto& hook = s.options.communication_hook;
  const OffloadOptions &state = s.options.offload_optimizer, &values = s.options.offload_param;
  if (hook && !hook->capturable()) return "the communication hook cannot be captured";
  if (!s.runtime.communicator.capturable())
    return concat("the backend cannot be captured: ", s.runtime.communicator.describe());
  if (!state.pin_memory || !values.pin_memory) return "offloaded memory is not pinned (pin_memory)";
  const bool offloads = state.device != OffloadDevice::none || values.device != OffloadDevice::none;
  return offloads ? s.runtime.communicator.reason_against_copies_in_graphs() : "";
}

// ---- statistics

LoggingData Strategy::logging_data() const {
  const State& s = *state_;
  const Communicator& communicator = s.runtime.communicator;
  const auto& hook = s.options.communication_hook;
  LoggingData data{.strategy = name(s.kind),
                   .rank = communicator.rank(),
                   .world_size = communicator.size(),
                   .mesh = s.runtime.mesh.sizes(),
                   .backend = communicator.describe(),
                   .gradients = s.options.precision.gradients,
                   .rebuilt_buckets = s.passes.reduction().has_rebuilt(),
                   .overlap = s.options.overlap_comm,
                   .find_unused_parameters = s.options.find_unused_parameters,
                   .static_graph = s.options.static_graph,
                   .broadcast_buffers = s.options.broadcast_buffers,
                   .communication_hook = hook ? hook->describe() : "none",
                   .forward_seconds = s.passes.state().last_step().forward,
                   .backward_seconds = s.passes.state().last_step().backward,
                   .communication_seconds = s.passes.reduction().seconds_of_last_step(),
                   .exposed_seconds = exposed_seconds(),
                   .traffic = traffic()};
  for (const auto& bucket : s.model.layout().buckets().buckets)
    data.bucket_bytes.push_back(bucket.count * size_of(bucket.dtype));
  const auto used = s.passes.rules().used_here();
  for (std::size_t m = 0; m < used.size(); ++m)
    if (!used[m]) data.unused_parameters.push_back(s.model.parameters().member(static_cast<int>(m)).name);
  return data;
}

Communicator& Strategy::communicator() const { return state_->runtime.communicator; }

const Mesh& Strategy::mesh() const { return state_->runtime.mesh; }

MemoryReport Strategy::memory() const {
  const State& s = *state_;
  MemoryReport report;
  const Device device = s.runtime.stream.device();
  const HeldBytes values = s.model.values().bytes(), state = s.optimizer_state.bytes();
  HeldBytes masters;
  for (const Tensor& t : s.model.masters()) masters.add(t, device);
  report.parameters = values.on_device;
  report.gradients = s.model.gradients().bytes() + s.passes.reduction().partial_sums();
  report.masters = masters.on_device;
  report.optimizer_state = state.on_device;
  report.offloaded = {values.on_host, masters.on_host, state.on_host};
  report.offload_has_no_effect = device.kind == Device::host && offloads(s.options);
  report.transient = s.runtime.transient.held();
  report.transient_in_use = s.runtime.transient.in_use();
  report.transient_peak = s.runtime.transient.peak();
  return report;
}

const MeshTraffic& Strategy::traffic() const { return state_->runtime.traffic; }

void Strategy::observe_communication(CommunicationObserver observer) {
  state_->runtime.mesh.meter()->started = std::move(observer.started);
  state_->runtime.exposed.waited = std::move(observer.waited);
}

double Strategy::exposed_seconds() const { return state_->runtime.exposed.last_step(); }

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Mesh mesh,
                                        StrategyOptions options) {
  return std::make_unique<Strategy>(kind, plan_of(kind), module, std::move(mesh), std::move(options));
}

}  // namespace rz
