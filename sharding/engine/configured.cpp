#include "sharding/engine/configured.h"

#include <algorithm>

#include "comm/core/error.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/power_sgd.h"
#include "sharding/optim/optimizers.h"

namespace rz {

namespace {

template <class Options>
ParameterGroups<Options> groups_of(const Options& options, Decay decay) {
  return decay == Decay::all ? all_parameters(options) : matrices_and_rest(options);
}

AdamOptions adam_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .epsilon = o.eps,
          .weight_decay = o.weight_decay,
          .bias_correction = o.bias_correction,
          .amsgrad = o.amsgrad,
          .maximize = o.maximize};
}

SgdOptions sgd_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .momentum = o.momentum,
          .weight_decay = o.weight_decay,
          .nesterov = o.nesterov,
          .dampening = o.dampening,
          .maximize = o.maximize};
}

AdagradOptions adagrad_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .epsilon = o.eps,
          .weight_decay = o.weight_decay,
          .lr_decay = o.lr_decay,
          .initial_accumulator = o.initial_accumulator_value,
          .maximize = o.maximize};
}

RmspropOptions rmsprop_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .alpha = o.alpha,
          .epsilon = o.eps,
          .weight_decay = o.weight_decay,
          .momentum = o.momentum,
          .centered = o.centered,
          .maximize = o.maximize};
}

LambOptions lamb_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .epsilon = o.eps,
          .weight_decay = o.weight_decay,
          .max_coeff = o.max_coeff,
          .min_coeff = o.min_coeff,
          .bias_correction = o.bias_correction,
          .eps_inside_sqrt = o.eps_inside_sqrt};
}

std::unique_ptr<Optimizer> make_configured_muon(const OptimizerConfig& o) {
  return make_muon({.learning_rate = o.muon_lr, .momentum = o.momentum, .weight_decay = o.weight_decay},
                   {o.adam_lr, o.beta1, o.beta2, o.eps, o.weight_decay});
}

/// Nothing is offloaded at stages that do not have it; the configuration warns of that.
OffloadOptions offload(const OffloadConfig& config, bool has) {
  const bool cpu = has && config.device == OffloadConfig::Device::cpu;
  return {.device = cpu ? OffloadDevice::cpu : OffloadDevice::none,
          .pin_memory = config.pin_memory,
          .ratio = config.ratio};
}

GatherLimits gather_limits(const ZeroConfig& zero) {
  const auto elements = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  return {.prefetch_bucket_size = elements(zero.prefetch_bucket_size),
          .max_live_parameters = elements(zero.max_live_parameters),
          .max_reuse_distance = elements(zero.max_reuse_distance),
          .param_persistence_threshold = elements(zero.param_persistence_threshold),
          .model_persistence_threshold = elements(zero.model_persistence_threshold)};
}

PowerSgdOptions power_sgd_options(const CommStateOption& o) {
  return {.matrix_approximation_rank = o.matrix_approximation_rank,
          .start_iter = o.start_power_sgd_iter,
          .use_error_feedback = o.use_error_feedback,
          .warm_start = o.warm_start,
          .min_compression_rate = o.min_compression_rate,
          .random_seed = o.random_seed};
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
      return make_power_sgd(power_sgd_options(ddp.comm_state_option));
    case batched_power_sgd:
      return make_batched_power_sgd(power_sgd_options(ddp.comm_state_option));
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

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& o, Decay decay) {
  using Type = OptimizerConfig::Type;
  switch (o.type) {
    case Type::adam:
      return make_adam(groups_of(adam_options(o), decay));
    case Type::adamw:
      return make_adamw(groups_of(adam_options(o), decay));
    case Type::sgd:
      return make_sgd(groups_of(sgd_options(o), decay));
    case Type::adagrad:
      return make_adagrad(groups_of(adagrad_options(o), decay));
    case Type::rmsprop:
      return make_rmsprop(groups_of(rmsprop_options(o), decay));
    case Type::lion:
      return make_lion(groups_of(LionOptions{o.lr, o.beta1, o.beta2, o.weight_decay}, decay));
    case Type::lamb:
      return make_lamb(groups_of(lamb_options(o), decay));
    case Type::muon:
      return make_configured_muon(o);
  }
  fail(Errc::invalid_argument, "no such optimizer");
}

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
  s.gathers = gather_limits(zero);
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
