#pragma once
/// The parameter values of a strategy.

#include "sharding/model/runtime.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/replicas.h"
#include "sharding/strategy/value_access.h"

namespace rz {

/// Imports, exports and compares values in f32, at most one scope or one bucket at a time. Strategy::values()
/// returns it.
class ParameterValues {
 public:
  /// Writes `elements` of the flat parameter to out[0, elements.count()), in f32.
  using Fill = ValueAccess::Fill;
  /// Reads `elements` of the flat parameter from value[0, elements.count()), in f32.
  using Visit = ValueAccess::Visit;

  /// All references must outlive this object.
  ParameterValues(ShardedModel& model, PassRules& agreement, Runtime& runtime)
      : access_(model, runtime),
        comparison_(model, access_, runtime),
        agreement_(agreement),
        runtime_(runtime),
        filled_(model.parameters().had_values()) {}
  ParameterValues(const ParameterValues&) = delete;

  /// Calls fill for the elements that this rank stores, to load or initialise without holding the whole
  /// model. ddp, zero1 and zero2 store all elements. zero3 stores shards; fill is also called for the first
  /// 64 elements of each parameter, which the ranks compare. All ranks must write the same values. Parameters
  /// that are not `selected` keep their values; all are if it is empty. Not collective.
  void fill(const Fill&, const ValueAccess::Selection& selected = {});
  /// Whether there are values besides zeros: the module had some when the strategy was made, or fill() has
  /// been called.
  bool filled() const { return filled_; }
  /// Visits the elements that this rank exports. Over all ranks, each element is visited exactly once.
  void visit_owned(const Visit& visit) const { access_.visit_owned(visit); }
  /// What visit_owned() visits, in its order. No values are read.
  std::vector<ParameterElements> owned() const { return access_.owned(); }
  /// Returns a whole parameter in f32. Drop the tensor soon. Collective; not during a pass.
  Tensor whole(const Parameter&, const Stream& = {});

  /// Compares what ranks hold alike: the scopes of a pass that was reduced, and the values, if any were
  /// written since the last comparison. Errc::mismatch names the first difference, and the rank. Collective.
  void compare(const Stream&);
  /// Drops what whole() has gathered. Called before values change.
  void release() { access_.release(); }

 private:
  ValueAccess access_;
  ReplicaComparison comparison_;
  PassRules& agreement_;
  Runtime& runtime_;
  bool filled_;
};

}  // namespace rz
