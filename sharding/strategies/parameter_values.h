#pragma once
/// Import and export of the parameter values of a strategy.

#include "sharding/consistency/pass_agreement.h"
#include "sharding/runtime/runtime.h"
#include "sharding/strategies/replicas.h"
#include "sharding/strategies/value_access.h"

namespace rz {

/// Values in f32, at most one scope or one bucket at a time. Strategy::values() returns it.
class ParameterValues {
 public:
  /// Writes `elements` of the flat parameter to out[0, elements.count()), in f32.
  using Fill = ValueAccess::Fill;
  /// Reads `elements` of the flat parameter from value[0, elements.count()), in f32.
  using Visit = ValueAccess::Visit;

  /// All references must outlive this object.
  ParameterValues(ValueAccess& access, ReplicaComparison& comparison, PassAgreement& agreement,
                  Runtime& runtime)
      : access_(access), comparison_(comparison), agreement_(agreement), runtime_(runtime) {}

  /// Calls fill for the elements that this rank stores, to load or initialise without holding the whole
  /// model. ddp, zero1 and zero2 store all elements. zero3 stores shards; fill is also called for the first
  /// 64 elements of each parameter, which the ranks compare. All ranks must write the same values. Not
  /// collective.
  void fill(const Fill&);
  /// Visits the elements that this rank exports. Over all ranks, each element is visited exactly once.
  void visit_owned(const Visit& visit) const { access_.visit_owned(visit); }
  /// Returns a whole parameter in f32. Drop the tensor soon. Collective; not during a pass.
  Tensor whole(const Parameter&, const Stream& = {});

 private:
  ValueAccess& access_;
  ReplicaComparison& comparison_;
  PassAgreement& agreement_;
  Runtime& runtime_;
};

}  // namespace rz
