#pragma once
/// Groups of parameters that an optimizer updates with options of their own.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/parameter.h"

namespace rz {

/// Returns whether a parameter belongs to a group.
using ParameterFilter = std::function<bool(const Parameter&)>;

template <class Options>
struct ParameterGroup {
  std::string name;
  ParameterFilter contains;  ///< empty: every parameter
  Options options;
};

/// Groups in the order in which they are tried: a parameter belongs to the first one that contains it.
template <class Options>
struct ParameterGroups {
  explicit ParameterGroups(std::vector<ParameterGroup<Options>> groups) : list(std::move(groups)) {}
  std::vector<ParameterGroup<Options>> list;
};

/// True for parameters of two or more dimensions.
inline bool is_matrix(const Parameter& p) { return p.shape.dims() >= 2; }

/// One group, as DeepSpeed makes it: weight decay acts on all parameters.
template <class Options>
ParameterGroups<Options> all_parameters(const Options& options) {
  return ParameterGroups<Options>({{"all", {}, options}});
}

/// Two groups, as recipes for GPT have it: "matrices" with weight decay, and "rest" (biases, norms) without.
template <class Options>
ParameterGroups<Options> matrices_and_rest(Options options) {
  const ParameterGroup<Options> matrices{"matrices", is_matrix, options};
  options.weight_decay = 0;
  return ParameterGroups<Options>({matrices, {"rest", {}, options}});
}

}  // namespace rz
