#pragma once
/// Options of Adam as constants of the kernels.

#include <cmath>
#include <string>
#include <vector>

#include "sharding/optim/optimizers.h"
#include "sharding/optim/option_checks.h"
#include "tensor/kernels/scalar/optimizer_step.h"

namespace rz {

inline void check_adam(const char* optimizer, const AdamOptions& o) {
  require_not_negative(optimizer, "learning_rate", o.learning_rate);
  require_not_negative(optimizer, "weight_decay", o.weight_decay);
  require_not_negative(optimizer, "epsilon", o.epsilon);
  require_moment(optimizer, "beta1", o.beta1);
  require_moment(optimizer, "beta2", o.beta2);
}

inline std::string describe_adam(const AdamOptions& o, double rate) {
  return concat("learning_rate ", all_digits(rate), ", beta1 ", all_digits(o.beta1), ", beta2 ",
                all_digits(o.beta2), ", epsilon ", all_digits(o.epsilon), ", weight_decay ",
                all_digits(o.weight_decay), o.bias_correction ? "" : ", no bias_correction",
                o.amsgrad ? ", amsgrad" : "", o.maximize ? ", maximize" : "");
}

inline std::vector<StateSpec> adam_states(const AdamOptions& o) {
  std::vector<StateSpec> all{{.name = "exp_avg"}, {.name = "exp_avg_sq"}};
  if (o.amsgrad) all.push_back({.name = "max_exp_avg_sq", .substitute = "exp_avg_sq"});
  return all;
}

/// For update number t, from 1.
inline kernels::AdamFactors adam_factors(const AdamOptions& o, bool decoupled, double rate, double t) {
  kernels::AdamStep step;
  step.lr = rate;
  step.beta1 = o.beta1, step.beta2 = o.beta2;
  step.eps = static_cast<float>(o.epsilon);
  step.weight_decay = static_cast<float>(o.weight_decay);
  if (o.bias_correction) {
    step.bias_correction1 = 1 - std::pow(o.beta1, t);
    step.bias_correction2_sqrt = std::sqrt(1 - std::pow(o.beta2, t));
  }
  step.scale = sign_of(o.maximize);
  step.decoupled = decoupled;
  return kernels::adam_factors(step);
}

}  // namespace rz
