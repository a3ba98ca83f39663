#include "sharding/strategy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/memory.h"
#include "sharding/ddp.h"
#include "sharding/grad_norm.h"
#include "sharding/same_model.h"
#include "sharding/zero.h"
#include "sharding/zero3.h"
#include "tensor/ops.h"

namespace rz {

namespace {

constexpr std::array strategy_names{"ddp", "zero1", "zero2", "zero3"};

std::size_t index(int i) { return static_cast<std::size_t>(i); }

void require_trainable_in_f32(const Parameter& p) {
  require(!p.value.defined() || p.value.dtype() == DType::f32, Errc::unsupported, "parameter ", p.name,
          " is ", name(p.value.dtype()), "; strategies train f32 parameters");
}

}  // namespace

const char* name(StrategyKind kind) { return strategy_names[static_cast<std::size_t>(kind)]; }

StrategyKind strategy_from_name(std::string_view text) {
  for (std::size_t i = 0; i < strategy_names.size(); ++i)
    if (text == strategy_names[i]) return static_cast<StrategyKind>(i);
  fail(Errc::config, "unknown strategy \"", text, "\"; choose ddp, zero1, zero2 or zero3");
}

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Communicator& communicator,
                                        StrategyOptions options) {
  switch (kind) {
    case StrategyKind::ddp:
      return std::make_unique<Ddp>(module, communicator, std::move(options));
    case StrategyKind::zero1:
    case StrategyKind::zero2:
      return std::make_unique<Zero>(kind, module, communicator, std::move(options));
    case StrategyKind::zero3:
      return std::make_unique<Zero3>(module, communicator, std::move(options));
  }
  fail(Errc::invalid_argument, "no such strategy");
}

Strategy::Strategy(StrategyKind kind, Module& module, Communicator& communicator, StrategyOptions options)
    : kind_(kind),
      communicator_(communicator),
      options_(std::move(options)),
      stream_(Stream::create(communicator.options().device)) {
  if (!options_.decays) options_.decays = [](const Parameter& p) { return p.shape.dims() >= 2; };
  const auto parameters = module.parameters();
  require_same_model(parameters, communicator);
  for (Parameter* p : parameters) {
    require_trainable_in_f32(*p);
    if (p->requires_grad) member_of_[p] = static_cast<int>(members_.size());
    (p->requires_grad ? members_ : frozen_).push_back(p);
  }
  broadcast_values(parameters, communicator);
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
}

void Strategy::attach(Tape& tape) {
  require(tape.stream().device() == stream_.device(), Errc::invalid_argument, "the tape's stream is of ",
          name(tape.stream().device()), ", the strategy's communicator of ", name(stream_.device()));
  tape.stream().wait(stream_.record());  // values may still be on their way
  stream_ = tape.stream();
  TapeHooks hooks;
  hooks.enter = [this](const Scope& scope, Pass pass) { enter(scope, pass); };
  hooks.leave = [this](const Scope& scope, Pass pass) { leave(scope, pass); };
  hooks.before_grad = [this](Parameter& p) {
    const int member = member_of(p);
    require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
            ", which was frozen or not part of the model when the strategy was made");
    require(state_ == State::local || state_ == State::reducing, Errc::invalid_argument,
            "a backward pass ran without begin_backward() before it");
    gradient_begins(member);
  };
  hooks.grad_ready = [this](Parameter& p, const Stream& stream) {
    if (synchronising()) gradient_ready(member_of(p), stream);
  };
  tape.set_hooks(std::move(hooks));
}

void Strategy::begin_backward(bool synchronise) {
  require(state_ != State::reducing, Errc::invalid_argument,
          "begin_backward() after a pass that synchronised: call finish_gradients() first");
  if (state_ == State::reduced) reopen_gradients(stream_);
  state_ = synchronise && no_sync_ == 0 ? State::reducing : State::local;
  pass_begins();
}

void Strategy::gradient_begins(int member) { provide_gradients(layout().places[index(member)].bucket); }

void Strategy::gradient_ready(int member, const Stream& stream) { scheduler_->ready(member, stream); }

/// Members that no pass has written count as zero, and padding is zero.
Work Strategy::launch(int bucket, const Stream& given) {
  const Stream& stream = device_stream(given);
  provide_gradients(bucket);
  const auto extents = padded_extents(layout(), bucket);
  const auto& bucket_members = layout().buckets[index(bucket)].members;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    Parameter& p = *members_[index(bucket_members[i])];
    if (p.grad_is_fresh && p.count()) ops::fill(p.grad, 0, stream);
    p.grad_is_fresh = false;
    const std::size_t gap = extents[i].count() - p.count();
    if (gap)
      ops::fill(Tensor::borrow(p.grad.data<float>() + p.count(), {gap}, DType::f32, p.grad.device()), 0,
                stream);
  }
  return reduce(bucket, stream);
}

const Stream& Strategy::device_stream(const Stream& given) const {
  return given.device() == stream_.device() ? given : stream_;
}

