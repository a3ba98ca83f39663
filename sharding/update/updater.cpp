#include "sharding/update/updater.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/consistency/rank_consistency.h"

namespace rz {

Updater::Updater(ShardedModel& model, MemberUpdates& members, bool overlap, std::size_t sub_group_size,
                 Runtime& runtime)
    : model_(model),
      members_(members),
      overlap_(overlap),
      runtime_(runtime),
      state_(model, runtime),
      spans_(model, state_),
      tiles_(model, state_, sub_group_size, runtime),
      norms_(model, runtime),
      directions_(model, runtime) {}

void Updater::bind(const Optimizer& optimizer) {
  if (bound_ == optimizer.serial()) return;
  std::vector<int> groups;
  std::vector<MemberUpdate> settings;
  for (const Parameter* p : model_.parameters().members()) {
    const int group = groups.emplace_back(optimizer.group_of(*p));
    settings.push_back({.group = group, .alone = optimizer.grain(group) != Grain::element});
  }
  state_.prepare(optimizer, groups);
  directions_.assign(
      [&](int m) { return optimizer.grain(groups[static_cast<std::size_t>(m)]) == Grain::matrix; });
  settings_ = std::move(settings);
  bound_ = optimizer.serial();
}

OptimizerState& Updater::state(const Optimizer& optimizer) {
  bind(optimizer);
  return state_;
}

bool Updater::has(const Optimizer& optimizer, Grain grain) const {
  return std::ranges::any_of(settings_,
                             [&](const MemberUpdate& m) { return optimizer.grain(m.group) == grain; });
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
  const std::span<const MemberUpdate> updates = members_.decide(settings_);
  const bool prepared = constants_.take_written();
  UpdateScale scale = given;
  if (!prepared) optimizer.begin_update();
  if (prepared && scale.device_outcome) scale.constants = constants_.of(0, 0);
  if (has(optimizer, Grain::parameter))
    norms_.measure(
        optimizer, tiles_, spans_, updates, constants_, scale,
        [&](int m) {
          return optimizer.grain(updates[static_cast<std::size_t>(m)].group) == Grain::parameter;
        },
        stream);
  if (has(optimizer, Grain::matrix)) directions_.compute(optimizer, spans_, updates, scale, stream);
  for (int b = 0; b < model_.layout().size(); ++b) {
    update_bucket(b, optimizer, updates, scale, stream);
    published_.push_back(model_.values().publish(b, stream));
    if (!overlap_) runtime_.exposed.wait(published_.back(), stream);
  }
  tiles_.finish(stream);
  for (const Work& work : published_) runtime_.exposed.wait(work, stream);
  published_.clear();
}

void Updater::update_bucket(int bucket, const Optimizer& optimizer, std::span<const MemberUpdate> updates,
                            const UpdateScale& scale, const Stream& stream) {
  const Tensor directions = directions_.distribute(bucket, updates, stream);
  float* const at = directions.defined() ? directions.data<float>() : nullptr;
  tiles_.each(bucket, stream, [&](const Tile& tile, const TileMemory& memory) {
    for (const UpdateSpans::Call& call : spans_.calls(tile, memory, updates, at)) {
      UpdateScale own = scale;
      own.missed = call.missed;
      if (scale.constants) own.constants = constants_.of(call.missed, call.first);
      optimizer.update(call.spans, own, stream);
    }
  });
}

void Updater::prepare(Optimizer& optimizer, const Stream& stream) {
  optimizer.begin_update();
  constants_.write(optimizer, members_.missed(), stream);
}

}  // namespace rz
