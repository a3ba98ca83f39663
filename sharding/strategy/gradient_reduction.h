#pragma once
/// Reduction of gradients over the ranks.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "autograd_lite/tape.h"
#include "comm/bucket_scheduler.h"
#include "sharding/model/pairwise_sums.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/bucket_rebuild.h"
#include "sharding/strategy/pass_agreement.h"
#include "sharding/strategy/pass_check.h"
#include "sharding/strategy/scope_readiness.h"

namespace rz {

/// Reduces the buckets of a pass in a fixed order, while backward computes the rest, and exchanges the
/// control state of the pass.
class GradientReduction {
 public:
  /// Both must outlive the reduction. `rebuild`: BucketRebuild.
  GradientReduction(ShardedModel&, const PassRules&, bool rebuild, Runtime&);
  GradientReduction(const GradientReduction&) = delete;

  // ---- a backward pass; `member` as in ModelParameters
  void begin_pass(bool synchronises);
  /// For a pass of which this rank computes nothing, in place of begin_pass() and gradient_begins().
  void begin_scopes();
  void touch(int member);
  /// Called before the gradient of a member is written for the first time in a pass.
  void gradient_begins(int member);
  /// Called in a pass that synchronises when the gradient of a member is complete.
  void gradient_ready(int member, const Stream&);
  /// Called before a scope runs.
  void enter(const Scope&, Pass);
  /// Called after a scope has run backward. `synchronises`: the pass does.
  void leave(const Scope&, bool synchronises);

  /// Reduces what is left and waits for all. Every rank makes the same calls in the same order, whichever
  /// members its pass used. Afterwards agreement() holds for all ranks.
  void finish(const Stream&, bool cancelled);
  /// Whether a rank has cancelled the update, or broken a rule. Call fail() then, after reset().
  bool failed() const { return agreement_.cancelled_by() >= 0 || agreement_.is_broken(); }
  /// Throws Errc::cancelled that names the rank that has cancelled, or PassCheck::fail(). Collective.
  [[noreturn]] void fail() const;
  /// Records the order and the graph of the pass. Call after each update that was not skipped.
  void record();
  /// Drops all gradients.
  void reset();
  /// After an error while a pass was captured in a graph: forgets it. Not collective.
  void abandon() { scheduler_->reset(); }
  /// Aborts the communicator, and ends the reductions in flight.
  void abort() noexcept;
  /// Once, after the first update: forms new buckets by BucketRebuild, and returns the layout before; nullopt
  /// at other times. Gradients are dropped. Collective.
  std::optional<BucketLayout> rebuild_buckets();
  bool has_rebuilt() const { return rebuild_.made(); }

  /// Bytes of the partial sums of an update.
  std::size_t partial_sums() const { return sums_ ? sums_->bytes() : 0; }

  PassCheck& check() { return check_; }
  const PassAgreement& agreement() const { return agreement_; }
  /// Seconds from the first reduction of a pass to the end of its last, of the passes of the last update that
  /// has ended.
  double seconds_of_last_step() const { return last_seconds_; }
  void end_step() { last_seconds_ = std::exchange(seconds_, 0); }
  PassAgreement& agreement() { return agreement_; }

 private:
  Work launch(int bucket, const Stream&);
  void fill_unwritten(int bucket, const Stream&);
  void begin_agreement(bool cancelled);
  bool is_exchanged(int bucket) const;
  void keep_passes();
  void follow_layout();

  ShardedModel& model_;
  Runtime& runtime_;
  PassAgreement agreement_;
  PassCheck check_;
  BucketRebuild rebuild_;
  double seconds_ = 0, last_seconds_ = 0;
  std::unique_ptr<BucketScheduler> scheduler_;
  std::unique_ptr<ScopeReadiness> scopes_;  // null unless values are sharded
  std::optional<PairwiseSums> sums_;        // in pairwise order only
};

}  // namespace rz
