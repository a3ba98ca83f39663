#include "sharding/optim/adam_rule.h"
#include "sharding/optim/element_optimizer.h"

namespace rz {

namespace {

class Adam final : public ElementOptimizer<AdamOptions, kernels::AdamFactors> {
 public:
  Adam(const ParameterGroups<AdamOptions>& groups, bool decoupled)
      : ElementOptimizer(groups, kernels::adam, &ops::DeviceOptimizer::adam), decoupled_(decoupled) {
    for (const auto& g : groups.list) check_adam(name(), g.options);
  }

  const char* name() const override { return decoupled_ ? "adamw" : "adam"; }
  std::vector<StateSpec> states(int group) const override { return adam_states(options(group)); }

 protected:
  std::string describe_group(int group) const override {
    return describe_adam(options(group), learning_rate(group));
  }
  kernels::AdamFactors factors(const AdamOptions& o, double rate, double t) const override {
    return adam_factors(o, decoupled_, rate, t);
  }

 private:
  const bool decoupled_;  // weight decay as in AdamW
};

}  // namespace

std::unique_ptr<Optimizer> make_adam(const AdamOptions& o) { return make_adam(all_parameters(o)); }
std::unique_ptr<Optimizer> make_adam(const ParameterGroups<AdamOptions>& groups) {
  return std::make_unique<Adam>(groups, false);
}
std::unique_ptr<Optimizer> make_adamw(const AdamOptions& o) { return make_adamw(all_parameters(o)); }
std::unique_ptr<Optimizer> make_adamw(const ParameterGroups<AdamOptions>& groups) {
  return std::make_unique<Adam>(groups, true);
}

}  // namespace rz
