#include "sharding/engine/engine_options.h"

#include <algorithm>
#include <memory>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/power_sgd.h"

namespace rz {

namespace {

std::shared_ptr<CommunicationHook> communication_hook(const DdpConfig& ddp) {
  using enum DdpConfig::CommHook;
  switch (ddp.comm_hook) {
    case no:
      return nullptr;
    case fp16:
      return make_fp16_compress_hook();
    case bf16:
      return make_bf16_compress_hook();
    case power_sgd:
      return make_power_sgd(ddp.comm_state_option);
    case batched_power_sgd:
      return make_batched_power_sgd(ddp.comm_state_option);
  }
  fail(Errc::invalid_argument, "no such hook");
}

/// Whether the configuration has the section, and does not disable it.
bool enables_join(const DsConfig& config) {
  return config.ddp.join.enable && std::ranges::any_of(config.settings, [](const ResolvedSetting& s) {
           return s.path == "ringzero.join.enable";
         });
}

void check_kind(const DsConfig& config, StrategyKind kind) {
  require(
      config.ddp.comm_hook == DdpConfig::CommHook::no || kind == StrategyKind::ddp, Errc::config, config.file,
      ": ringzero.comm_hook: ", name(config.ddp.comm_hook), " needs stage 0 (ddp), found ", name(kind),
      ": a hook forms the means of whole gradients; communication_data_type sends 16 bits in every stage");
  require(
      !enables_join(config) || kind != StrategyKind::zero3, Errc::config, config.file,
      ": ringzero.join: needs stage 0, 1 or 2, found zero3, which gathers values in every pass: run a rank "
      "without data on a batch of which all targets are ignored (-100), or set \"enable\" to false");
}

}  // namespace

StrategyKind strategy_kind(const DsConfig& config) {
  constexpr StrategyKind by_stage[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                       StrategyKind::zero3};
  return by_stage[config.stage];
}

StrategyOptions strategy_options(const DsConfig& config, StrategyKind kind,
                                 const std::function<void(StrategyOptions&)>& configure) {
  check_kind(config, kind);
  StrategyOptions s = config.strategy;
  s.zero_hpz_partition_size =
      kind == StrategyKind::zero3 ? std::max(1, config.strategy.zero_hpz_partition_size) : 1;
  // Nothing is offloaded at stages that do not have it; the configuration warns of that.
  if (kind == StrategyKind::ddp) s.offload_optimizer.device = OffloadDevice::none;
  if (kind != StrategyKind::zero3) s.offload_param.device = OffloadDevice::none;
  s.communication_hook = communication_hook(config.ddp);
  if (configure) configure(s);
  if (config.world_size_invariant) s.pairwise_passes = config.sizes.accumulation;
  return s;
}

}  // namespace rz
