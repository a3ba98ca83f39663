#pragma once
/// Import and export of parameter values in f32, at most one scope or one bucket at a time.

#include <functional>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"

namespace rz {

/// Reads and writes the values of a sharded model: masters in mixed precision, otherwise the values that the
/// model uses.
class ValueAccess {
 public:
  /// Writes `elements` of the flat parameter to out[0, elements.count()).
  using Fill = std::function<void(const Parameter&, Range elements, float* out)>;
  using Selection = std::function<bool(const Parameter&)>;
  /// Reads `elements` of the flat parameter from value[0, elements.count()).
  using Visit = std::function<void(const Parameter&, Range elements, const float* value)>;

  ValueAccess(ShardedModel&, Runtime&);

  /// Calls fill for all elements that this rank holds of the selected parameters.
  void fill(const Fill&, const Selection&);
  /// Over all ranks, visits each element exactly once.
  void visit_owned(const Visit&) const;
  /// What visit_owned() visits, in its order.
  std::vector<ParameterElements> owned() const;
  /// The whole parameter. Collective. Errc::invalid_argument unless it is one of the model.
  Tensor whole(const Parameter&);
  /// Drops what whole() has gathered; call before values change.
  void release();

 private:
  /// Calls f(values, parameter, elements) for what this rank exports.
  template <class F>
  void each_owned(const F&) const;
  Tensor whole_master(int member);
  Tensor widened(const Tensor&);

  ShardedModel& model_;
  Runtime& runtime_;
  int gathered_bucket_ = -1;  // bucket whose masters are in gathered_; -1: none
  Tensor gathered_;
};

}  // namespace rz
