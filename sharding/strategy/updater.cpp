#include "sharding/strategy/updater.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"

namespace rz {

Updater::Updater(ShardedModel& model, OptimizerState& state, const PassRules& rules, Runtime& runtime)
    : model_(model),
      state_(state),
      rules_(rules),
      overlap_(model.options().overlap_comm),
      unused_parameters_(model.options().unused_parameters),
      runtime_(runtime),
      spans_(model, state_),
      tiles_(model, state_, model.options().sub_group_size, runtime),
      norms_(model, runtime),
      directions_(model, runtime) {}

void Updater::bind(const Optimizer& optimizer) {
  state_.prepare(optimizer);
  if (bound_ == optimizer.serial()) return;
  updates_.clear();
  for (int m = 0; m < static_cast<int>(model_.parameters().members().size()); ++m)
    updates_.push_back(
        {.group = state_.group_of(m), .alone = optimizer.grain(state_.group_of(m)) != Grain::element});
  require(!runtime_.mesh.tp() || !has(optimizer, Grain::matrix), Errc::unsupported, optimizer.name(),
          " on a mesh with tp ", runtime_.place.part.ranks,
          ": it needs whole matrices, which no rank has; choose another optimizer, or tp 1");
  directions_.assign([&](int m) { return optimizer.grain(state_.group_of(m)) == Grain::matrix; });
  bound_ = optimizer.serial();
}

bool Updater::has(const Optimizer& optimizer, Grain grain) const {
  return std::ranges::any_of(updates_,
                             [&](const MemberUpdate& m) { return optimizer.grain(m.group) == grain; });
}

bool Updater::skips(std::size_t member) const {
  return unused_parameters_ == UnusedParameterPolicy::pytorch && !rules_.is_used(static_cast<int>(member));
}

void Updater::count_missed() {
  const std::span<std::int64_t> missed = state_.missed();
  for (std::size_t m = 0; m < missed.size(); ++m) missed[m] += skips(m);
}

std::vector<Fact> Updater::facts(const Optimizer& optimizer) const {
  std::vector<Fact> all{{"the optimizer", optimizer.describe()}};
  for (const Parameter* p : model_.parameters().members())
    all.push_back({concat("the parameter group of ", p->name), optimizer.group_name(optimizer.group_of(*p))});
  all.push_back({"the number of updates of the optimizer", concat(optimizer.updates())});
  return all;
}

namespace {
constexpr const char* update_subject = "the update";
constexpr const char* update_advice = "give every rank the same";
}  // namespace

void Updater::require_same_optimizer(const Optimizer& optimizer, const Stream& stream) {
  if (same_optimizer_ || runtime_.communicator.size() == 1 || stream.device().kind == Device::host) return;
  // Calls on host memory have no fixed order with staged calls on device memory.
  stream.synchronize();
  require_same(update_subject, facts(optimizer), update_advice, runtime_.communicator);
  same_optimizer_ = true;
}

void Updater::fail_different(const Optimizer& optimizer) {
  require_same(update_subject, facts(optimizer), update_advice, runtime_.communicator);
  fail(Errc::mismatch, update_subject, " differs over the ranks: the optimizer is ", optimizer.describe(),
       " on this rank; ", update_advice);
}

/// The description with rates and betas of 0.
std::uint64_t Updater::hash_of_options(Optimizer& optimizer) const {
  std::vector<double> rates;
  std::vector<std::array<double, 2>> betas;
  for (int g = 0; g < optimizer.groups(); ++g) {
    rates.push_back(optimizer.learning_rate(g)), betas.push_back(optimizer.betas(g));
    optimizer.set_learning_rate(g, 0);
    if (optimizer.has_betas(g)) optimizer.set_betas(g, {});
  }
  std::string text = optimizer.describe();
  for (int g = 0; g < optimizer.groups(); ++g) {
    optimizer.set_learning_rate(g, rates[static_cast<std::size_t>(g)]);
    if (optimizer.has_betas(g)) optimizer.set_betas(g, betas[static_cast<std::size_t>(g)]);
  }
  for (const Parameter* p : model_.parameters().members()) text += concat(" ", optimizer.group_of(*p));
  return hash_bytes(text.data(), text.size());
}

std::uint64_t Updater::hash(Optimizer& optimizer) {
  if (hashed_ != optimizer.serial()) {
    options_hash_ = hash_of_options(optimizer);
    hashed_ = optimizer.serial();
  }
  hashed_numbers_.clear();
  for (int g = 0; g < optimizer.groups(); ++g) {
    const std::array<double, 2> betas = optimizer.betas(g);
    hashed_numbers_.insert(hashed_numbers_.end(), {optimizer.learning_rate(g), betas[0], betas[1]});
  }
  hashed_numbers_.push_back(static_cast<double>(optimizer.updates()));
  return hash_bytes(hashed_numbers_.data(), hashed_numbers_.size() * sizeof(double), options_hash_);
}

void Updater::update(Optimizer& optimizer, const UpdateScale& given, const Stream& stream) {
  require_same_optimizer(optimizer, stream);
  bind(optimizer);
  for (std::size_t m = 0; m < updates_.size(); ++m)
    updates_[m].skip = skips(m), updates_[m].missed = state_.missed()[m];
  const bool prepared = constants_.take_written();
  UpdateScale scale = given;
  if (!prepared) optimizer.begin_update();
  if (prepared && scale.device_outcome) scale.constants = constants_.get();
  if (has(optimizer, Grain::parameter))
    norms_.measure(
        optimizer, tiles_, spans_, updates_, constants_, scale,
        [&](int m) { return optimizer.grain(state_.group_of(m)) == Grain::parameter; }, stream);
  if (has(optimizer, Grain::matrix)) directions_.compute(optimizer, spans_, updates_, scale, stream);
  for (int b = 0; b < model_.layout().size(); ++b) {
    update_bucket(b, optimizer, scale, stream);
    published_.push_back(model_.values().publish(b, stream));
    if (!overlap_) runtime_.exposed.wait(published_.back(), stream);
  }
  tiles_.finish(stream);
  for (const Work& work : published_) runtime_.exposed.wait(work, stream);
  published_.clear();
}

void Updater::update_bucket(int bucket, const Optimizer& optimizer, const UpdateScale& scale,
                            const Stream& stream) {
  const Tensor directions = directions_.distribute(bucket, updates_, stream);
  float* const at = directions.defined() ? directions.data<float>() : nullptr;
  tiles_.each(bucket, stream, [&](const Tile& tile, const TileMemory& memory) {
    for (const UpdateSpans::Call& call : spans_.calls(tile, memory, updates_, at))
      optimizer.update(call.spans, constants_.scale_of(call, scale), stream);
  });
}

void Updater::prepare(Optimizer& optimizer, const Stream& stream) {
  optimizer.begin_update();
  constants_.write(optimizer, state_.missed(), stream);
}

}  // namespace rz
