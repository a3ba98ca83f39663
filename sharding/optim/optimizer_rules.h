#pragma once
/// What the rules of optimizers share: checks and texts of options, groups, updates of spans, and the rule of
/// Adam.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/optim/optimizer.h"
#include "sharding/optim/optimizers.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer/optimizer.h"
#include "tensor/kernels/scalar/optimizer_step.h"

namespace rz {

// ---- options

/// Errc::invalid_argument unless value >= 0, and finite in f32.
inline void require_not_negative(const char* optimizer, const char* option, double value) {
  require(!(value < 0), Errc::invalid_argument, optimizer, ": ", option, " = ", value,
          " must not be negative");
  require_finite(optimizer, option, value);
}

/// Errc::invalid_argument unless the decay rate of a moving average lies in [0, 1).
inline void require_moment(const char* optimizer, const char* option, double value) {
  require(value >= 0 && value < 1, Errc::invalid_argument, optimizer, ": ", option, " = ", value,
          " must lie in [0, 1)");
}

/// Factor of the gradients of an optimizer that maximizes the loss, or minimizes it.
inline float sign_of(bool maximize) { return maximize ? -1.0f : 1.0f; }

/// Decimal text that parses to the same number.
inline std::string all_digits(double x) { return rounded(x, 17); }

// ---- groups

/// Base of optimizers whose groups have options of one type.
template <class Options>
class GroupedOptimizer : public Optimizer {
 public:
  bool has_betas(int) const override {
    return requires(Options o) { o.beta1; };
  }
  std::array<double, 2> betas(int group) const override {
    if constexpr (requires(Options o) { o.beta1; }) return {options(group).beta1, options(group).beta2};
    return {};
  }
  void set_betas(int group, std::array<double, 2> betas) override {
    if constexpr (requires(Options o) { o.beta1; }) {
      require_moment(name(), "beta1", betas[0]);
      require_moment(name(), "beta2", betas[1]);
      Options& own = options_[static_cast<std::size_t>(group)];
      own.beta1 = betas[0], own.beta2 = betas[1];
    } else {
      Optimizer::set_betas(group, betas);
    }
  }
  bool has_momentum(int group) const override {
    if constexpr (requires(Options o) { o.momentum; }) return options(group).momentum > 0;
    return has_betas(group);
  }
  void set_momentum(int group, double momentum) override {
    if (!has_momentum(group)) return Optimizer::set_momentum(group, momentum);
    require_moment(name(), "momentum", momentum);
    Options& own = options_[static_cast<std::size_t>(group)];
    if constexpr (requires(Options o) { o.momentum; }) {
      require(momentum > 0, Errc::invalid_argument, name(), ": momentum is 0, expected more than 0");
      own.momentum = momentum;
    } else if constexpr (requires(Options o) { o.beta1; }) {
      own.beta1 = momentum;
    }
  }

 protected:
  explicit GroupedOptimizer(const ParameterGroups<Options>& groups) : Optimizer(heads_of(groups)) {
    for (const auto& g : groups.list) options_.push_back(g.options);
  }
  const Options& options(int group) const { return options_[static_cast<std::size_t>(group)]; }

 private:
  std::vector<Options> options_;
};

// ---- updates of spans, on host or device

/// Elements per thread; waking another thread for fewer does not pay.
inline constexpr std::size_t host_grain = 4096;

inline kernels::UpdateRun run_of(const UpdateSpan& s) {
  return {.value = s.value,
          .gradient = s.gradient,
          .gradient_dtype = s.gradient_dtype,
          .working = s.working,
          .working_dtype = s.working_dtype,
          .state0 = s.state[0],
          .state1 = s.state[1],
          .state2 = s.state[2],
          .count = s.count,
          .member = static_cast<std::uint32_t>(s.member)};
}

/// Calls kernel(run, factors) on the host for parts of the spans; factors_of(group) are the constants of a
/// group, with the factor of the update. Nothing is allocated.
template <class Factors, class Of>
void update_on_host(std::span<const UpdateSpan> spans,
                    void (*kernel)(const kernels::UpdateRun&, const Factors&), const Of& factors_of,
                    const Stream& stream) {
  int group = -1;
  Factors factors{};
  for (const UpdateSpan& s : spans) {
    if (s.group != group) factors = factors_of(group = s.group);
    const kernels::UpdateRun run = run_of(s);
    stream.parallel_for(s.count, host_grain, [&](std::size_t begin, std::size_t end) {
      kernel(kernels::part_of(run, begin, end), factors);
    });
  }
}

/// Launches `kernel` on the device for the groups from `first_group` on that have factors, as many at a time
/// as its arguments have room for; spans of other groups are left out.
template <class Factors, class Kernel>
void update_on_device(std::span<const UpdateSpan> spans, Kernel kernel, const std::vector<Factors>& factors,
                      const UpdateScale& scale, const Stream& stream, int first_group = 0) {
  std::vector<kernels::UpdateRun> runs;
  for (std::size_t first = 0; first < factors.size(); first += ops::device::max_rules) {
    const auto some =
        std::span(factors).subspan(first, std::min(ops::device::max_rules, factors.size() - first));
    runs.clear();
    for (const UpdateSpan& s : spans) {
      const auto rule = static_cast<std::size_t>(s.group - first_group) - first;
      if (rule >= some.size()) continue;
      runs.push_back(run_of(s));
      runs.back().rule = static_cast<std::uint32_t>(rule);
    }
    ops::StepInputs inputs;
    if (scale.device_outcome)
      inputs.grad_scale = &scale.device_outcome->grad_scale, inputs.skip = &scale.device_outcome->skip;
    if (scale.device_norms) inputs.norms = &scale.device_norms->values;
    if (scale.constants) inputs.rules = static_cast<const Factors*>(scale.constants) + first;
    kernel(runs, some, inputs, stream);
  }
}

/// Constants of groups as the device reads them.
template <class Factors>
std::vector<std::byte> bytes_of(const std::vector<Factors>& all) {
  const auto bytes = std::as_bytes(std::span(all));
  return {bytes.begin(), bytes.end()};
}

// ---- Adam: options as constants of the kernels

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
