#include "sharding/strategies/strategy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/ops.h"

namespace rz {

namespace {

constexpr std::array strategy_names{"ddp", "zero1", "zero2", "zero3"};

std::size_t index(int i) { return static_cast<std::size_t>(i); }

void require_in_f32(const Parameter& p) {
  require(!p.value.defined() || p.value.dtype() == DType::f32, Errc::unsupported, "parameter ", p.name,
          " is ", name(p.value.dtype()),
          "; strategies take f32 parameters (StrategyOptions::precision says what they become)");
}

bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

void check(const Precision& p, Device device) {
  require(is_float(p.parameters), Errc::invalid_argument, "precision: parameters in ", name(p.parameters),
          "; choose f32, bf16 or f16");
  require(p.gradients == DType::f32 || p.gradients == p.parameters, Errc::invalid_argument,
          "precision: gradients in ", name(p.gradients), " of parameters in ", name(p.parameters),
          "; choose f32 or ", name(p.parameters));
  require(!p.mixed() || device.kind == Device::cuda, Errc::unsupported, "training in ", name(p.parameters),
          " needs a CUDA device, and the communicator's memory is on the ", name(device),
          "; train in f32, or choose a device");
}

}  // namespace

const char* name(StrategyKind kind) { return strategy_names[static_cast<std::size_t>(kind)]; }

StrategyKind strategy_from_name(std::string_view text) {
  for (std::size_t i = 0; i < strategy_names.size(); ++i)
    if (text == strategy_names[i]) return static_cast<StrategyKind>(i);
  fail(Errc::config, "unknown strategy \"", text, "\"; choose ddp, zero1, zero2 or zero3");
}

Strategy::Strategy(StrategyKind kind, Module& module, Communicator& communicator, StrategyOptions options)
    : kind_(kind),
      communicator_(communicator),
      options_(std::move(options)),
      stream_(Stream::create(communicator.options().device)),
      transient_(communicator.allocator(), [this] { stream_.synchronize(); }) {
  check(options_.precision, stream_.device());
  if (!options_.decays) options_.decays = [](const Parameter& p) { return p.shape.dims() >= 2; };
  const auto parameters = module.parameters();
  require_distinct_names(parameters);
  require_same_model(parameters, communicator);
  for (Parameter* p : parameters) {
    require_in_f32(*p);
    if (p->requires_grad) member_of_[p] = static_cast<int>(members_.size());
    (p->requires_grad ? members_ : frozen_).push_back(p);
  }
  for (const Parameter* p : members_) decays_.push_back(options_.decays(*p));
  missed_.resize(members_.size());
  agreement_ = std::make_unique<PassAgreement>(communicator, members_.size());
  require_same_options();
  broadcast_values(parameters, communicator);
}

void Strategy::require_same_options() {
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  std::vector<Fact> facts{{"the strategy", name(kind_)},
                          {"first_bucket_bytes", concat(options_.first_bucket_bytes)},
                          {"bucket_bytes", concat(options_.bucket_bytes)},
                          {"overlap", yes(options_.overlap)},
                          {"rebuild", yes(options_.rebuild)},
                          {"precision.parameters", name(precision().parameters)},
                          {"precision.gradients", name(precision().gradients)},
                          {"prefetch_scopes", concat(options_.prefetch_scopes)},
                          {"unused_parameters", name(options_.unused_parameters)}};
  for (std::size_t m = 0; m < members_.size(); ++m)
    facts.push_back({concat("weight decay of ", members_[m]->name), yes(decays_[m])});
  require_same("StrategyOptions", facts, "give every rank the same", communicator_);
}

Strategy::~Strategy() = default;

StrategyKind Strategy::kind() const { return kind_; }

int Strategy::member_of(const Parameter& p) const {
  const auto found = member_of_.find(&p);
  return found == member_of_.end() ? -1 : found->second;
}

BucketOptions Strategy::bucket_options() const {
  BucketOptions o;
  o.first_bytes = options_.first_bucket_bytes;
  o.cap_bytes = options_.bucket_bytes;
  o.align = norm_block;
  o.granularity = norm_block * index(communicator_.size());
  o.overlap = options_.overlap;
  return o;
}

void Strategy::set_layout(BucketLayout layout) {
  scheduler_ = std::make_unique<BucketScheduler>(
      std::move(layout), bucket_options(), [this](int bucket, const Stream& s) { return launch(bucket, s); });
  if (precision().mixed() && masters_.empty()) make_masters();
}

Range Strategy::updated_range(int bucket) const {
  const std::size_t count = layout().buckets[index(bucket)].count;
  return kind_ == StrategyKind::ddp ? Range{0, count}
                                    : shard_range(count, communicator_.rank(), communicator_.size());
}

void Strategy::attach(Tape& tape) {
  require(tape.stream().device() == stream_.device(), Errc::invalid_argument, "the tape's stream is of ",
          name(tape.stream().device()), ", the strategy's communicator of ", name(stream_.device()));
  TapeHooks hooks;
  hooks.enter = [this](const Scope& scope, Pass pass) { enter(scope, pass); };
  hooks.leave = [this](const Scope& scope, Pass pass) { leave(scope, pass); };
  hooks.owner = concat("a ", name(kind_), " strategy");
  hooks.alive = alive_;
  hooks.before_grad = [this](Parameter& p) {
    const int member = member_of(p);
    require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
            ", which was frozen or not part of the model when the strategy was made");
    require(state_ == State::local || state_ == State::reducing, Errc::invalid_argument,
            "a backward pass ran without begin_backward() before it");
    agreement_->mark_used(member);
    on_gradient_begin(member);
  };
  hooks.grad_ready = [this](Parameter& p, const Stream& stream) {
    if (synchronising()) on_gradient_ready(member_of(p), stream);
  };
  tape.set_hooks(std::move(hooks));
  tape.stream().wait(stream_.record());  // values may still be in flight on the old stream
  stream_ = tape.stream();
}

