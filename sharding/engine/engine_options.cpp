#include "sharding/engine/engine_options.h"

#include <algorithm>

#include "comm/core/error.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/power_sgd.h"

namespace rz {

namespace {

/// Nothing is offloaded at stages that do not have it; the configuration warns of that.
OffloadOptions offload(OffloadOptions options, bool has) {
  if (!has) options.device = OffloadDevice::none;
  return options;
}

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
  return by_stage[config.zero.stage];
}

StrategyOptions strategy_options(const DsConfig& config, StrategyKind kind,
                                 const std::function<void(StrategyOptions&)>& configure) {
  check_kind(config, kind);
  const ZeroConfig& zero = config.zero;
  StrategyOptions s;
  s.precision = {config.precision.parameters, config.precision.gradients};
  s.wire = {config.precision.communication, config.precision.prescale_gradients,
            config.precision.gradient_predivide_factor};
  if (zero.reduce_bucket_size) s.reduce_bucket_size = static_cast<std::size_t>(*zero.reduce_bucket_size);
  s.first_bucket_size = std::min(s.reduce_bucket_size.value_or(s.first_bucket_size), s.first_bucket_size);
  s.allgather_bucket_size = static_cast<std::size_t>(zero.allgather_bucket_size);
  s.overlap_comm = zero.overlap_comm.value_or(true);
  s.gathers = zero.gathers;
  if (kind == StrategyKind::zero3)
    s.zero_hpz_partition_size = std::max(1, static_cast<int>(zero.zero_hpz_partition_size));
  s.sub_group_size = static_cast<std::size_t>(zero.sub_group_size);
  s.offload_optimizer = offload(zero.offload_optimizer, kind != StrategyKind::ddp);
  s.offload_param = offload(zero.offload_param, kind == StrategyKind::zero3);
  s.unused_parameters = config.unused_parameters;
  s.find_unused_parameters = config.ddp.find_unused_parameters;
  s.static_graph = config.ddp.static_graph;
  s.broadcast_buffers = config.ddp.broadcast_buffers;
  s.communication_hook = communication_hook(config.ddp);
  if (configure) configure(s);
  if (config.world_size_invariant) s.pairwise_passes = config.sizes.accumulation;
  return s;
}

}  // namespace rz
