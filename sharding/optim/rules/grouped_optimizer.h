#pragma once
/// Base of optimizers whose groups have options of one type.

#include <utility>
#include <vector>

#include "sharding/optim/optimizer.h"

namespace rz {

template <class Options>
class GroupedOptimizer : public Optimizer {
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
