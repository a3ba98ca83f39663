#include "sharding/optim/element_optimizer.h"
#include "sharding/optim/optimizers.h"
#include "sharding/optim/option_checks.h"

namespace rz {

namespace {

class Sgd final : public ElementOptimizer<SgdOptions, kernels::SgdFactors> {
 public:
  explicit Sgd(const ParameterGroups<SgdOptions>& groups)
      : ElementOptimizer(groups, kernels::sgd, &ops::DeviceOptimizer::sgd) {
    for (const auto& [group, contains, o] : groups.list) {
      require_not_negative("sgd", "learning_rate", o.learning_rate);
      require_not_negative("sgd", "momentum", o.momentum);
      require_not_negative("sgd", "weight_decay", o.weight_decay);
      require_finite("sgd", "dampening", o.dampening);
      require(!o.nesterov || (o.momentum > 0 && o.dampening == 0), Errc::invalid_argument,
              "sgd: nesterov needs a momentum above 0 and no dampening; set momentum, e.g. 0.9");
    }
  }

  const char* name() const override { return "sgd"; }
  std::vector<StateSpec> states(int group) const override {
    if (options(group).momentum > 0) return {{.name = "momentum_buffer"}};
    return {};
  }

 protected:
  std::string describe_group(int group) const override {
    const SgdOptions& o = options(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", momentum ", all_digits(o.momentum),
                  o.nesterov ? " (nesterov)" : "", ", dampening ", all_digits(o.dampening), ", weight_decay ",
                  all_digits(o.weight_decay), o.maximize ? ", maximize" : "");
  }
  /// The momentum starts from zeros, and the first gradient is not damped.
  kernels::SgdFactors factors(const SgdOptions& o, double rate, double t) const override {
    return {.lr = static_cast<float>(rate),
            .momentum = static_cast<float>(o.momentum),
            .rest = static_cast<float>(t > 1 ? 1 - o.dampening : 1),
            .weight_decay = static_cast<float>(o.weight_decay),
            .scale = sign_of(o.maximize),
            .nesterov = o.nesterov};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& o) { return make_sgd(all_parameters(o)); }
std::unique_ptr<Optimizer> make_sgd(const ParameterGroups<SgdOptions>& groups) {
  return std::make_unique<Sgd>(groups);
}

}  // namespace rz
