#include "sharding/optim/element_optimizer.h"
#include "sharding/optim/optimizers.h"
#include "sharding/optim/option_checks.h"

namespace rz {

namespace {

class Lion final : public ElementOptimizer<LionOptions, kernels::LionFactors> {
 public:
  explicit Lion(const ParameterGroups<LionOptions>& groups)
      : ElementOptimizer(groups, kernels::lion, &ops::DeviceOptimizer::lion) {
    for (const auto& [group, contains, o] : groups.list) {
      require_not_negative("lion", "learning_rate", o.learning_rate);
      require_not_negative("lion", "weight_decay", o.weight_decay);
      require_moment("lion", "beta1", o.beta1);
      require_moment("lion", "beta2", o.beta2);
    }
  }

  const char* name() const override { return "lion"; }
  std::vector<StateSpec> states(int) const override { return {{.name = "exp_avg"}}; }

 protected:
  std::string describe_group(int group) const override {
    const LionOptions& o = options(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", beta1 ", all_digits(o.beta1),
                  ", beta2 ", all_digits(o.beta2), ", weight_decay ", all_digits(o.weight_decay));
  }
  kernels::LionFactors factors(const LionOptions& o, double rate, double) const override {
    return {.keep = static_cast<float>(1 - rate * o.weight_decay),
            .beta1 = static_cast<float>(o.beta1),
            .rest1 = static_cast<float>(1 - o.beta1),
            .beta2 = static_cast<float>(o.beta2),
            .rest2 = static_cast<float>(1 - o.beta2),
            .rate = static_cast<float>(rate),
            .scale = 1};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_lion(const LionOptions& o) { return make_lion(all_parameters(o)); }
std::unique_ptr<Optimizer> make_lion(const ParameterGroups<LionOptions>& groups) {
  return std::make_unique<Lion>(groups);
}

}  // namespace rz
