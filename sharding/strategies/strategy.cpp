#include "sharding/strategies/strategy.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "autograd_lite/init.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/allocate.h"

namespace rz {

namespace {

/// The device may still use memory that is freed next. The wait for a hung device is bounded.
void wait_for_device(const Stream& stream) noexcept {
  try {
    const Deadline deadline = Deadline::after(std::chrono::seconds(5));
    const Event last = stream.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  } catch (const std::exception&) {  // a failed stream uses no memory any more
  }
}

}  // namespace

Strategy::Strategy(StrategyKind kind, const ShardingPlan& plan, Module& module, Mesh mesh,
                   StrategyOptions options)
    : kind_(kind),
      module_(module),
      buffers_(module.buffers()),
      options_(checked(std::move(options), plan)),
      runtime_(std::move(mesh), offloads(options_)),
      hooks_(module.parameters(), hooks()),
      model_(module, agree_on_model(kind, module, options_, runtime_.communicator),
             storage_options(options_, plan, runtime_.shard_group.size(), runtime_.stream.device().kind),
             runtime_),
      access_(model_, runtime_),
      comparison_(model_, access_, runtime_),
      reduction_(model_, {options_.find_unused_parameters, options_.static_graph}, runtime_),
      members_(model_.parameters().members().size(), options_.unused_parameters, reduction_.agreement()),
      updater_(model_, members_, options_.overlap_comm, options_.sub_group_size, runtime_),
      values_(access_, comparison_, reduction_.agreement(), runtime_),
      optimizer_state_(model_.parameters(), updater_, members_),
      control_(model_, runtime_),
      rebuild_(options_.rebuild && plan == ShardingPlan{}),
      follower_(runtime_.exposed) {
  allocate_buffers(module, allocator_on(runtime_.stream.device()), runtime_.stream);
}

Strategy::~Strategy() {
  if (pass_.reducing()) reduction_.abort();  // reductions in flight use buffers that are freed now
  wait_for_device(runtime_.stream);
}

// ---- a pass

ParameterHooks Strategy::hooks() {
  ParameterHooks out;
  out.enter = [this](const Scope& scope, Pass pass) {
    follow(pass);
    model_.values().enter(scope, pass);
    reduction_.enter(scope, pass);
  };
  out.leave = [this](const Scope& scope, Pass pass) {
    model_.values().leave(scope, pass);
    follower_.leave(pass);
    if (pass == Pass::backward) reduction_.leave(scope, pass_.reducing());
  };
  out.before_grad = [this](Parameter& p) { gradient_begins(p); };
  out.grad_ready = [this](Parameter& p, const Stream& stream) {
    if (pass_.reducing()) reduction_.gradient_ready(model_.parameters().member_of(p), stream);
  };
  out.owner = concat("a ", name(kind_), " strategy");
  return out;
}

void Strategy::follow(Pass pass) {
  const bool evaluates = pass == Pass::forward && !module_.training();
  if (!evaluates && follower_.enter(pass)) share_buffers();
}

void Strategy::share_buffers() {
  if (!options_.broadcast_buffers || buffers_.empty()) return;
  std::vector<Tensor> values;
  for (const ModuleBuffer* buffer : buffers_) values.push_back(buffer->value);
  broadcast_buffers(values, runtime_.communicator, runtime_.stream);
}

void Strategy::gradient_begins(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
          ", which was frozen or not part of the model when the strategy was made");
  pass_.require_begun();
  reduction_.gradient_begins(member);
}

void Strategy::attach(Tape& tape) {
  Stream& stream = runtime_.stream;
  require(tape.stream().device() == stream.device(), Errc::invalid_argument, "the tape's stream is of ",
          name(tape.stream().device()), ", the strategy's communicator of ", name(stream.device()));
  tape.stream().wait(stream.record());  // values may still be in flight on the old stream
  stream = tape.stream();
}

void Strategy::begin_backward(bool synchronise) {
  pass_.require_may_begin();
  model_.parameters().require_trainable("begin_backward()");
  access_.release();
  if (pass_.reduced()) model_.gradients().reopen(runtime_.stream);
  pass_.begin(synchronise);
  follower_.begin_backward();
  reduction_.begin_pass();
}

void Strategy::backward(Tape& tape, const nn::Loss& loss, bool synchronise) {
  const Stream& stream = tape.stream();
  begin_backward(synchronise);
  control_.count_terms(loss.sum_count, stream);
  if (stream.device().kind == Device::host)
    tape.backward(loss.sum, control_.loss_gradient());
  else
    tape.backward(loss.sum, control_.device_loss_gradient(stream));
}

void Strategy::backward_without_data(bool synchronise) {
  require(
      !model_.flat_parameters(), Errc::unsupported,
      "backward_without_data(): zero3 gathers values in forward and backward, on all ranks; run the model "
      "on a batch of which all targets are ignored (-100), which counts no terms");
  follow(Pass::forward);
  begin_backward(synchronise);
  reduction_.check().set_without_data();
}

void Strategy::finish_gradients(const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  pass_.require_may_finish();
  follower_.end_backward();
  reduction_.agreement().set_terms_counted(control_.terms_counted());
  reduction_.finish(stream, false);
  if (const int culprit = reduction_.agreement().cancelled_by(); culprit >= 0) {
    reset_gradients();
    throw Error(
        Errc::unsynchronised,
        concat("finish_gradients(): rank ", culprit,
               " cancelled the update (cancel_update()); gradients are dropped; continue with zero_grad()"),
        culprit);
  }
  if (reduction_.agreement().is_broken()) {
    reset_gradients();
    reduction_.fail_rules();
  }
  pass_.reset();  // if a comparison below throws
  if (reduction_.check().without_data() && reduction_.agreement().terms_counted())
    control_.count_no_terms(stream);
  comparison_.require_same_scopes(reduction_.agreement());
  check_values(stream);
  pass_.set_reduced();
  control_.reset_clipping();
}

