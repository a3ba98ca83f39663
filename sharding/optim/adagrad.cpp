#include "sharding/optim/element_optimizer.h"
#include "sharding/optim/optimizers.h"
#include "sharding/optim/option_checks.h"

namespace rz {

namespace {

class Adagrad final : public ElementOptimizer<AdagradOptions, kernels::AdagradFactors> {
 public:
  explicit Adagrad(const ParameterGroups<AdagradOptions>& groups)
      : ElementOptimizer(groups, kernels::adagrad, &ops::DeviceOptimizer::adagrad) {
    for (const auto& [group, contains, o] : groups.list) {
      require_not_negative("adagrad", "learning_rate", o.learning_rate);
      require_not_negative("adagrad", "epsilon", o.epsilon);
      require_not_negative("adagrad", "weight_decay", o.weight_decay);
      require_not_negative("adagrad", "lr_decay", o.lr_decay);
      require_not_negative("adagrad", "initial_accumulator", o.initial_accumulator);
    }
  }

  const char* name() const override { return "adagrad"; }
  std::vector<StateSpec> states(int group) const override {
    return {{.name = "sum", .initial = static_cast<float>(options(group).initial_accumulator)}};
  }

 protected:
  std::string describe_group(int group) const override {
    const AdagradOptions& o = options(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", epsilon ", all_digits(o.epsilon),
                  ", weight_decay ", all_digits(o.weight_decay), ", lr_decay ", all_digits(o.lr_decay),
                  ", initial_accumulator ", all_digits(o.initial_accumulator),
                  o.maximize ? ", maximize" : "");
  }
  kernels::AdagradFactors factors(const AdagradOptions& o, double rate, double t) const override {
    return {.l2 = static_cast<float>(o.weight_decay),
            .rate = static_cast<float>(rate / (1 + (t - 1) * o.lr_decay)),
            .eps = static_cast<float>(o.epsilon),
            .scale = sign_of(o.maximize)};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_adagrad(const AdagradOptions& o) { return make_adagrad(all_parameters(o)); }
std::unique_ptr<Optimizer> make_adagrad(const ParameterGroups<AdagradOptions>& groups) {
  return std::make_unique<Adagrad>(groups);
}

}  // namespace rz
