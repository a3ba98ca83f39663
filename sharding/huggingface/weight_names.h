#pragma once
/// Names of tensors in files, as those of a model.

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/checkpoint/tensor_source.h"
#include "sharding/huggingface/model_family.h"

namespace rz {

/// Keeps the parameters and buffers that one of the patterns matches (matches_part()); all without patterns.
/// Errc::config names a pattern that matches none.
void select_only(std::span<const std::string> only, std::vector<std::pair<std::string, Parameter*>>&,
                 std::vector<std::pair<std::string, ModuleBuffer*>>&);

/// One rule for all tensors of files: the one by which the names of a model fit best. PretrainedWeights has
/// the rules. Refers to the files.
class WeightNames {
 public:
  /// `model`: names of parameters and buffers. Only tensors whose names begin with `prefix` are known. The
  /// table is of constants.
  WeightNames(const TensorSource&, std::span<const std::string> model, const std::string& prefix,
              const NameTable&);

  /// The tensor of a name in the model; nullptr if there is none.
  const TensorInfo* find(const std::string& name) const;
  /// The known tensors by their names without prefix and wrappers, in the order of the files.
  const std::vector<std::pair<std::string, const TensorInfo*>>& tensors() const { return tensors_; }
  /// Whether a tensor is one of NameTable::ignored; `name` is that of tensors().
  bool is_ignored(std::string_view name, const TensorInfo&, std::span<const std::string> model) const;
  /// NameTable::head.
  std::string head() const { return std::string(table_.head); }
  /// Whether a name of the model is that of NameTable::table.
  bool is_table(std::string_view name) const { return without_prefix(name) == table_.table; }
  /// The prefix that was found to be left out; empty: none.
  const std::string& left_out() const { return left_out_; }
  /// A prefix of some tensors with which most of these names would be found; empty if there is none.
  std::string likely_prefix(std::span<const std::string> model) const;

 private:
  enum class Prefix { as_is, left_out, added };  // of the table, in names of the model

  std::string_view without_prefix(std::string_view name) const;
  void leave_out_wrappers(std::span<const std::string> model);
  void choose(std::span<const std::string> model);
  std::string in_files(const std::string& name, Prefix) const;
  std::size_t found(std::span<const std::string> model, const std::string& prefix, Prefix) const;

  std::vector<std::pair<std::string, const TensorInfo*>> tensors_;
  std::map<std::string, const TensorInfo*, std::less<>> by_name_;
  std::string left_out_;
  NameTable table_;
  Prefix prefix_ = Prefix::as_is;
};

}  // namespace rz
