#pragma once
/// Names of tensors in files, as those of a model.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sharding/checkpoint/weight_files.h"

namespace rz {

/// Name of the weight that gives logits, if it has values of its own.
inline constexpr std::string_view lm_head_weight = "lm_head.weight";

/// One rule for all tensors of files: the one by which the names of a model fit best. PretrainedWeights has
/// the rules. Refers to the files.
class WeightNames {
 public:
  /// `model`: names of parameters and buffers. Only tensors whose names begin with `prefix` are known.
  WeightNames(const WeightFiles&, std::span<const std::string> model, const std::string& prefix);

  /// The tensor of a name in the model; nullptr if there is none.
  const WeightTensor* find(const std::string& name) const;
  /// The known tensors by their names without prefix and wrappers, in the order of the files.
  const std::vector<std::pair<std::string, const WeightTensor*>>& tensors() const { return tensors_; }
  /// The prefix that was found to be left out; empty: none.
  const std::string& left_out() const { return left_out_; }
  /// A prefix of some tensors with which most of these names would be found; empty if there is none.
  std::string likely_prefix(std::span<const std::string> model) const;

 private:
  enum class Transformer { as_is, left_out, added };  // in names of the model

  void leave_out_wrappers(std::span<const std::string> model);
  void choose(std::span<const std::string> model);
  std::string in_files(const std::string& name, Transformer) const;
  std::size_t found(std::span<const std::string> model, const std::string& prefix, Transformer) const;

  std::vector<std::pair<std::string, const WeightTensor*>> tensors_;
  std::map<std::string, const WeightTensor*, std::less<>> by_name_;
  std::string left_out_;
  Transformer transformer_ = Transformer::as_is;
};

}  // namespace rz
