#include <cmath>

#include "sharding/optim/optimizer_rules.h"
#include "sharding/optim/optimizers.h"

namespace rz {

namespace {

/// How an optimizer updates each element by itself. Factors is the layout of its constants in tensor/kernels.
template <class Options, class Factors>
struct Rule {
  const char* name;
  void (*check)(const char* name, const Options&);
  std::vector<StateSpec> (*states)(const Options&);
  std::string (*describe)(const Options&, double learning_rate);
  /// For update number t, from 1. Their `scale` is sign_of().
  Factors (*factors)(const Options&, double learning_rate, double t);
  void (*on_host)(const kernels::UpdateRun&, const Factors&);
  void (*ops::DeviceOptimizer::*on_device)(std::span<const kernels::UpdateRun>, std::span<const Factors>,
                                           const ops::StepInputs&, const Stream&);
};

template <class Options, class Factors>
class ElementOptimizer final : public GroupedOptimizer<Options> {
 public:
  ElementOptimizer(const Rule<Options, Factors>& rule, const ParameterGroups<Options>& groups)
      : GroupedOptimizer<Options>(groups), rule_(rule) {
    for (const auto& g : groups.list) rule.check(rule.name, g.options);
  }

  const char* name() const override { return rule_.name; }
  std::vector<StateSpec> states(int group) const override { return rule_.states(this->options(group)); }
  std::vector<std::byte> constants(std::int64_t missed) const override {
    return bytes_of(all_factors({.missed = missed}));
  }
  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    if (stream.device().kind == Device::cuda)
      update_on_device(spans, ops::device_ops().optimizer.*rule_.on_device, all_factors(scale), scale,
                       stream);
    else
      update_on_host(
          spans, rule_.on_host, [&](int group) { return factors_at(group, scale); }, stream);
  }

 protected:
  std::string describe_group(int group) const override {
    return rule_.describe(this->options(group), this->learning_rate(group));
  }

 private:
  Factors factors_at(int group, const UpdateScale& scale) const {
    const auto t = static_cast<double>(this->updates() - scale.missed);
    Factors f = rule_.factors(this->options(group), this->learning_rate(group), t);
    f.scale *= scale.factor;
    return f;
  }
  std::vector<Factors> all_factors(const UpdateScale& scale) const {
    std::vector<Factors> all;
    for (int g = 0; g < this->groups(); ++g) all.push_back(factors_at(g, scale));
    return all;
  }

