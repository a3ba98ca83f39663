#include "sharding/strategy/strategy.h"

#include <cmath>
#include <utility>

#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/drain.h"
#include "comm/device/meta.h"
#include "sharding/strategy/sharding_plan.h"
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

/// A meta communicator sums nothing.
Mesh with_order(Mesh mesh, const StrategyOptions& options) {
  const Communicator& c = mesh.communicator();
  const bool has_order = c.size() <= 3 || c.options().reduction_order == ReductionOrder::pairwise;
  require(options.pairwise_passes == 0 || has_order || is_meta(c.options().device), Errc::invalid_argument,
          "pairwise_passes needs a communicator whose CommOptions::reduction_order is pairwise");
  return mesh;
}

}  // namespace

Strategy::Strategy(StrategyKind kind, const ShardingPlan& plan, Module& module, Mesh mesh,
                   StrategyOptions options)
    : kind_(kind),
      options_(checked(std::move(options), plan)),
      runtime_(with_order(std::move(mesh), options_), offloads(options_)),
      hooks_(module.parameters(), passes_, concat("a ", name(kind), " strategy")),
      model_(module, agree_on_model(kind, module, options_, runtime_.communicator),
             storage_options(options_, plan, module.parameters(), runtime_.shard_group.size(),
                             runtime_.stream.device().kind),
             runtime_),
      passes_(module, model_,
              {.find_unused_parameters = options_.find_unused_parameters,
               .static_graph = options_.static_graph,
               .rebuild = options_.rebuild && plan == ShardingPlan{},
               .broadcast_buffers = options_.broadcast_buffers},
              runtime_),
      optimizer_state_(model_, runtime_),
      updater_(model_, optimizer_state_, passes_.rules(), options_, runtime_),
      values_(model_, passes_.rules(), runtime_),
      control_(model_, runtime_) {
  allocate_buffers(module, allocator_on(runtime_.stream.device()), runtime_.stream);
}

Strategy::~Strategy() {
  // Reductions in flight use buffers that are freed now.
  if (passes_.state().reducing()) passes_.reduction().abort();
  wait_for_device(runtime_.stream);
}

// ---- a pass

void Strategy::attach(Tape& tape) {
  Stream& stream = runtime_.stream;
  require(tape.stream().device() == stream.device(), Errc::invalid_argument, "the tape's stream is of ",
          name(tape.stream().device()), ", the strategy's communicator of ", name(stream.device()));
  tape.stream().wait(stream.record());  // values may still be in flight on the old stream
  stream = tape.stream();
}

void Strategy::begin_pass(bool synchronise) {
  values_.release();
  passes_.begin_backward(synchronise);
}

void Strategy::begin_backward(bool synchronise) {
  require(control_.terms().counted() == LossTerms::Counted::nothing, Errc::invalid_argument,
          "begin_backward() in an update whose other losses went to backward(): their weights are unknown to "
          "it; propagate all losses of an update by backward(), or one sum, a + b");
  begin_pass(synchronise);
  weightless_ = true;
}

void Strategy::backward(Tape& tape, const nn::Loss& loss, bool synchronise, bool same_micro_batch) {
  propagate(tape, loss.sum, loss.sum_count, synchronise, same_micro_batch);
}

void Strategy::backward(Tape& tape, Var loss, bool synchronise, bool same_micro_batch) {
  propagate(tape, loss, {}, synchronise, same_micro_batch);
}

void Strategy::propagate(Tape& tape, Var loss, const Tensor& sum_count, bool synchronise, bool follows) {
  require_may_follow(sum_count.defined(), follows);
  begin_pass(synchronise);
  const Stream& stream = tape.stream();
  try {
    control_.terms().check(tape.value(loss), stream);
    const Tensor ratio =
        follows ? control_.terms().ratio(sum_count, tape.empty({2}), tape.empty({2}, DType::f64), stream)
                : Tensor();
    if (ratio.defined())
      tape.backward(loss, times_loss_gradient(ratio, stream));
    else if (stream.device().kind == Device::host || !sum_count.defined())
      tape.backward(loss, control_.loss_gradient());
    else
      tape.backward(loss, control_.device_loss_gradient(stream));
  } catch (...) {
    passes_.state().set_failed();
    throw;
  }
  if (!follows) control_.terms().count(sum_count, stream);
}