void Strategy::require_trainable(const char* call) const {
  for (const Parameter* p : members_)
    require(p->requires_grad, Errc::invalid_argument, call, ": ", p->name,
            " was frozen after the strategy was made, which still has its gradient and state; make a new "
            "strategy");
}

void Strategy::begin_backward(bool synchronise) {
  require(
      state_ != State::reducing, Errc::invalid_argument,
      "begin_backward() after a pass that synchronised: call finish_gradients() first, or cancel_update() "
      "after an error");
  require_trainable("begin_backward()");
  drop_gathered();
  if (state_ == State::reduced) carry_gradients(stream_);
  state_ = synchronise && no_sync_ == 0 ? State::reducing : State::local;
  on_backward_begin();
}

void Strategy::on_gradient_begin(int member) {
  ensure_gradient_storage(layout().offsets[index(member)].bucket);
}

void Strategy::on_gradient_ready(int member, const Stream& stream) { scheduler_->ready(member, stream); }

/// Fills gradients that no pass has written, and padding, with zeros, then starts the reduction.
Work Strategy::launch(int bucket, const Stream& given) {
  const Stream& stream = device_stream(given);
  ensure_gradient_storage(bucket);
  const auto& bucket_members = layout().buckets[index(bucket)].members;
  for (std::size_t i = 0; i < bucket_members.size(); ++i) {
    Parameter& p = *members_[index(bucket_members[i])];
    if (p.grad_is_fresh && p.count()) ops::fill(p.grad, 0, stream);
    p.grad_is_fresh = false;
    const std::size_t gap = padded_extent(layout(), bucket, i).count() - p.count();
    if (gap)
      ops::fill(Tensor::borrow(p.grad.raw() + p.grad.bytes(), {gap}, p.grad.dtype(), p.grad.device()), 0,
                stream);
  }
  return reduce(bucket, stream);
}

const Stream& Strategy::device_stream(const Stream& given) const {
  const bool named = given.device().kind == Device::cuda || given.threads() > 1;
  return named && given.device() == stream_.device() ? given : stream_;
}

void Strategy::finish_gradients(const Stream& given) {
  const Stream& stream = device_stream(given);
  require(
      state_ == State::reducing, Errc::unsynchronised,
      "finish_gradients() needs a backward pass that synchronises: begin_backward(true) outside of NoSync");
  reduce_all(stream, false);
  if (const int culprit = agreement_->cancelled_by(); culprit >= 0) {
    reset_gradients();
    throw Error(
        Errc::unsynchronised,
        concat("finish_gradients(): rank ", culprit,
               " gave the update up (cancel_update()); gradients are forgotten, go on with zero_grad()"),
        culprit);
  }
  state_ = State::none;  // if the comparison below throws
  if (agreement_->values_need_check() && !stream.capturing()) require_same_values();
  state_ = State::reduced;
  clip_factor_ = 1;
}

void Strategy::cancel_update(const Stream& given) {
  require(state_ != State::reduced, Errc::invalid_argument,
          "cancel_update() after finish_gradients(): zero_grad() forgets the gradients");
  reduce_all(device_stream(given), true);
  reset_gradients();
}

