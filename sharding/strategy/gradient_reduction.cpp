#include "sharding/strategy/gradient_reduction.h"

#include <algorithm>
#include <chrono>

#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

GradientReduction::GradientReduction(ShardedModel& model, const PassState& state, PassRules& rules,
                                     Runtime& runtime)
    : model_(model),
      state_(state),
      rules_(rules),
      runtime_(runtime),
      rebuild_(model.options().rebuild && model.options().plan == ShardingPlan{} ? Rebuild::pending
                                                                                 : Rebuild::never) {
  follow_layout();
  const FlatParameters* const flat = model.flat_parameters();
  if (!flat) return;
  progress_.resize(model.parameters().members().size());
  queued_.resize(static_cast<std::size_t>(flat->size()));
  first_.resize(static_cast<std::size_t>(flat->size()));
}

void GradientReduction::follow_layout() {
  scheduler_ = std::make_unique<BucketScheduler>(
      model_.layout().buckets(), model_.options().buckets,
      [this](int bucket, const Stream& stream) { return launch(bucket, stream); });
  if (const std::int64_t passes = model_.options().pairwise_passes)
    sums_.emplace(passes, model_.layout().size());
}

/// Leaves memory for the gradients of the next pass.
void GradientReduction::keep_passes() {
  const Stream& stream = runtime_.stream;
  for (int b = 0; b < model_.layout().size(); ++b) {
    model_.gradients().provide(b, stream);
    fill_unwritten(b, stream);
    sums_->keep(b, model_.gradients().whole(b), stream);
  }
  for (Parameter* p : model_.parameters().members()) p->grad_is_fresh = true;
}

// ---- a backward pass

void GradientReduction::begin_pass(bool synchronises) {
  if (sums_) {
    sums_->begin_pass(synchronises);
    if (sums_->group_ended()) keep_passes();
  }
  std::ranges::fill(progress_, Progress::untouched);
  std::ranges::fill(queued_, 0);
}

void GradientReduction::gradient_begins(int member) {
  if (!progress_.empty()) {
    require(!queued_[static_cast<std::size_t>(model_.layout().place(member).bucket)], Errc::unsupported,
            "zero3: a gradient for ", model_.parameters().member(member).name,
            " was computed after backward of the first of the scopes that list it; list it in every scope "
            "that uses it");
    progress_[static_cast<std::size_t>(member)] = Progress::touched;
  }
  model_.wire().advance(runtime_.stream);
  model_.gradients().provide(model_.layout().place(member).bucket, runtime_.stream);
}

void GradientReduction::gradient_ready(int member, const Stream& stream) {
  if (progress_.empty())
    scheduler_->ready(member, stream);
  else
    progress_[static_cast<std::size_t>(member)] = Progress::ready;
}

void GradientReduction::enter(const ScopeUse& use) {
  if (use.pass == Pass::backward) first_is_stale_ = true;
  if (state_.in_backward_scope()) return;
  if (std::exchange(first_is_stale_, false)) std::ranges::fill(first_, nullptr);
  for (const int u : use.flat)
    if (const Scope*& first = first_[static_cast<std::size_t>(u)]; !first) first = &use.scope;
}

/// Members that backward has not touched by now will not be touched: no scope that uses them is left. A scope
/// that runs several times leaves several times; its flat parameters are complete at the last.
bool GradientReduction::is_complete(const std::vector<int>& members) const {
  return std::ranges::none_of(
      members, [&](int m) { return progress_[static_cast<std::size_t>(m)] == Progress::touched; });
}

void GradientReduction::leave(const ScopeUse& use) {
  if (!state_.reducing()) return;
  for (const int u : use.flat) {
    if (!(*model_.flat_parameters())[u].trainable || first_[static_cast<std::size_t>(u)] != &use.scope)
      continue;
    const std::vector<int>& members = model_.layout().bucket(u).members;
    char& queued = queued_[static_cast<std::size_t>(u)];
    if (queued || !is_complete(members)) continue;
    queued = 1;
    for (const int m : members) scheduler_->ready(m, runtime_.stream);
  }
}

// ---- reductions