void Strategy::require_may_follow(bool has_terms, bool same_micro_batch) {
  require(!weightless_, Errc::invalid_argument,
          "backward() in an update whose other losses went to begin_backward() and Tape::backward(): their "
          "weights are unknown to it; propagate all losses of an update by backward(), or one sum, a + b");
  control_.terms().require_may_follow(has_terms, same_micro_batch);
}

Tensor Strategy::times_loss_gradient(const Tensor& ratio, const Stream& stream) {
  if (stream.device().kind == Device::host)
    ops::scale(ratio, ratio, control_.loss_gradient(), stream);
  else
    ops::binary(ratio, ratio, control_.device_loss_gradient(stream), ops::Binary::mul, stream);
  return ratio;
}

void Strategy::backward_without_data(bool synchronise) {
  require(
      !model_.flat_parameters(), Errc::unsupported,
      "backward_without_data(): zero3 gathers values in forward and backward, on all ranks; run the model "
      "on a batch of which all targets are ignored (-100), which counts no terms");
  values_.release();
  passes_.begin_without_data(synchronise);
  ++passes_without_data_;
}

void Strategy::finish_gradients(const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  PassRules& rules = passes_.rules();
  LossTerms& terms = control_.terms();
  passes_.finish(stream, static_cast<int>(terms.counted()));
  if (rules.failed()) {
    reset_gradients();
    passes_.state().set_dropped();
    rules.fail();
  }
  if (!rules.same_optimizer()) fail_different(*announced_);
  // A mean over scalars is one over all ranks; losses with terms are means over those that there are.
  const auto counted = static_cast<LossTerms::Counted>(rules.counted());
  if (counted == LossTerms::Counted::terms && passes_without_data_ > 0) terms.add_none(stream);
  if (counted == LossTerms::Counted::scalars) terms.add_ones(std::exchange(passes_without_data_, 0), stream);
  values_.compare(stream);
  passes_.state().set_reduced();
  control_.reset_clipping();
}

void Strategy::agree_on_replay(const Optimizer& optimizer) {
  PassRules& rules = passes_.rules();
  rules.exchange_before_replay(false);
  if (!rules.same_optimizer()) fail_different(optimizer);
  if (!rules.failed()) return;
  reset_gradients();
  passes_.state().set_dropped();
  rules.fail();
}

void Strategy::cancel_replay() {
  passes_.abandon();
  passes_.rules().exchange_before_replay(true);
  reset_gradients();
}

void Strategy::cancel_update(const Stream& given, int passes) {
  if (dropped()) return;
  passes_.cancel(runtime_.stream_for(given), passes);
  reset_gradients();
}

void Strategy::zero_grad() {
  passes_.state().require_may_reset();
  reset_gradients();
}

void Strategy::reset_gradients() {
  control_.terms().reset();
  weightless_ = false;
  passes_without_data_ = 0;
  passes_.reset();
  if (const auto before = passes_.reduction().rebuild_buckets()) optimizer_state_.move(*before);
}

// ---- an update

double Strategy::gradient_norm(const Stream& given) {
  passes_.state().require_reduced("gradient_norm()");
  return control_.norm(runtime_.stream_for(given));
}

double Strategy::clip_gradients(double max_norm, const Stream& given) {
  require(max_norm > 0, Errc::invalid_argument, "clip_gradients(", max_norm, "): the limit must be above 0");
  passes_.state().require_reduced("gradient_norm()");
  return control_.clip(max_norm, runtime_.stream_for(given));
}

void Strategy::step(Optimizer& optimizer, const Stream& given) {
  passes_.state().require_reduced("step()");
  const Stream& stream = runtime_.stream_for(given);
  const StepControl::Decision decision = control_.scale(updater_.hash(optimizer), stream);
  if (decision.differs) fail_different(optimizer);
  update(optimizer, decision.scale, stream);
  updater_.count_missed();
  passes_.end_step();
}