void Strategy::check_values(const Stream& stream) {
  PassAgreement& agreement = reduction_.agreement();
  if (!agreement.values_need_check() || stream.capturing()) return;
  comparison_.require_same_values();
  agreement.mark_values_checked();
}

void Strategy::cancel_update(const Stream& given) {
  pass_.require_may_cancel();
  reduction_.finish(runtime_.stream_for(given), true);
  follower_.abandon();
  reset_gradients();
}

void Strategy::zero_grad() {
  pass_.require_may_reset();
  reset_gradients();
}

void Strategy::reset_gradients() {
  control_.reset_terms();
  reduction_.reset();
  model_.values().release();  // a pass that failed may have left scopes open
  if (rebuild_.due()) {
    std::vector<int> order = rebuild_.take_order(runtime_.communicator);
    const std::size_t used = reduction_.sort_unused_last(order);
    const BucketLayout before = model_.layout().buckets();
    model_.rebucket(order, used);
    updater_.state().move(before);
    reduction_.follow_layout();
  }
  pass_.reset();
}

// ---- an update

double Strategy::gradient_norm(const Stream& given) {
  pass_.require_reduced("gradient_norm()");
  return control_.norm(runtime_.stream_for(given));
}

double Strategy::clip_gradients(double max_norm, const Stream& given) {
  require(max_norm > 0, Errc::invalid_argument, "clip_gradients(", max_norm, "): the limit must be above 0");
  pass_.require_reduced("gradient_norm()");
  return control_.clip(max_norm, runtime_.stream_for(given));
}

void Strategy::step(Optimizer& optimizer, const Stream& given) {
  pass_.require_reduced("step()");
  const Stream& stream = runtime_.stream_for(given);
  update(optimizer, control_.scale(stream), stream);
  members_.count_missed();
  end_step();
}

void Strategy::clip_and_step(Optimizer& optimizer, const StepPolicy& policy, const Stream& given) {
  pass_.require_reduced("clip_and_step()");
  settings().set_policy(policy);
  const Stream& stream = runtime_.stream_for(given);
  const StepControl::Decision decision = control_.decide(stream);
  if (!decision.skip) update(optimizer, decision.scale, stream);
  if (!decision.skip && !decision.scale.device_outcome) members_.count_missed();
  end_step();
}

void Strategy::end_step() {
  runtime_.exposed.end_step();
  reduction_.end_step();
  follower_.end_step();
}

void Strategy::update(Optimizer& optimizer, const UpdateScale& scale, const Stream& stream) {
  model_.parameters().require_trainable("step()");
  access_.release();
  updater_.update(optimizer, scale, stream);
  model_.values().release();
  rebuild_.after_step(reduction_.ready_order());
  reduction_.record_graph();
}

Strategy::Outcome Strategy::outcome(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  const StepOutcome made = control_.outcome(stream);
  const bool skipped = made.skip != 0;
  if (stream.device().kind == Device::host) return {made.norm, skipped};
  if (skipped)
    optimizer.set_updates(optimizer.updates() - 1);
  else
    members_.count_missed();
  return {made.norm, skipped};
}

void Strategy::next_update(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  require(stream.device().kind == Device::cuda, Errc::unsupported,
          "next_update() is for updates on a CUDA device");
  updater_.prepare(optimizer, stream);
  control_.write_settings(stream);
}

bool Strategy::capturable() const {
  return runtime_.communicator.capturable() && options_.offload_optimizer.pin_memory &&
         options_.offload_param.pin_memory;
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
                   .rebuilt_buckets = rebuild_.made(),
                   .overlap = options_.overlap_comm,
                   .find_unused_parameters = options_.find_unused_parameters,
                   .static_graph = options_.static_graph,
                   .broadcast_buffers = options_.broadcast_buffers,
                   .communication_hook = hook ? hook->describe() : "none",
                   .forward_seconds = follower_.last_step().forward,
                   .backward_seconds = follower_.last_step().backward,
                   .communication_seconds = reduction_.seconds_of_last_step(),
                   .exposed_seconds = exposed_seconds(),
                   .traffic = traffic()};
  for (const auto& bucket : model_.layout().buckets().buckets)
    data.bucket_bytes.push_back(bucket.count * size_of(bucket.dtype));
  const auto used = reduction_.agreement().used_here();
  for (std::size_t m = 0; m < used.size(); ++m)
    if (!used[m]) data.unused_parameters.push_back(model_.parameters().member(static_cast<int>(m)).name);
  return data;
}

MemoryReport Strategy::memory() const {
  MemoryReport report;
  const Device device = runtime_.stream.device();
  const HeldBytes values = model_.values().bytes(), state = updater_.state().bytes();
  HeldBytes masters;
  for (const Tensor& t : model_.masters()) masters.add(t, device);
  report.parameters = values.on_device;
  report.gradients = model_.gradients().bytes();
  report.masters = masters.on_device;
  report.optimizer_state = state.on_device;
  report.offloaded = {values.on_host, masters.on_host, state.on_host};
  report.offload_has_no_effect = device.kind == Device::host && offloads(options_);
  report.transient = runtime_.transient.held();
  report.transient_in_use = runtime_.transient.in_use();
  report.transient_peak = runtime_.transient.peak();
  return report;
}

}  // namespace rz
