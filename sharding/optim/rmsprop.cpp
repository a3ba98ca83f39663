#include "sharding/optim/element_optimizer.h"
#include "sharding/optim/optimizers.h"
#include "sharding/optim/option_checks.h"

namespace rz {

namespace {

class Rmsprop final : public ElementOptimizer<RmspropOptions, kernels::RmspropFactors> {
 public:
  explicit Rmsprop(const ParameterGroups<RmspropOptions>& groups)
      : ElementOptimizer(groups, kernels::rmsprop, &ops::DeviceOptimizer::rmsprop) {
    for (const auto& [group, contains, o] : groups.list) {
      require_not_negative("rmsprop", "learning_rate", o.learning_rate);
      require_not_negative("rmsprop", "alpha", o.alpha);
      require_not_negative("rmsprop", "epsilon", o.epsilon);
      require_not_negative("rmsprop", "weight_decay", o.weight_decay);
      require_not_negative("rmsprop", "momentum", o.momentum);
    }
  }

  const char* name() const override { return "rmsprop"; }
  /// In the order of the kernel.
  std::vector<StateSpec> states(int group) const override {
    std::vector<StateSpec> all{{.name = "square_avg"}};
    if (options(group).centered) all.push_back({.name = "grad_avg"});
    if (options(group).momentum > 0) all.push_back({.name = "momentum_buffer"});
    return all;
  }

 protected:
  std::string describe_group(int group) const override {
    const RmspropOptions& o = options(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", alpha ", all_digits(o.alpha),
                  ", epsilon ", all_digits(o.epsilon), ", weight_decay ", all_digits(o.weight_decay),
                  ", momentum ", all_digits(o.momentum), o.centered ? ", centered" : "",
                  o.maximize ? ", maximize" : "");
  }
  kernels::RmspropFactors factors(const RmspropOptions& o, double rate, double) const override {
    return {.l2 = static_cast<float>(o.weight_decay),
            .alpha = static_cast<float>(o.alpha),
            .rest = static_cast<float>(1 - o.alpha),
            .momentum = static_cast<float>(o.momentum),
            .rate = static_cast<float>(rate),
            .eps = static_cast<float>(o.epsilon),
            .scale = sign_of(o.maximize),
            .centered = o.centered};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_rmsprop(const RmspropOptions& o) { return make_rmsprop(all_parameters(o)); }
std::unique_ptr<Optimizer> make_rmsprop(const ParameterGroups<RmspropOptions>& groups) {
  return std::make_unique<Rmsprop>(groups);
}

}  // namespace rz