/// Every rank makes the same calls in the same order, whichever parameters its pass used.
void Strategy::reduce_all(const Stream& stream, bool cancelled) {
  const bool captured = stream.capturing();
  if (captured) agreement_->reuse_last();
  scheduler_->launch_rest(stream);
  // A backend that stages device memory through the host starts a call when its stream arrives there, in no
  // fixed order with calls on host memory. So the exchange in host memory runs after the staged calls.
  const bool staged = stream.device().kind == Device::cuda && !communicator_.capturable();
  if (!captured && !staged) agreement_->begin(cancelled);
  scheduler_->finish(stream);
  exposed_ += scheduler_->report().exposed;
  finish_reductions(stream);
  const auto start = std::chrono::steady_clock::now();
  if (staged) {
    stream.synchronize();
    agreement_->begin(cancelled);
  }
  agreement_->wait();
  exposed_ += std::chrono::steady_clock::now() - start;
}

void Strategy::reset_gradients() {
  for (Parameter* p : members_) p->grad_is_fresh = true;
  agreement_->reset();
  drop_gradients();
  state_ = State::none;
}

void Strategy::require_reduced(const char* call) const {
  static constexpr std::array why{
      "no backward pass came before it; call begin_backward(), Tape::backward() and finish_gradients()",
      "the last pass only added to this rank's own gradients; end the accumulation with begin_backward(true) "
      "and "
      "finish_gradients()",
      "finish_gradients() was not called after the last backward pass"};
  if (state_ != State::reduced)
    fail(Errc::unsynchronised, call,
         " with unsynchronised gradients: ", why[static_cast<std::size_t>(state_)]);
}

void Strategy::set_loss_scale(double scale) {
  require(scale > 0 && std::isfinite(scale), Errc::invalid_argument, "set_loss_scale(", scale,
          "): the factor must be positive and finite");
  loss_scale_ = scale;
}

/// Adds each element exactly once over all ranks.
void Strategy::add_squares(SquareSum& sum) const {
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    const Range own =
        shard_range(layout().buckets[index(b)].count, communicator_.rank(), communicator_.size());
    sum.add(updated(b).gradients.view(own.begin - updated_range(b).begin, {own.count()}));
  }
}

double Strategy::gradient_norm(const Stream& given) {
  require_reduced("gradient_norm()");
  SquareSum sum(device_stream(given), norm_words_);
  add_squares(sum);
  return step_outcome(sum_over_ranks(sum), {.loss_scale = loss_scale_}).norm;
}

double Strategy::sum_over_ranks(const SquareSum& sum) {
  ExactSum total = sum.read();
  const auto start = std::chrono::steady_clock::now();
  total.all_reduce(communicator_);
  exposed_ += std::chrono::steady_clock::now() - start;
  return total.value();
}

double Strategy::clip_gradients(double max_norm, const Stream& stream) {
  require(max_norm > 0, Errc::invalid_argument, "clip_gradients(", max_norm, "): the limit must be above 0");
  const double norm = gradient_norm(stream);
  clip_factor_ = clip_factor(norm, max_norm);
  return norm;
}

void Strategy::make_state(const Optimizer& optimizer) {
  if (optimizer_state_.empty())
    for (int s = 0; s < optimizer.state_count(); ++s) {
      auto& buckets = optimizer_state_.emplace_back();
      for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b)
        buckets.push_back(
            Tensor::zeros({updated_range(b).count()}, DType::f32, allocator_on(stream_.device())));
    }
  require(static_cast<int>(optimizer_state_.size()) == optimizer.state_count(), Errc::invalid_argument,
          "step(): ", optimizer.name(), " keeps ", optimizer.state_count(),
          " values an element, and earlier steps kept ", optimizer_state_.size(),
          "; use one optimizer with a strategy");
}

void Strategy::require_same_optimizer(const Optimizer& optimizer, const Stream& stream) {
  if (same_optimizer_ || communicator_.size() == 1) return;
  // Calls on host memory have no fixed order with staged calls on device memory.
  if (stream.device().kind == Device::cuda) stream.synchronize();
  require_same("the update", std::vector<Fact>{{"the optimizer", optimizer.describe()}},
               "give every rank the same", communicator_);
  same_optimizer_ = true;
}

const Tensor& Strategy::values_to_update(int bucket, const Updated& u) const {
  return precision().mixed() ? masters_[index(bucket)] : u.values;
}

bool Strategy::skipped(int member) const {
  return options_.unused_parameters == UnusedParameterPolicy::pytorch && !agreement_->is_used(member);
}

void Strategy::decide_updates() {
  updates_.clear();
  for (std::size_t m = 0; m < members_.size(); ++m)
    updates_.push_back({.skip = skipped(static_cast<int>(m)), .decay = decays_[m], .missed = missed_[m]});
}

