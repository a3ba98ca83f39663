#pragma once
/// Reduction of gradients over the ranks.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/bucket_scheduler.h"
#include "sharding/model/pairwise_sums.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/pass_state.h"

namespace rz {

/// Reduces the buckets of a pass in a fixed order, while backward computes the rest.
///
/// If values are sharded, a flat parameter is complete when backward leaves the first of its scopes, in the
/// order of forward. All ranks reach that moment, whichever parameters a rank did not use.
class GradientReduction {
 public:
  /// All references must outlive the reduction. StrategyOptions::rebuild: after the first update, forms
  /// buckets in the order in which gradients became ready on rank 0 (Li et al., PyTorch Distributed,
  /// doi:10.14778/3415478.3415530).
  GradientReduction(ShardedModel&, const PassState&, PassRules&, Runtime&);
  GradientReduction(const GradientReduction&) = delete;

  // ---- a backward pass; `member` as in ModelParameters
  /// After PassState::begin_backward().
  void begin_pass(bool synchronises);
  /// Called before the gradient of a member is written for the first time in a pass. Errc::unsupported if its
  /// flat parameter was complete.
  void gradient_begins(int member);
  /// Called in a pass that synchronises when the gradient of a member is complete.
  void gradient_ready(int member, const Stream&);
  /// Called before a scope runs.
  void enter(const ScopeUse&);
  /// Called after a scope has run backward.
  void leave(const ScopeUse&);

  /// Reduces what is left, waits for all, and exchanges the state of the pass. Every rank makes the same
  /// calls in the same order, whichever members its pass used. Afterwards the PassRules hold for all ranks.
  void finish(const Stream&);
  /// An update that was not skipped has ended. Collective.
  void end_update();
  /// Drops all gradients.
  void reset();
  /// Ranks have left the pass at different places, and its reductions have failed: forgets them.
  void drop() noexcept;
  /// Aborts the communicator, and ends the reductions in flight.
  void abort() noexcept;

  /// Once, after the first update: forms new buckets, and returns the layout before; nullopt at other times.
  /// Gradients are dropped.
  std::optional<BucketLayout> rebuild_buckets();
  bool has_rebuilt() const { return rebuild_ == Rebuild::done; }

  /// Bytes of the partial sums of an update.
  std::size_t partial_sums() const { return sums_ ? sums_->bytes() : 0; }
  /// Seconds from the first reduction of a pass to the end of its last, of the passes of the last update that
  /// has ended.
  double seconds_of_last_step() const { return last_seconds_; }
  void end_step() { last_seconds_ = std::exchange(seconds_, 0); }

 private:
  enum class Rebuild : std::uint8_t { never, pending, due, done };
  enum class Progress : std::uint8_t { untouched, touched, ready };
  Work launch(int bucket, const Stream&);
  void fill_unwritten(int bucket, const Stream&);
  void exchange();
  bool is_exchanged(int bucket) const;
  bool is_complete(const std::vector<int>& members) const;
  void keep_passes();
  void follow_layout();

  ShardedModel& model_;
  const PassState& state_;
  PassRules& rules_;
  Runtime& runtime_;
  std::unique_ptr<BucketScheduler> scheduler_;
  std::optional<PairwiseSums> sums_;  // in pairwise order only
  Rebuild rebuild_;
  std::vector<std::int32_t> ready_order_;  // of the first update, for rebuild_
  double seconds_ = 0, last_seconds_ = 0;
  // If values are sharded, otherwise empty:
  std::vector<Progress> progress_;   // by member, in this pass
  std::vector<char> queued_;         // by flat parameter: passed to the scheduler in this pass
  std::vector<const Scope*> first_;  // by flat parameter: the scope that forward entered first
  bool first_is_stale_ = false;      // a backward pass ran since
};

}  // namespace rz
