#include "sharding/update/updater.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "sharding/consistency/rank_consistency.h"

namespace rz {

Updater::Updater(ShardedModel& model, MemberUpdates& members, bool overlap, Runtime& runtime)
    : model_(model), members_(members), overlap_(overlap), runtime_(runtime), state_(model, runtime) {}

void Updater::bind(const Optimizer& optimizer) {
  if (bound_ == optimizer.serial()) return;
  std::vector<int> groups;
  for (const Parameter* p : model_.parameters().members()) groups.push_back(optimizer.group_of(*p));
  state_.prepare(optimizer, groups);
  groups_ = std::move(groups);
  bound_ = optimizer.serial();
}

OptimizerState& Updater::state(const Optimizer& optimizer) {
  bind(optimizer);
  return state_;
}

void Updater::require_same_optimizer(const Optimizer& optimizer, const Stream& stream) {
  if (same_optimizer_ || runtime_.communicator.size() == 1) return;
  // Calls on host memory have no fixed order with staged calls on device memory.
  if (stream.device().kind == Device::cuda) stream.synchronize();
  std::vector<Fact> facts{{"the optimizer", optimizer.describe()}};
  for (const Parameter* p : model_.parameters().members())
    facts.push_back(
        {concat("the parameter group of ", p->name), optimizer.group_name(optimizer.group_of(*p))});
  require_same("the update", facts, "give every rank the same", runtime_.communicator);
  same_optimizer_ = true;
}

void Updater::update(Optimizer& optimizer, const UpdateScale& given, const Stream& stream) {
  require_same_optimizer(optimizer, stream);
  bind(optimizer);
  const std::span<const MemberUpdate> updates = members_.decide(groups_);
  const bool prepared = constants_.take_written();
  UpdateScale scale = given;
  if (!prepared) optimizer.begin_update();
  if (prepared && scale.device_outcome) scale.constants = constants_.of(0, 0);
  for (int b = 0; b < model_.layout().size(); ++b) {
    update_bucket(b, optimizer, updates, scale, stream);
    published_.push_back(model_.values().publish(b, stream));
    if (!overlap_) runtime_.exposed.wait(published_.back(), stream);
  }
  for (const Work& work : published_) runtime_.exposed.wait(work, stream);
  published_.clear();
}

/// Members that missed the same number of updates are one call of the optimizer.
void Updater::update_bucket(int bucket, const Optimizer& optimizer, std::span<const MemberUpdate> updates,
                            const UpdateScale& scale, const Stream& stream) {
  const FlatLayout& layout = model_.layout();
  runs_ = member_runs(layout.buckets(), bucket, layout.updated(bucket), updates, std::move(runs_));
  std::ranges::sort(runs_, {},
                    [](const MemberRun& run) { return std::pair(run.update.missed, run.range.begin); });
  for (std::size_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
    const std::int64_t missed = runs_[begin].update.missed;
    while (end < runs_.size() && runs_[end].update.missed == missed) ++end;
    make_spans(bucket, {&runs_[begin], end - begin});
    UpdateScale own = scale;
    own.missed = missed;
    if (scale.constants) own.constants = constants_.of(missed, runs_[begin].first);
    optimizer.update(spans_, own, stream);
  }
}

void Updater::make_spans(int bucket, std::span<const MemberRun> runs) {
  const Tensor values = model_.updated_f32(bucket), &gradients = model_.gradients().mean(bucket);
  const bool mixed = model_.options().precision.mixed();
  const Tensor working = mixed ? model_.values().updated(bucket) : Tensor();
  const Range range = model_.layout().updated(bucket);
  spans_.clear();
  for (const MemberRun& run : runs) {
    const std::size_t at = run.range.begin - range.begin;
    UpdateSpan& span = spans_.emplace_back();
    span.value = values.data<float>() + at;
    span.gradient = gradients.raw() + at * size_of(gradients.dtype());
    span.gradient_dtype = gradients.dtype();
    if (mixed) {
      span.working = working.raw() + at * size_of(working.dtype());
      span.working_dtype = working.dtype();
    }
    span.count = run.range.count();
    span.group = run.update.group;
    for (std::size_t s = 0; s < max_states; ++s) span.state[s] = state_.at(s, run.first, run.range.begin);
  }
}

void Updater::prepare(Optimizer& optimizer, const Stream& stream) {
  optimizer.begin_update();
  constants_.write(optimizer, members_.missed(), stream);
}

}  // namespace rz
