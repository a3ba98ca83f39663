#pragma once
/// The parameters of a model, as strategies number them.

#include <span>
#include <unordered_map>
#include <vector>

#include "autograd_lite/parameter.h"

namespace rz {

/// Trainable parameters, the members of buckets, are numbered in the order of first use. The others are
/// frozen.
class ModelParameters {
 public:
  explicit ModelParameters(std::span<Parameter* const>);

  const std::vector<Parameter*>& members() const { return members_; }
  const std::vector<Parameter*>& frozen() const { return frozen_; }
  Parameter& member(int m) const { return *members_[static_cast<std::size_t>(m)]; }
  /// -1: not a member.
  int member_of(const Parameter&) const;
  /// Whether one had a value before this object was made.
  bool had_values() const { return had_values_; }
  /// Errc::invalid_argument names a member that was frozen after it was numbered, and `call`.
  void require_trainable(const char* call) const;

 private:
  std::vector<Parameter*> members_, frozen_;
  std::unordered_map<const Parameter*, int> member_of_;
  bool had_values_ = false;
};

}  // namespace rz
