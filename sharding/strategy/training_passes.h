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

/// What the passes of an update did that other ranks take part in. The steps of the update before predict how
/// one that has failed on this rank goes on elsewhere; those of the first one are expected. Not thread-safe;
/// allocates only in the first updates.
class UpdateRecord {
 public:
  struct Step {
    enum Kind : char { enter, leave, begin, touch, ready, finish } kind = finish;
    Pass pass = Pass::forward;     ///< of enter and leave
    bool synchronises = false;     ///< of begin
    int member = -1;               ///< of touch and ready
    const Scope* scope = nullptr;  ///< of enter and leave; null: of any, where a forward pass begins
    bool operator==(const Step&) const = default;
  };

  /// What is recorded of scopes if they do not communicate, on a rank without data too.
  static Step forward_begins() { return {.kind = Step::enter, .pass = Pass::forward}; }

  void add(const Step& step) { now_.push_back(step); }
  /// The update has succeeded.
  void end_update() { before_.swap(now_), now_.clear(); }
  /// The update is dropped.
  void clear() { now_.clear(); }
  /// Before the first update has succeeded: passes are expected to run scopes in this order, and backward in
  /// the reverse one; the last one synchronises. No scopes: they do not communicate.
  void expect(std::span<const Scope* const> scopes, int passes);
  /// What this update has not done yet up to the next finish, if it has gone like the one before so far;
  /// otherwise nothing. Gradients that have begun may be there again.
  std::vector<Step> rest() const;

 private:
  std::vector<Step> now_, before_;
};

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
  /// Takes part in what the other ranks still do in the update, as far as it goes like the one before, or in
  /// the first one as `passes` of all scopes, and ends its reductions.
  void cancel(const Stream&, int passes);
  /// Where ranks share layers: each of them calls it once another has cancelled. The barrier of cancel().
  Work meet();
  /// After an error while a pass was captured: forgets it. Not collective.
  void abandon();
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
  using Step = UpdateRecord::Step;
  ScopeUse use_of(const Scope&, Pass);
  void follow(Pass);
  bool scopes_communicate() const;
  void record(const Step&);
  void record_scope(const Step&);
  void take_part(int passes);
  void take_part(const Step&);
  void broadcast_buffers();

  Module& module_;
  ShardedModel& model_;
  Runtime& runtime_;
  PassState state_;
  PassRules rules_;
  GradientReduction reduction_;
  UpdateRecord record_;
  /// The module's buffers, such as running means: in every forward pass that trains they are those of rank 0.
  /// Empty without broadcast_buffers.
  std::vector<ModuleBuffer*> buffers_;
  bool trains_in_evaluation_ = false;
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
