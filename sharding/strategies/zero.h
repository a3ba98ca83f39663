#pragma once
/// ZeRO-1 and ZeRO-2 (Rajbhandari et al., doi:10.1109/SC41405.2020.00024). Each rank updates its own shard of
/// every bucket and keeps optimizer state for that shard only. ZeRO-2 also keeps gradients for that shard
/// only.

#include "sharding/strategies/replicated_values.h"
#include "sharding/strategies/sharded_gradients.h"
#include "sharding/strategies/strategy.h"

namespace rz {

/// After finish_gradients() the contents of Parameter::grad are undefined: the means are in the shards.
/// Buckets are never rearranged, since ownership of elements follows from the layout.
class Zero final : public Strategy {
 public:
  /// The kind is zero1 or zero2.
  Zero(StrategyKind, Module&, Communicator&, StrategyOptions);
  ~Zero() override;

 private:
  void fill_values(const Fill& fill) override { values_.fill(fill, stream()); }
  void visit_frozen(const Visit& visit) const override { values_.visit_frozen(visit, stream()); }
  Tensor unsharded_value(const Parameter& p) override { return p.value; }
  void ensure_gradient_storage(int bucket) override { gradients_->ensure_storage(bucket, stream()); }
  Work reduce(int bucket, const Stream& stream) override { return gradients_->reduce(bucket, stream); }
  void finish_reductions(const Stream& s) override { gradients_->finish_reductions(s); }
  void carry_gradients(const Stream& s) override { gradients_->carry_over(s); }
  void drop_gradients() override { gradients_->drop(); }
  Updated updated(int bucket) const override;
  Work publish(int bucket, const Stream&) override;
  void count_memory(MemoryReport&) const override;

  ReplicatedValues values_;
  std::unique_ptr<ShardedGradients> gradients_;
};

}  // namespace rz