Work GradientReduction::launch(int bucket, const Stream& given) {
  const Stream& stream = runtime_.stream_for(given);
  model_.gradients().provide(bucket, runtime_.stream);
  fill_unwritten(bucket, stream);
  if (sums_) sums_->add_kept(bucket, model_.gradients().whole(bucket), stream);
  if (!is_exchanged(bucket)) return {};  // the mean of zeros
  return model_.gradients().reduce(bucket, stream);
}

/// Whole gradients that no rank computes in a static graph need no call.
bool GradientReduction::is_exchanged(int bucket) const {
  if (model_.options().plan.state == Placement::sharded) return true;
  return std::ranges::any_of(model_.layout().bucket(bucket).members,
                             [&](int m) { return rules_.may_be_used(m); });
}

/// Members that no rank uses in a static graph are apart from the others, at the end.
std::optional<BucketLayout> GradientReduction::rebuild_buckets() {
  if (rebuild_ != Rebuild::due) return {};
  rebuild_ = Rebuild::done;
  std::vector<int> order(ready_order_.begin(), ready_order_.end());
  const auto unused =
      std::stable_partition(order.begin(), order.end(), [&](int m) { return rules_.may_be_used(m); });
  BucketLayout before = model_.layout().buckets();
  model_.rebucket(order, static_cast<std::size_t>(unused - order.begin()));
  follow_layout();
  return before;
}

/// Zeros for gradients that no pass has written, and for padding.
void GradientReduction::fill_unwritten(int bucket, const Stream& stream) {
  const auto& members = model_.layout().bucket(bucket).members;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Parameter& p = model_.parameters().member(members[i]);
    if (p.grad_is_fresh && p.count()) ops::fill(p.grad, 0, stream);
    p.grad_is_fresh = false;
    const std::size_t gap = padded_extent(model_.layout().buckets(), bucket, i).count() - p.count();
    if (gap)
      ops::fill(Tensor::borrow(p.grad.raw() + p.grad.bytes(), {gap}, p.grad.dtype(), p.grad.device()), 0,
                stream);
  }
}

void GradientReduction::exchange() {
  if (runtime_.communicator.size() > 1)
    runtime_.traffic_of(runtime_.communicator).control.add(rules_.bytes());
  rules_.begin_exchange();
}

void GradientReduction::finish(const Stream& stream) {
  const bool captured = stream.capturing();
  if (captured) rules_.reuse_last();
  scheduler_->launch_rest(stream);
  if (const ScopeTrace* trace = model_.trace()) rules_.set_scopes(trace->hash());
  // A backend that stages device memory through the host starts a call when its stream arrives there, in no
  // fixed order with calls on host memory. So the exchange in host memory runs after the staged calls.
  const bool staged = stream.device().kind == Device::cuda && !runtime_.communicator.capturable();
  // Second steps may be calls of the same communicator, and start in time: the exchange follows them all.
  const bool follows = runtime_.replicas != nullptr;
  if (!captured && !staged && !follows) exchange();
  scheduler_->finish(stream);
  model_.wire().advance(stream, true);
  if (!captured && !staged && follows) exchange();
  runtime_.exposed.add(scheduler_->report().exposed);
  seconds_ += std::chrono::duration<double>(scheduler_->report().total).count();
  model_.gradients().settle(stream);
  runtime_.exposed.measure([&] {
    if (staged) {
      stream.synchronize();
      exchange();
    }
    rules_.wait();
  });
}

void GradientReduction::end_update() {
  rules_.end_update();
  if (rebuild_ != Rebuild::pending) return;
  rebuild_ = Rebuild::due;
  ready_order_.assign(scheduler_->ready_order().begin(), scheduler_->ready_order().end());
  // Here, where all ranks are in one update: a rank that cancels the next one may not come so far again.
  runtime_.communicator.broadcast(Buffer(ready_order_.data(), ready_order_.size()), 0).wait();
}

void GradientReduction::reset() {
  for (Parameter* p : model_.parameters().members()) p->grad_is_fresh = true;
  if (sums_) sums_->reset();
  model_.gradients().forget();
}

void GradientReduction::abort() noexcept {
  runtime_.abort("a strategy or engine was destroyed between the last backward() of an update and its end");
  drop();
}

void GradientReduction::drop() noexcept {
  try {
    scheduler_->reset();
  } catch (const std::exception&) {  // the failure that ended the operations
  }
  model_.wire().restart();
  if (const auto& hook = model_.options().communication_hook) hook->restart();
}

}  // namespace rz
