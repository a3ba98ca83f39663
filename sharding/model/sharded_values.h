#pragma once
/// Values of which each rank holds its shard. The parameters of a scope are gathered just before the scope
/// runs, in forward and backward, and dropped after it, unless they are used again soon. Meanwhile those of
/// the next scopes are prefetched, in the order of an earlier pass. A scope that this order did not predict
/// is gathered on demand.
///
/// All ranks must run the same scopes in the same order, forward and backward. Tied embeddings are one flat
/// parameter used by two scopes. Persistent flat parameters are held whole; their updates are published.
///
/// Offloaded shards lie in host memory. A gather copies them to their place on the device first, on a stream
/// of its own. Persistent flat parameters stay on the device, as in DeepSpeed.

#include <vector>

#include "sharding/model/flat_parameters.h"
#include "sharding/model/gather_plan.h"
#include "sharding/model/runtime.h"
#include "sharding/model/value_store.h"

namespace rz {

class ShardedValues final : public ValueStore {
 public:
  /// Copies this rank's shards, in `dtype`, then drops the values of the model. The trace follows enter() and
  /// release(). `offload`: of the shards.
  ShardedValues(FlatParameters&, DType dtype, const GatherLimits&, const OffloadOptions& offload, ScopeTrace&,
                Runtime&);
  /// Waits up to 5 s for a prefetch in flight, then aborts the communicator.
  ~ShardedValues() override;

  void enter(const ScopeUse&) override;
  void leave(const ScopeUse&) override;
  void release() override;
  Tensor updated(int bucket) const override { return at(bucket).shard; }
  Work publish(int bucket, const Stream&) override;
  std::vector<StoredValue> stored() const override;
  Tensor whole(const Parameter&) override;
  HeldBytes bytes() const override;

 private:
  /// The values of a flat parameter on this rank.
  struct Values {
    Tensor shard;     // a view of `gathered` if persistent
    Tensor gathered;  // undefined unless persistent, gathered or being gathered
    Work gather;
  };
  Values& at(int u) { return values_[static_cast<std::size_t>(u)]; }
  const Values& at(int u) const { return values_[static_cast<std::size_t>(u)]; }
  Tensor make_shard(int u, DType, const Allocator&) const;
  Tensor make_offloaded_shard(int u, DType) const;
  void make_persistent(int u, DType);
  void set_parameters(int u);
  void drop_parameters(int u);
  void gather_async(int u);
  Work gather_offloaded(int u);
  void wait_gathered(int u);
  void run(const GatherPlan::Steps&);

  FlatParameters& flat_;
  OffloadOptions offload_;
  Runtime& runtime_;
  std::vector<Values> values_;  // by flat parameter
  GatherPlan plan_;
};

}  // namespace rz
