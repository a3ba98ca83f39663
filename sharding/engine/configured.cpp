#include "sharding/engine/configured.h"

#include <algorithm>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"

namespace rz {

namespace {

template <class Options>
ParameterGroups<Options> groups_of(const Options& options, Decay decay) {
  return decay == Decay::all ? all_parameters(options) : matrices_and_rest(options);
}

AdamOptions adam_options(const OptimizerConfig& o) {
  return {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.bias_correction};
}

LambOptions lamb_options(const OptimizerConfig& o) {
  return {.learning_rate = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .epsilon = o.eps,
          .weight_decay = o.weight_decay,
          .max_coeff = o.max_coeff,
          .min_coeff = o.min_coeff,
          .bias_correction = o.bias_correction};
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

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& o, Decay decay) {
  using Type = OptimizerConfig::Type;
  switch (o.type) {
    case Type::adam:
      return make_adam(groups_of(adam_options(o), decay));
    case Type::adamw:
      return make_adamw(groups_of(adam_options(o), decay));
    case Type::sgd:
      return make_sgd(groups_of(SgdOptions{o.lr, o.momentum, o.weight_decay, o.nesterov}, decay));
    case Type::adagrad:
      return make_adagrad(groups_of(
          AdagradOptions{o.lr, o.eps, o.weight_decay, o.lr_decay, o.initial_accumulator_value}, decay));
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

StrategyOptions strategy_options(const DsConfig& config, StrategyKind kind) {
  const ZeroConfig& zero = config.zero;
  StrategyOptions s;
  s.precision = {config.precision.parameters, config.precision.gradients};
  s.wire = {config.precision.communication, config.precision.prescale_gradients,
            config.precision.gradient_predivide_factor};
  if (zero.reduce_bucket_size) s.reduce_bucket_size = static_cast<std::size_t>(*zero.reduce_bucket_size);
  s.first_bucket_size = std::min(s.reduce_bucket_size, s.first_bucket_size);
  s.allgather_bucket_size = static_cast<std::size_t>(zero.allgather_bucket_size);
  s.overlap_comm = zero.overlap_comm.value_or(true);
  s.gathers = gather_limits(zero);
  s.sub_group_size = static_cast<std::size_t>(zero.sub_group_size);
  s.offload_optimizer = offload(zero.offload_optimizer, kind != StrategyKind::ddp);
  s.offload_param = offload(zero.offload_param, kind == StrategyKind::zero3);
  s.unused_parameters = config.unused_parameters;
  s.find_unused_parameters = zero.ignore_unused_parameters;
  return s;
}

}  // namespace rz