void Strategy::finish_gradients(const Stream& given) {
  const Stream& stream = device_stream(given);
  require(
      state_ == State::reducing, Errc::unsynchronised,
      "finish_gradients() needs a backward pass that synchronises: begin_backward(true) outside of NoSync");
  scheduler_->finish(stream);
  exposed_ += scheduler_->report().exposed;
  settle_gradients(stream);
  state_ = State::reduced;
  clip_ = 1;
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

double Strategy::gradient_norm(const Stream& given) {
  require_reduced("gradient_norm()");
  const Stream& stream = device_stream(given);
  SquareSum sum(stream, norm_words_);
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    const Updated u = updated(b);
    const Range own = part(layout().buckets[index(b)].count, communicator_.rank(), communicator_.size());
    sum.add(u.gradients.view(own.begin - u.range.begin, {own.count()}));
  }
  ExactSum total = sum.read();
  const auto start = std::chrono::steady_clock::now();
  total.all_reduce(communicator_);
  exposed_ += std::chrono::steady_clock::now() - start;
  return std::sqrt(total.value());
}

double Strategy::clip_gradients(double max_norm, const Stream& stream) {
  require(max_norm > 0, Errc::invalid_argument, "clip_gradients(", max_norm, "): the limit must be above 0");
  const double norm = gradient_norm(stream);
  const double factor = max_norm / (norm + 1e-6);
  clip_ = factor < 1 || std::isnan(factor) ? factor : 1;
  return norm;
}

void Strategy::make_state(const Optimizer& optimizer) {
  if (optimizer_state_.empty())
    for (int s = 0; s < optimizer.state_count(); ++s) {
      auto& buckets = optimizer_state_.emplace_back();
      for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b)
        buckets.push_back(
            Tensor::zeros({updated(b).range.count()}, DType::f32, allocator_on(stream_.device())));
    }
  require(static_cast<int>(optimizer_state_.size()) == optimizer.state_count(), Errc::invalid_argument,
          "step(): ", optimizer.name(), " keeps ", optimizer.state_count(),
          " values an element, and earlier steps kept ", optimizer_state_.size(),
          "; use one optimizer with a strategy");
}

void Strategy::update_bucket(int bucket, const Optimizer& optimizer, const Stream& stream) {
  const Updated u = updated(bucket);
  std::vector<UpdateSpan> spans;
  for (const DecayRun& run : decay_runs(layout(), members_, bucket, u.range, options_.decays)) {
    const std::size_t at = run.range.begin - u.range.begin;
    UpdateSpan& span = spans.emplace_back(UpdateSpan{
        u.values.data<float>() + at, u.gradients.data<float>() + at, {}, run.range.count(), run.decay});
    for (std::size_t s = 0; s < optimizer_state_.size(); ++s)
      span.state[s] = optimizer_state_[s][index(bucket)].data<float>() + at;
  }
  optimizer.update(spans, static_cast<float>(clip_), stream);
}

void Strategy::step(Optimizer& optimizer, const Stream& given) {
  require_reduced("step()");
  const Stream& stream = device_stream(given);
  make_state(optimizer);
  optimizer.begin_update();
  std::vector<Work> published;
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    update_bucket(b, optimizer, stream);
    published.push_back(publish(b, stream));
    if (!options_.overlap) wait_exposed(published.back(), stream);
  }
  for (const Work& work : published) wait_exposed(work, stream);
  after_step(stream);
  last_exposed_ = std::exchange(exposed_, {});
}

void Strategy::zero_grad() {
  require(state_ != State::reducing, Errc::invalid_argument,
          "zero_grad() between begin_backward() and finish_gradients()");
  for (Parameter* p : members_) p->grad_is_fresh = true;
  forget_gradients();
  state_ = State::none;
}

void Strategy::wait_exposed(const Work& work, const Stream& stream) {
  const auto start = std::chrono::steady_clock::now();
  work.wait_on(stream);
  exposed_ += std::chrono::steady_clock::now() - start;
}

void Strategy::change_layout(BucketLayout layout) {
  const BucketLayout before = this->layout();
  set_layout(std::move(layout));
  for (auto& buckets : optimizer_state_) {
    std::vector<Tensor> moved;
    for (const auto& b : this->layout().buckets)
      moved.push_back(Tensor::zeros({b.count}, DType::f32, allocator_on(stream_.device())));
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const auto from = before.places[m], to = this->layout().places[m];
      const Shape shape{members_[m]->count()};
      ops::copy(moved[index(to.bucket)].view(to.offset, shape),
                buckets[index(from.bucket)].view(from.offset, shape), stream_);
    }
    buckets = std::move(moved);
  }
}

void Strategy::abandon() noexcept {
  if (state_ == State::reducing) abort_reductions();
  try {  // a device may still use the memory that goes now; a hung one is not waited for
    const Deadline deadline = Deadline::after(std::chrono::seconds(5));
    const Event last = stream_.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  } catch (const std::exception&) {  // it has failed: it uses nothing any more
  }
}

void Strategy::abort_reductions() noexcept {
  communicator_.abort("a strategy was destroyed between begin_backward() and finish_gradients()");
  try {
    scheduler_->reset();
  } catch (const std::exception&) {  // that operations end badly is what was asked for
  }
}

MemoryReport Strategy::memory() const {
  MemoryReport report;
  for (const auto& buckets : optimizer_state_)
    for (const Tensor& t : buckets) report.optimizer_state += t.bytes();
  count_memory(report);
  return report;
}

double Strategy::exposed_seconds() const { return std::chrono::duration<double>(last_exposed_).count(); }

}  // namespace rz
