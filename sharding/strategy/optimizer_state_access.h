#pragma once
/// Import and export of the optimizer state of a strategy.

#include <cstdint>
#include <vector>

#include "sharding/model/model_parameters.h"
#include "sharding/strategy/member_updates.h"
#include "sharding/strategy/updater.h"

namespace rz {

/// States in f32, by the names of the optimizer. Strategy::optimizer_state() returns it. Not collective.
class OptimizerStateAccess {
 public:
  /// Writes `elements` of the named state of a flat parameter to out[0, elements.count()), in f32.
  using Fill = OptimizerState::Fill;
  /// Reads `elements` of the named state of a flat parameter from value[0, elements.count()), in f32.
  using Visit = OptimizerState::Visit;

  /// All references must outlive this object.
  OptimizerStateAccess(const ModelParameters& parameters, Updater& updater, MemberUpdates& members)
      : parameters_(parameters), updater_(updater), members_(members) {}

  /// Calls fill for the optimizer state of the elements that this rank updates, allocating it if there is
  /// none. In ddp every rank fills all elements, with the same values.
  void fill(const Optimizer& optimizer, const Fill& fill) { updater_.state(optimizer).fill(fill); }
  /// Visits the optimizer state that this rank exports; none before the first update. Over all ranks, each
  /// element of each state of a parameter is visited exactly once.
  void visit(const Visit& visit) const { updater_.state().visit(visit); }
  /// What visit() visits, in its order. No states are read.
  std::vector<OptimizerState::Elements> owned() const { return updater_.state().owned(); }
  /// Updates that skipped a parameter because no loss had reached it: a part of the optimizer state. The same
  /// on all ranks. Errc::invalid_argument if it has no state.
  std::int64_t missed_updates(const Parameter&) const;
  void set_missed_updates(const Parameter&, std::int64_t);

 private:
  const ModelParameters& parameters_;
  Updater& updater_;
  MemberUpdates& members_;
};

}  // namespace rz
