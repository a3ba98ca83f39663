#pragma once
/// The forward and backward passes of an update.

#include <string>

#include "autograd_lite/nn/module.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/gradient_reduction.h"
#include "sharding/strategy/pass_follower.h"
#include "sharding/strategy/pass_state.h"
#include "sharding/strategy/shared_buffers.h"
#include "sharding/strategy/update_record.h"

namespace rz {

/// StrategyOptions of the same names.
struct PassOptions {
  PassRules rules;
  bool rebuild = false;  ///< BucketRebuild
  bool broadcast_buffers = true;
};

/// Provides values and reduces gradients while the scopes of passes run, in the order of the calls of an
/// update. Strategy has the contracts of the functions.
class TrainingPasses {
 public:
  /// All references must outlive this object.
  TrainingPasses(Module&, ShardedModel&, const PassOptions&, Runtime&);
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
  /// Waits for all reductions. `counted`: PassAgreement::set_counted(). Gradients are means unless
  /// reduction().failed(); call state().set_reduced() once all ranks have agreed on what they used.
  void finish(const Stream&, int counted);
  /// Takes part in what the other ranks still do in the update, as far as it goes like the one before, or in
  /// the first one as `passes` of all scopes, and ends its reductions.
  void cancel(const Stream&, int passes);
  /// After an error while a pass was captured: forgets it. Not collective.
  void abandon();
  /// Drops the gradients.
  void reset();
  /// An update has ended, perhaps skipped.
  void end_step();

  PassState& state() { return state_; }
  const PassState& state() const { return state_; }
  const PassFollower& follower() const { return follower_; }
  GradientReduction& reduction() { return reduction_; }
  const GradientReduction& reduction() const { return reduction_; }

 private:
  using Step = UpdateRecord::Step;
  void follow(Pass);
  bool scopes_communicate() const;
  void record(const Step&);
  void record_scope(const Step&);
  void take_part(int passes);
  void take_part(const Step&);

  Module& module_;
  ShardedModel& model_;
  Runtime& runtime_;
  SharedBuffers buffers_;
  GradientReduction reduction_;
  PassState state_;
  PassFollower follower_;
  UpdateRecord record_;
  bool trains_in_evaluation_ = false;
};

/// Hooks that call `passes`, which may be constructed later.
ParameterHooks hooks_of(TrainingPasses& passes, std::string owner);

}  // namespace rz
