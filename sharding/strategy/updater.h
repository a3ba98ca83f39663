#pragma once
/// Update of the values that a rank owns.

#include <span>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/parallel/rank_consistency.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/update_tiles.h"
#include "sharding/strategy/whole_parameters.h"

namespace rz {

/// Updates and publishes values bucket by bucket, a bucket tile by tile. The tiles of LAMB are measured
/// before any is updated. Muon orthogonalizes whole matrices, before the tiles.
class Updater {
 public:
  /// All references must outlive the updater. The rules know the members that were used.
  Updater(ShardedModel&, OptimizerState&, const PassRules&, Runtime&);

  /// Updates all values from the means of the gradients. Collective. On a device the first call is
  /// Errc::mismatch if the optimizers of the ranks differ.
  void update(Optimizer&, const UpdateScale&, const Stream&);
  /// A hash of all that decides on what an update makes of gradients: the optimizer, its options, rates and
  /// number of updates, and which parameters are in which group. No text is formatted unless the optimizer is
  /// another one than before.
  std::uint64_t hash(Optimizer&);
  /// After hashes that differ over the ranks: Errc::mismatch with what they are hashes of. Collective.
  [[noreturn]] void fail_different(const Optimizer&);
  /// Call after an update that was not skipped: counts it for the members that it left out.
  void count_missed();
  /// On a device: counts the next update in the optimizer, and writes its constants to device memory.
  void prepare(Optimizer&, const Stream&);

 private:
  void bind(const Optimizer&);
  bool has(const Optimizer&, Grain) const;
  bool skips(std::size_t member) const;
  void require_same_optimizer(const Optimizer&, const Stream&);
  std::vector<Fact> facts(const Optimizer&) const;
  std::uint64_t hash_of_options(Optimizer&) const;
  void update_bucket(int bucket, const Optimizer&, const UpdateScale&, const Stream&);

  ShardedModel& model_;
  OptimizerState& state_;
  const PassRules& rules_;
  bool overlap_;
  UnusedParameterPolicy unused_parameters_;
  Runtime& runtime_;
  UpdateSpans spans_;
  UpdateTiles tiles_;
  ParameterNorms norms_;
  MatrixDirections directions_;
  DeviceConstants constants_;
  std::uint64_t bound_ = 0;             // serial number of the optimizer that updates_ belongs to
  std::vector<MemberUpdate> updates_;   // how the next update treats each member
  bool same_optimizer_ = false;         // on a device: optimizers were compared and are equal on all ranks
  std::uint64_t hashed_ = 0;            // serial number of the optimizer that options_hash_ is of
  std::uint64_t options_hash_ = 0;      // without rates and betas
  std::vector<double> hashed_numbers_;  // kept so that an update allocates nothing
  std::vector<Work> published_;         // kept so that an update allocates nothing
};

}  // namespace rz
