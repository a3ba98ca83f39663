#pragma once
/// The memory that holds the values used by a model: whole on every rank, or divided.

#include <memory>
#include <vector>

#include "autograd_lite/tape.h"
#include "comm/work.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/gather_plan.h"
#include "sharding/model/host_memory.h"
#include "sharding/model/runtime.h"
#include "tensor/tensor.h"

namespace rz {

/// Elements of a parameter in the memory of this rank.
struct StoredValue {
  Parameter* parameter;
  Range elements;  ///< in the flat parameter
  Tensor values;
  bool exported;  ///< true on one of the ranks that hold the elements
};

/// Defines Parameter::value while a scope runs. Not thread-safe.
class ValueStore {
 public:
  virtual ~ValueStore() = default;

  // ---- a pass
  /// Called before a scope runs in forward or backward. Parameter::value is then defined.
  virtual void enter(const ScopeUse&) {}
  /// Called after a scope has run.
  virtual void leave(const ScopeUse&) {}
  /// Drops gathered values, which are stale after an update. No scope is open then, or a pass has failed.
  virtual void release() {}
  /// Gathers in flight have failed: none is waited for, and the order of scopes is learnt anew.
  virtual void restart() {}

  // ---- an update
  /// The values of FlatLayout::updated() of a bucket; in host memory if they are offloaded.
  virtual Tensor updated(int bucket) const = 0;
  /// Sends new values of updated() to the ranks that hold them, too.
  virtual Work publish(int bucket, const Stream&) = 0;

  // ---- import and export
  /// All elements that this rank holds.
  virtual std::vector<StoredValue> stored() const = 0;
  /// A whole parameter. Collective.
  virtual Tensor whole(const Parameter&) = 0;
  /// Bytes that this rank holds, padding included.
  virtual HeldBytes bytes() const = 0;
};

/// Values that every rank holds whole. Moves those of the members to buckets of `dtype`, and converts those
/// of frozen parameters, which keep their own tensors. Parameters without a value become zeros. All
/// references must outlive the store.
std::unique_ptr<ValueStore> make_replicated_values(const ModelParameters&, const FlatLayout&, DType dtype,
                                                   Runtime&);

/// Each rank holds its shard of the values. The parameters of a scope are gathered just before the scope
/// runs, in forward and backward, and dropped after it, unless they are used again soon. Meanwhile those of
/// the next scopes are prefetched, in the order of an earlier pass. A scope that this order did not predict
/// is gathered on demand.
///
/// All ranks must run the same scopes in the same order, forward and backward. Tied embeddings are one flat
/// parameter used by two scopes. Persistent flat parameters are held whole; their updates are published.
///
/// Copies this rank's shards, in `dtype`, then drops the values of the model. The plan follows enter() and
/// release(). Shards with `offload` lie in host memory. A gather copies them to their place on the device
/// first, on a stream of its own. Persistent flat parameters stay on the device, as in DeepSpeed. All
/// references must outlive the store, whose destructor waits up to 5 s for a prefetch in flight, then aborts
/// the communicator.
std::unique_ptr<ValueStore> make_sharded_values(FlatParameters&, DType dtype, GatherPlan,
                                                const OffloadOptions& offload, Runtime&);

}  // namespace rz
