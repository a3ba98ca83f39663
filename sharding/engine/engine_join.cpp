#include "sharding/engine/engine_join.h"

#include "comm/core/error.h"

namespace rz {

namespace {

JoinOptions join_options(const JoinConfig& config) {
  return {.divide_by_initial_world_size = config.divide_by_initial_world_size,
          .throw_on_early_termination = config.throw_on_early_termination};
}

}  // namespace

Engine::Join::Join(Engine& engine)
    : engine_(engine),
      enabled_(engine.config().ddp.join.enable),
      ranks_(engine.world().communicator(), join_options(engine.config().ddp.join)) {
  if (!enabled_) return;
  engine.updates();
  require(engine.strategy().kind() != StrategyKind::zero3, Errc::unsupported,
          "Engine::Join: zero3 gathers values in forward and backward, on all ranks; run a rank without data "
          "on a "
          "batch of which all targets are ignored (-100), which counts no terms");
  rounds_.take_part = [this] { return ranks_.take_part(words_.emplace_back()); };
  engine.updates().set_rounds(&rounds_);
}

Engine::Join::~Join() {
  if (enabled_) engine_.updates().set_rounds(nullptr);
}

bool Engine::Join::next(bool has_data) {
  active_ = has_data;
  if (!enabled_) return has_data;
  words_.clear();
  const bool any = ranks_.next(has_data);
  ++rounds_.made;
  const bool all = ranks_.active_ranks() == engine_.world().size();
  require(all || !any || !engine_.updates().fresh(), Errc::mismatch,
          "Engine::Join: ", engine_.world().size() - ranks_.active_ranks(),
          " ranks have no batch before the first update; give every rank at least one");
  return any;
}

}  // namespace rz