  const Rule<Options, Factors>& rule_;
};

template <class Options, class Factors>
std::unique_ptr<Optimizer> make(const Rule<Options, Factors>& rule, const ParameterGroups<Options>& groups) {
  return std::make_unique<ElementOptimizer<Options, Factors>>(rule, groups);
}

// ---- SGD

constexpr Rule<SgdOptions, kernels::SgdFactors> sgd_rule{
    .name = "sgd",
    .check =
        [](const char* name, const SgdOptions& o) {
          require_not_negative(name, "learning_rate", o.learning_rate);
          require_not_negative(name, "momentum", o.momentum);
          require_not_negative(name, "weight_decay", o.weight_decay);
          require_finite(name, "dampening", o.dampening);
          require(!o.nesterov || (o.momentum > 0 && o.dampening == 0), Errc::invalid_argument,
                  "sgd: nesterov needs a momentum above 0 and no dampening; set momentum, e.g. 0.9");
        },
    .states = [](const SgdOptions& o) -> std::vector<StateSpec> {
      if (o.momentum > 0) return {{.name = "momentum_buffer"}};
      return {};
    },
    .describe =
        [](const SgdOptions& o, double rate) {
          return concat("learning_rate ", all_digits(rate), ", momentum ", all_digits(o.momentum),
                        o.nesterov ? " (nesterov)" : "", ", dampening ", all_digits(o.dampening),
                        ", weight_decay ", all_digits(o.weight_decay), o.maximize ? ", maximize" : "");
        },
    // The momentum starts from zeros, and the first gradient is not damped.
    .factors =
        [](const SgdOptions& o, double rate, double t) {
          return kernels::SgdFactors{.lr = static_cast<float>(rate),
                                     .momentum = static_cast<float>(o.momentum),
                                     .rest = static_cast<float>(t > 1 ? 1 - o.dampening : 1),
                                     .weight_decay = static_cast<float>(o.weight_decay),
                                     .scale = sign_of(o.maximize),
                                     .nesterov = o.nesterov};
        },
    .on_host = kernels::sgd,
    .on_device = &ops::DeviceOptimizer::sgd};

// ---- Adam

constexpr Rule<AdamOptions, kernels::AdamFactors> adam_rule{
    .name = "adam",
    .check = check_adam,
    .states = adam_states,
    .describe = describe_adam,
    .factors = [](const AdamOptions& o, double rate, double t) { return adam_factors(o, false, rate, t); },
    .on_host = kernels::adam,
    .on_device = &ops::DeviceOptimizer::adam};

constexpr Rule<AdamOptions, kernels::AdamFactors> adamw_rule{
    .name = "adamw",
    .check = check_adam,
    .states = adam_states,
    .describe = describe_adam,
    .factors = [](const AdamOptions& o, double rate, double t) { return adam_factors(o, true, rate, t); },
    .on_host = kernels::adam,
    .on_device = &ops::DeviceOptimizer::adam};

// ---- Lion

constexpr Rule<LionOptions, kernels::LionFactors> lion_rule{
    .name = "lion",
    .check =
        [](const char* name, const LionOptions& o) {
          require_not_negative(name, "learning_rate", o.learning_rate);
          require_not_negative(name, "weight_decay", o.weight_decay);
          require_moment(name, "beta1", o.beta1);
          require_moment(name, "beta2", o.beta2);
        },
    .states = [](const LionOptions&) -> std::vector<StateSpec> { return {{.name = "exp_avg"}}; },
    .describe =
        [](const LionOptions& o, double rate) {
          return concat("learning_rate ", all_digits(rate), ", beta1 ", all_digits(o.beta1), ", beta2 ",
                        all_digits(o.beta2), ", weight_decay ", all_digits(o.weight_decay));
        },
    .factors =
        [](const LionOptions& o, double rate, double) {
          return kernels::LionFactors{.keep = static_cast<float>(1 - rate * o.weight_decay),
                                      .beta1 = static_cast<float>(o.beta1),
                                      .rest1 = static_cast<float>(1 - o.beta1),
                                      .beta2 = static_cast<float>(o.beta2),
                                      .rest2 = static_cast<float>(1 - o.beta2),
                                      .rate = static_cast<float>(rate),
                                      .scale = 1};
        },
    .on_host = kernels::lion,
    .on_device = &ops::DeviceOptimizer::lion};

// ---- Adagrad

constexpr Rule<AdagradOptions, kernels::AdagradFactors> adagrad_rule{
    .name = "adagrad",
    .check =
        [](const char* name, const AdagradOptions& o) {
          require_not_negative(name, "learning_rate", o.learning_rate);
          require_not_negative(name, "epsilon", o.epsilon);
          require_not_negative(name, "weight_decay", o.weight_decay);
          require_not_negative(name, "lr_decay", o.lr_decay);
          require_not_negative(name, "initial_accumulator", o.initial_accumulator);
        },
    .states = [](const AdagradOptions& o) -> std::vector<StateSpec> {
      return {{.name = "sum", .initial = static_cast<float>(o.initial_accumulator)}};
    },
    .describe =
        [](const AdagradOptions& o, double rate) {
          return concat("learning_rate ", all_digits(rate), ", epsilon ", all_digits(o.epsilon),
                        ", weight_decay ", all_digits(o.weight_decay), ", lr_decay ", all_digits(o.lr_decay),
                        ", initial_accumulator ", all_digits(o.initial_accumulator),
                        o.maximize ? ", maximize" : "");
        },
    .factors =
        [](const AdagradOptions& o, double rate, double t) {
          return kernels::AdagradFactors{.l2 = static_cast<float>(o.weight_decay),
                                         .rate = static_cast<float>(rate / (1 + (t - 1) * o.lr_decay)),
                                         .eps = static_cast<float>(o.epsilon),
                                         .scale = sign_of(o.maximize)};
        },
    .on_host = kernels::adagrad,
    .on_device = &ops::DeviceOptimizer::adagrad};

// ---- RMSprop

constexpr Rule<RmspropOptions, kernels::RmspropFactors> rmsprop_rule{
    .name = "rmsprop",
    .check =
        [](const char* name, const RmspropOptions& o) {
          require_not_negative(name, "learning_rate", o.learning_rate);
          require_not_negative(name, "alpha", o.alpha);
          require_not_negative(name, "epsilon", o.epsilon);
          require_not_negative(name, "weight_decay", o.weight_decay);
          require_not_negative(name, "momentum", o.momentum);
        },
    // In the order of the kernel.
    .states =
        [](const RmspropOptions& o) {
          std::vector<StateSpec> all{{.name = "square_avg"}};
          if (o.centered) all.push_back({.name = "grad_avg"});
          if (o.momentum > 0) all.push_back({.name = "momentum_buffer"});
          return all;
        },
    .describe =
        [](const RmspropOptions& o, double rate) {
          return concat("learning_rate ", all_digits(rate), ", alpha ", all_digits(o.alpha), ", epsilon ",
                        all_digits(o.epsilon), ", weight_decay ", all_digits(o.weight_decay), ", momentum ",
                        all_digits(o.momentum), o.centered ? ", centered" : "",
                        o.maximize ? ", maximize" : "");
        },
    .factors =
        [](const RmspropOptions& o, double rate, double) {
          return kernels::RmspropFactors{.l2 = static_cast<float>(o.weight_decay),
                                         .alpha = static_cast<float>(o.alpha),
                                         .rest = static_cast<float>(1 - o.alpha),
                                         .momentum = static_cast<float>(o.momentum),
                                         .rate = static_cast<float>(rate),
                                         .eps = static_cast<float>(o.epsilon),
                                         .scale = sign_of(o.maximize),
                                         .centered = o.centered};
        },
    .on_host = kernels::rmsprop,
    .on_device = &ops::DeviceOptimizer::rmsprop};

}  // namespace

#define RZ_MAKE(rule, Options)                                                                        \
  std::unique_ptr<Optimizer> make_##rule(const Options& o) { return make_##rule(all_parameters(o)); } \
  std::unique_ptr<Optimizer> make_##rule(const ParameterGroups<Options>& groups) {                    \
    return make(rule##_rule, groups);                                                                 \
  }
RZ_MAKE(sgd, SgdOptions)
RZ_MAKE(adam, AdamOptions)
RZ_MAKE(adamw, AdamOptions)
RZ_MAKE(lion, LionOptions)
RZ_MAKE(adagrad, AdagradOptions)
RZ_MAKE(rmsprop, RmspropOptions)
#undef RZ_MAKE

}  // namespace rz
