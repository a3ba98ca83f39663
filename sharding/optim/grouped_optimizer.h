#pragma once
/// Base of optimizers whose groups have options of one type.

#include <array>
#include <utility>
#include <vector>

#include "sharding/optim/optimizer.h"
#include "sharding/optim/option_checks.h"

namespace rz {

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
  static std::vector<Group> heads_of(const ParameterGroups<Options>& groups) {
    std::vector<Group> heads;
    for (const auto& g : groups.list) heads.push_back({g.name, g.contains, g.options.learning_rate});
    return heads;
  }

  std::vector<Options> options_;
};

}  // namespace rz
