#pragma once
/// Which flat parameters are gathered and dropped, and when: the order of scopes, and the decision.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "autograd_lite/parameter.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/options.h"

namespace rz {

/// A scope that runs.
struct ScopeUse {
  const Scope& scope;
  Pass pass;
  std::span<const int> flat;  ///< its flat parameters; none unless values are sharded
};

/// The order in which a model runs its scopes. Records the scopes that passes enter, and predicts the next
/// ones: after a visit that occurred before, those that followed it then. The first pass is expected to run
/// the scopes in a given order, forward and backward; where it does not, it is not predicted. A pass that
/// deviates is recorded as it runs, and is predicted when it occurs again. Depends on nothing but its calls.
/// Not thread-safe; allocates only in the constructor.
class ScopeTrace {
 public:
  /// An entry into a scope.
  struct Visit {
    const Scope* scope = nullptr;
    Pass pass = Pass::forward;
    bool after_release = false;  ///< the first one after release()
    bool operator==(const Visit&) const = default;
  };

  /// `expected`: the order of the first pass forward. Remembers as many visits as 16 such passes make,
  /// forward and backward, and at least 4096.
  explicit ScopeTrace(std::span<const Scope* const> expected);
  /// Forgets all visits, as a new trace.
  void restart();

  void enter(const Scope&, Pass);
  /// Values are dropped: nothing that follows the next visit is predicted across this point.
  void release() { released_ = true; }

  /// Calls f(visit) for the visits expected after the last one, in their order, while f returns true.
  template <class F>
  void for_each_ahead(const F& f) const {
    if (course_ == unknown) return;
    for (std::uint64_t i = course_ + 1; i < count_ && !at(i).after_release; ++i)
      if (!f(at(i))) return;
  }

  /// Number of visits, and a hash of all of them: equal on ranks that entered the same scopes in the same
  /// order.
  std::uint64_t visits() const { return count_ - expected_; }
  std::uint64_t hash() const { return hash_; }
  /// The last `n` visits, as far as they are remembered, oldest first.
  std::vector<Visit> last(std::uint64_t n) const;

 private:
  const Visit& at(std::uint64_t i) const { return ring_[static_cast<std::size_t>(i % ring_.size())]; }
  std::uint64_t oldest() const { return count_ > ring_.size() ? count_ - ring_.size() : 0; }
  std::uint64_t equal_visits(std::uint64_t i) const;
  void find_course();

  static constexpr std::uint64_t unknown = ~std::uint64_t{0};
  std::vector<const Scope*> first_pass_;    // expected
  std::vector<Visit> ring_;                 // visit i is at i modulo its size
  std::uint64_t count_ = 0, expected_ = 0;  // visits, and those that were only expected
  std::uint64_t course_ = unknown;          // the earlier visit that corresponds to the last one
  std::uint64_t hash_ = 0;
  bool released_ = true;
};

/// Follows the scopes of passes. Depends on nothing but its calls, so all ranks decide alike. Persistent flat
/// parameters are always gathered. Not thread-safe; allocates only in the first passes.
class GatherPlan {
 public:
  using Indices = FlatParameters::Indices;
  /// The trace follows enter(), release() and restart(). Both must outlive the plan.
  GatherPlan(FlatParameters&, const GatherLimits&, ScopeTrace&);
  /// Nothing is gathered, and the trace begins anew.
  void restart();

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
