#pragma once
/// The forward and backward passes of an update.

#include <span>
#include <string>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/gradient_reduction.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/pass_state.h"

namespace rz {

/// Provides values and reduces gradients while the scopes of passes run, in the order of the calls of an
/// update. Strategy has the contracts of the functions.
class TrainingPasses {
 public:
  /// All references must outlive this object.
  TrainingPasses(Module&, ShardedModel&, Runtime&);
  TrainingPasses(const TrainingPasses&) = delete;

  // ---- what runs in a pass
  void enter(const Scope&, Pass);
  void leave(const Scope&, Pass);
  void gradient_begins(const Parameter&);
  void gradient_ready(const Parameter&, const Stream&);

  // ---- calls of an update
  void begin_backward(bool synchronise);
  /// On a rank without data, which computes no gradient.
  void begin_without_data(bool synchronise);
  /// Waits for all reductions. `counted`: PassRules::set_counted(). Gradients are means unless
  /// rules().failed(); call state().set_reduced() once all ranks have agreed on what they used.
  void finish(const Stream&, int counted);
  /// Ranks have left the update at different places, and their calls have failed: back to where all are
  /// alike.
  void drop();
  /// Drops the gradients.
  void reset();
  /// An update has ended, perhaps skipped.
  void end_step();

  PassState& state() { return state_; }
  const PassState& state() const { return state_; }
  PassRules& rules() { return rules_; }
  const PassRules& rules() const { return rules_; }
  GradientReduction& reduction() { return reduction_; }
  const GradientReduction& reduction() const { return reduction_; }

 private:
  ScopeUse use_of(const Scope&, Pass);
  void follow(Pass);
  void broadcast_buffers();

  Module& module_;
  ShardedModel& model_;
  Runtime& runtime_;
  PassState state_;
  PassRules rules_;
  GradientReduction reduction_;
  /// The module's buffers, such as running means: in every forward pass that trains they are those of rank 0.
  /// Empty without broadcast_buffers.
  std::vector<ModuleBuffer*> buffers_;
};

/// Owns the hooks of parameters, which call passes, from its construction to its destruction.
class InstalledHooks {
 public:
  /// The passes may be constructed later. Errc::invalid_argument names a parameter that has the hooks of
  /// another owner, which must be destroyed first. The parameters must outlive this object.
  InstalledHooks(std::span<Parameter* const>, TrainingPasses&, std::string owner);
  ~InstalledHooks();
  InstalledHooks(const InstalledHooks&) = delete;

 private:
  std::vector<Parameter*> parameters_;
  ParameterHooks hooks_;
};

}  // namespace rz
