#pragma once
/// Which flat parameters are gathered and dropped, and when.

#include <cstdint>
#include <vector>

#include "sharding/model/flat_parameters.h"
#include "sharding/model/gather_limits.h"
#include "sharding/model/scope_trace.h"
#include "sharding/model/value_store.h"

namespace rz {

/// Follows the scopes of passes. Depends on nothing but its calls, so all ranks decide alike. Persistent flat
/// parameters are always gathered. Not thread-safe; allocates only in the first passes.
class GatherPlan {
 public:
  using Indices = FlatParameters::Indices;
  /// The trace follows enter() and release(). Both must outlive the plan.
  GatherPlan(FlatParameters&, const GatherLimits&, ScopeTrace&);

  /// What to do, valid until the next call: first drop, then gather in this order.
  struct Steps {
    Indices drop, gather;
  };
  /// Before a scope runs.
  const Steps& enter(const ScopeUse&);
  /// After it.
  const Steps& leave(const ScopeUse&);
  /// No scope is open any more, and no value is of use.
  const Steps& release();
  /// One flat parameter is needed outside of all scopes.
  const Steps& need(int u);

  /// Scopes that use it, were entered and not yet left.
  int active_scopes(int u) const { return values_[static_cast<std::size_t>(u)].active_scopes; }

 private:
  struct Value {
    bool gathered = false;
    int active_scopes = 0;
    std::uint64_t seen = 0;    // the last plan that met it
    std::uint64_t wanted = 0;  // the last plan that keeps or prefetches it
  };
  Value& at(int u) { return values_[static_cast<std::size_t>(u)]; }
  /// The elements of flat parameters that wait for their next use, while a plan is made.
  struct Budget {
    std::size_t live = 0, distance = 0, ahead = 0;
  };
  void plan();
  bool plan_use(int u, Budget&);
  void drop_unplanned();
  void gather(int u);

  FlatParameters& flat_;
  GatherLimits limits_;
  ScopeTrace& trace_;
  std::vector<Value> values_;  // by flat parameter
  std::uint64_t plans_ = 0;
  Indices planned_;  // to keep or to gather, in the order of their next use
  Steps steps_;
};

}  // namespace rz
