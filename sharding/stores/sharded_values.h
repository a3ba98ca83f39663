#pragma once
/// Values of which each rank holds its shard. The parameters of a scope are gathered just before the scope
/// runs, in forward and backward, and dropped after it. Meanwhile the next scopes are prefetched.
///
/// All ranks must run the same scopes in the same order, forward and backward. Tied embeddings are one flat
/// parameter used by two scopes.

#include <array>
#include <unordered_map>
#include <vector>

#include "sharding/layout/flat_parameters.h"
#include "sharding/runtime/runtime.h"
#include "sharding/stores/value_store.h"

namespace rz {

class ShardedValues final : public ValueStore {
 public:
  /// Copies this rank's shards, in `dtype`, then drops the values of the model. `prefetch`: scopes gathered
  /// before their use.
  ShardedValues(FlatParameters&, DType dtype, int prefetch, Runtime&);
  /// Waits up to 5 s for a prefetch in flight, then aborts the communicator.
  ~ShardedValues() override;

  void enter(const Scope&, Pass) override;
  void leave(const Scope&, Pass) override;
  void release() override;
  Tensor updated(int bucket) const override { return at(bucket).shard; }
  Work publish(int, const Stream&) override { return {}; }
  std::vector<StoredValue> stored() const override;
  Tensor whole(const Parameter&) override;
  std::size_t bytes() const override;

 private:
  using Indices = FlatParameters::Indices;
  /// The values of a flat parameter on this rank.
  struct Values {
    Tensor shard;
    Tensor gathered;  // undefined unless gathered or being gathered
    Work gather;
    int active_scopes = 0;  // scopes that were entered and not yet left
  };
  Values& at(int u) { return values_[static_cast<std::size_t>(u)]; }
  const Values& at(int u) const { return values_[static_cast<std::size_t>(u)]; }
  Tensor make_shard(int u, DType) const;
  void gather_async(int u);
  void wait_gathered(int u);
  void reshard_all_but(const Indices& keep, const Indices& also);
  const Indices& prefetch_set(const Scope&, Pass);

  FlatParameters& flat_;
  int prefetch_;
  Runtime& runtime_;
  std::vector<Values> values_;                                      // by flat parameter
  std::array<std::unordered_map<const Scope*, Indices>, 2> ahead_;  // by Pass: what to prefetch
};

}  // namespace rz