void Strategy::clip_and_step(Optimizer& optimizer, const StepPolicy& policy, const Stream& given) {
  passes_.state().require_reduced("clip_and_step()");
  settings().set_policy(policy);
  const Stream& stream = runtime_.stream_for(given);
  const StepControl::Decision decision = control_.decide(updater_.hash(optimizer), stream);
  if (decision.differs) fail_different(optimizer);
  if (!decision.skip) update(optimizer, decision.scale, stream);
  if (!decision.skip && !decision.scale.device_outcome) updater_.count_missed();
  passes_.end_step();
}

void Strategy::fail_different(const Optimizer& optimizer) {
  reset_gradients();
  passes_.state().set_dropped();
  updater_.fail_different(optimizer);
}

void Strategy::update(Optimizer& optimizer, const UpdateScale& scale, const Stream& stream) {
  model_.parameters().require_trainable("step()");
  values_.release();
  updater_.update(optimizer, scale, stream);
  model_.values().release();
  passes_.reduction().end_update();
}

Strategy::Outcome Strategy::outcome(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  const StepOutcome made = control_.outcome(stream);
  const bool skipped = made.skip != 0;
  const double norm = std::isnan(made.norm) ? std::nan("") : made.norm;  // without a sign, "-nan" in lines
  if (stream.device().kind == Device::host) return {norm, skipped};
  if (skipped)
    optimizer.set_updates(optimizer.updates() - 1);
  else
    updater_.count_missed();
  return {norm, skipped};
}

void Strategy::next_update(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  require(stream.device().kind == Device::cuda, Errc::unsupported,
          "next_update() is for updates on a CUDA device");
  passes_.rules().set_optimizer(updater_.hash(optimizer));
  announced_ = &optimizer;
  updater_.prepare(optimizer, stream);
  control_.write_settings(stream);
}

bool Strategy::capturable() const {
  const auto& hook = options_.communication_hook;
  return (!hook || hook->capturable()) && runtime_.communicator.capturable() &&
         options_.offload_optimizer.pin_memory && options_.offload_param.pin_memory;
}

// ---- statistics

LoggingData Strategy::logging_data() const {
  const Communicator& communicator = runtime_.communicator;
  const auto& hook = options_.communication_hook;
  LoggingData data{.strategy = name(kind_),
                   .rank = communicator.rank(),
                   .world_size = communicator.size(),
                   .backend = communicator.describe(),
                   .gradients = options_.precision.gradients,
                   .rebuilt_buckets = passes_.reduction().has_rebuilt(),
                   .overlap = options_.overlap_comm,
                   .find_unused_parameters = options_.find_unused_parameters,
                   .static_graph = options_.static_graph,
                   .broadcast_buffers = options_.broadcast_buffers,
                   .communication_hook = hook ? hook->describe() : "none",
                   .forward_seconds = passes_.state().last_step().forward,
                   .backward_seconds = passes_.state().last_step().backward,
                   .communication_seconds = passes_.reduction().seconds_of_last_step(),
                   .exposed_seconds = exposed_seconds(),
                   .traffic = traffic()};
  for (const auto& bucket : model_.layout().buckets().buckets)
    data.bucket_bytes.push_back(bucket.count * size_of(bucket.dtype));
  const auto used = passes_.rules().used_here();
  for (std::size_t m = 0; m < used.size(); ++m)
    if (!used[m]) data.unused_parameters.push_back(model_.parameters().member(static_cast<int>(m)).name);
  return data;
}

MemoryReport Strategy::memory() const {
  MemoryReport report;
  const Device device = runtime_.stream.device();
  const HeldBytes values = model_.values().bytes(), state = optimizer_state_.bytes();
  HeldBytes masters;
  for (const Tensor& t : model_.masters()) masters.add(t, device);
  report.parameters = values.on_device;
  report.gradients = model_.gradients().bytes() + passes_.reduction().partial_sums();
  report.masters = masters.on_device;
  report.optimizer_state = state.on_device;
  report.offloaded = {values.on_host, masters.on_host, state.on_host};
  report.offload_has_no_effect = device.kind == Device::host && offloads(options_);
  report.transient = runtime_.transient.held();
  report.transient_in_use = runtime_.transient.in_use();
  report.transient_peak = runtime_.transient.peak();
  return report;
}

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Mesh mesh,
                                        StrategyOptions options) {
  return std::make_unique<Strategy>(kind, plan_of(kind), module, std::move(mesh), std::move(options));
}

}  // namespace rz
