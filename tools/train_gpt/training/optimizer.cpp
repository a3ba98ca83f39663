#include "tools/train_gpt/training/optimizer.h"

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"

namespace rz::train_gpt {

namespace {

template <class Options>
ParameterGroups<Options> groups_of(const Options& options, bool decay_all) {
  return decay_all ? all_parameters(options) : matrices_and_rest(options);
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

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& o, bool decay_all) {
  using Type = OptimizerConfig::Type;
  switch (o.type) {
    case Type::adam:
      return make_adam(groups_of(adam_options(o), decay_all));
    case Type::adamw:
      return make_adamw(groups_of(adam_options(o), decay_all));
    case Type::sgd:
      return make_sgd(groups_of(SgdOptions{o.lr, o.momentum, o.weight_decay, o.nesterov}, decay_all));
    case Type::adagrad:
      return make_adagrad(groups_of(
          AdagradOptions{o.lr, o.eps, o.weight_decay, o.lr_decay, o.initial_accumulator_value}, decay_all));
    case Type::lion:
      return make_lion(groups_of(LionOptions{o.lr, o.beta1, o.beta2, o.weight_decay}, decay_all));
    case Type::lamb:
      return make_lamb(groups_of(lamb_options(o), decay_all));
    case Type::muon:
      return make_configured_muon(o);
  }
  fail(Errc::invalid_argument, "no such optimizer");
}

}  // namespace rz::train_gpt
