#include "sharding/strategy/gradient_reduction.h"

#include <algorithm>

#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

GradientReduction::GradientReduction(ShardedModel& model, const PassRules& rules, bool rebuild,
                                     Runtime& runtime)
    : model_(model),
      runtime_(runtime),
      agreement_(runtime.communicator, model.parameters().members().size()),
      check_(rules, model.parameters()),
      rebuild_(rebuild) {
  follow_layout();
  if (FlatParameters* flat = model.flat_parameters())
    scopes_ = std::make_unique<ScopeReadiness>(*flat, model.parameters(), model.layout());
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

void GradientReduction::begin_pass(bool synchronises) {
  check_.begin_pass();
  if (sums_) {
    sums_->begin_pass(synchronises);
    if (sums_->group_ended()) keep_passes();
  }
  if (scopes_) scopes_->begin_pass();
}

void GradientReduction::begin_agreement(bool cancelled) {
  if (runtime_.communicator.size() > 1) runtime_.traffic.control.add(agreement_.bytes());
  agreement_.begin(cancelled);
}

void GradientReduction::begin_scopes() {
  if (scopes_) scopes_->begin_pass();
}

void GradientReduction::touch(int member) {
  if (scopes_) scopes_->touch(member);
}

void GradientReduction::gradient_begins(int member) {
  agreement_.mark_used(member);
  if (scopes_) scopes_->touch(member);
  model_.gradients().provide(model_.layout().place(member).bucket, runtime_.stream);
}

void GradientReduction::gradient_ready(int member, const Stream& stream) {
  check_.ready(member);
  if (scopes_)
    scopes_->ready(member);
  else
    scheduler_->ready(member, stream);
}

void GradientReduction::enter(const Scope& scope, Pass pass) {
  if (scopes_) scopes_->enter(scope, pass);
}

void GradientReduction::leave(const Scope& scope, bool synchronises) {
  if (scopes_) scopes_->leave(scope, synchronises ? scheduler_.get() : nullptr, runtime_.stream);
}

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
                             [&](int m) { return check_.may_be_used(m); });
}

/// Members that no rank uses in a static graph are apart from the others, at the end.
std::optional<BucketLayout> GradientReduction::rebuild_buckets() {
  if (!rebuild_.due()) return {};
  std::vector<int> order = rebuild_.take_order(runtime_.communicator);
  const auto unused =
      std::stable_partition(order.begin(), order.end(), [&](int m) { return check_.may_be_used(m); });
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

void GradientReduction::finish(const Stream& stream, bool cancelled) {
  const bool captured = stream.capturing();
  if (captured) agreement_.reuse_last();
  scheduler_->launch_rest(stream);
  if (const ScopeTrace* trace = model_.trace()) agreement_.set_scopes(trace->hash());
  agreement_.set_broken(check_.is_broken(agreement_.used_now()));
  // A backend that stages device memory through the host starts a call when its stream arrives there, in no
  // fixed order with calls on host memory. So the exchange in host memory runs after the staged calls.
  const bool staged = stream.device().kind == Device::cuda && !runtime_.communicator.capturable();
  if (!captured && !staged) begin_agreement(cancelled);
  scheduler_->finish(stream);
  runtime_.exposed.add(scheduler_->report().exposed);
  seconds_ += std::chrono::duration<double>(scheduler_->report().total).count();
  model_.gradients().settle(stream);
  runtime_.exposed.measure([&] {
    if (staged) {
      stream.synchronize();
      begin_agreement(cancelled);
    }
    agreement_.wait();
  });
}

void GradientReduction::fail() const {
  const int culprit = agreement_.cancelled_by();
  if (culprit < 0) check_.fail(agreement_.used_here(), runtime_.communicator);
  throw Error(Errc::cancelled,
              concat("rank ", culprit,
                     " cancelled the update (cancel_update()); this rank has dropped it too; continue with "
                     "the next update"),
              culprit);
}

void GradientReduction::record() {
  rebuild_.after_step(scheduler_->ready_order());
  if (check_.records()) check_.record(agreement_.used_here(), agreement_.used_anywhere());
}

void GradientReduction::reset() {
  for (Parameter* p : model_.parameters().members()) p->grad_is_fresh = true;
  agreement_.reset();
  if (scopes_) scopes_->abandon_pass();
  if (sums_) sums_->reset();
  model_.gradients().forget();
}

void GradientReduction::abort() noexcept {
  runtime_.abort("a strategy or engine was destroyed between the last backward() of an update and its end");
  try {
    scheduler_->reset();
  } catch (const std::exception&) {  // the operations fail because of the abort
  }
}

}  // namespace rz