/// Call after an update that was not skipped.
void Strategy::count_missed() {
  for (std::size_t m = 0; m < members_.size(); ++m) missed_[m] += skipped(static_cast<int>(m));
}

/// Members that missed the same number of updates are one call of the optimizer.
void Strategy::update_bucket(int bucket, const Optimizer& optimizer, const UpdateScale& scale,
                             const Stream& stream) {
  runs_ = member_runs(layout(), bucket, updated_range(bucket), updates_, std::move(runs_));
  std::ranges::sort(runs_, {},
                    [](const MemberRun& run) { return std::pair(run.update.missed, run.range.begin); });
  for (std::size_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
    const std::int64_t missed = runs_[begin].update.missed;
    while (end < runs_.size() && runs_[end].update.missed == missed) ++end;
    make_spans(bucket, {&runs_[begin], end - begin});
    UpdateScale own = scale;
    own.missed = missed;
    if (scale.constants)
      own.constants =
          static_cast<const std::byte*>(scale.constants) + constants_slot(missed, runs_[begin].first);
    optimizer.update(spans_, own, stream);
  }
}

void Strategy::make_spans(int bucket, std::span<const MemberRun> runs) {
  const Updated u = updated(bucket);
  const Range range = updated_range(bucket);
  spans_.clear();
  for (const MemberRun& run : runs) {
    const std::size_t at = run.range.begin - range.begin;
    UpdateSpan& span = spans_.emplace_back();
    span.value = values_to_update(bucket, u).data<float>() + at;
    span.gradient = u.gradients.raw() + at * size_of(u.gradients.dtype());
    span.gradient_dtype = u.gradients.dtype();
    if (precision().mixed()) {
      span.working = u.values.raw() + at * size_of(u.values.dtype());
      span.working_dtype = u.values.dtype();
    }
    span.count = run.range.count();
    span.decay = run.update.decay;
    for (std::size_t s = 0; s < optimizer_state_.size(); ++s)
      span.state[s] = optimizer_state_[s][index(bucket)].data<float>() + at;
  }
}

void Strategy::step(Optimizer& optimizer, const Stream& given) {
  require_reduced("step()");
  update_all(optimizer, {.factor = static_cast<float>(clip_factor_ / loss_scale_)}, device_stream(given));
  count_missed();
  end_step();
}

void Strategy::update_all(Optimizer& optimizer, const UpdateScale& scale, const Stream& stream) {
  require_trainable("step()");
  require_same_optimizer(optimizer, stream);
  make_state(optimizer);
  drop_gathered();
  decide_updates();
  if (!std::exchange(constants_current_, false)) optimizer.begin_update();
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    update_bucket(b, optimizer, scale, stream);
    published_.push_back(publish(b, stream));
    if (!options_.overlap) wait_exposed(published_.back(), stream);
  }
  for (const Work& work : published_) wait_exposed(work, stream);
  published_.clear();
  after_step(stream);
}

void Strategy::end_step() { last_exposed_ = std::exchange(exposed_, {}); }

void Strategy::zero_grad() {
  require(state_ != State::reducing, Errc::invalid_argument,
          "zero_grad() between begin_backward() and finish_gradients(): call cancel_update() after an error");
  reset_gradients();
}

void Strategy::wait_exposed(const Work& work, const Stream& stream) {
  const auto start = std::chrono::steady_clock::now();
  work.wait_on(stream);
  exposed_ += std::chrono::steady_clock::now() - start;
}

void Strategy::abort_in_flight() noexcept {
  if (state_ == State::reducing) abort_reductions();
  try {  // the device may still use memory that is freed now; the wait for a hung device is bounded
    const Deadline deadline = Deadline::after(std::chrono::seconds(5));
    const Event last = stream_.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  } catch (const std::exception&) {  // a failed stream uses no memory any more
  }
}

void Strategy::abort_reductions() noexcept {
  communicator_.abort("a strategy was destroyed between begin_backward() and finish_gradients()");
  try {
    scheduler_->reset();
  } catch (const std::exception&) {  // the operations fail because of the abort
  }
}

MemoryReport Strategy::memory() const {
  MemoryReport report;
  for (const auto& buckets : optimizer_state_)
    for (const Tensor& t : buckets) report.optimizer_state += t.bytes();
  for (const Tensor& t : masters_) report.masters += t.bytes();
  report.transient = transient_.held();
  report.transient_in_use = transient_.in_use();
  report.transient_peak = transient_.peak();
  count_memory(report);
  return report;
}

double Strategy::exposed_seconds() const { return std::chrono::duration<double>(last_exposed_).count(); }

}  // namespace rz
