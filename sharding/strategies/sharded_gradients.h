#pragma once
/// Sharded gradients: each rank keeps the mean over the ranks for its own shard of every bucket.

#include <deque>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "sharding/memory/transient_memory.h"
#include "sharding/strategies/partition.h"

namespace rz {

/// Backward writes whole buckets; reduce-scatter turns them into shards.
class ShardedGradients {
 public:
  /// `persistent`: whole buckets are kept, and a shard is a view of the rank's part. `transient`: a whole
  /// bucket lives from its first gradient to the end of its reduction.
  enum class FullGradients { persistent, transient };
  /// Waits for an operation and counts the time as exposed.
  using Wait = std::function<void(const Work&)>;

  /// Allocates the memory that is kept; `members` in the order of the layout.
  ShardedGradients(FullGradients, Communicator&, TransientMemory, const BucketLayout&,
                   std::vector<Parameter*> members, Wait);

  /// Defines Parameter::grad of the members of the bucket. With transient buckets it may wait for the oldest
  /// reduction: one bucket is filled while another is reduced.
  void ensure_storage(int bucket, const Stream&);
  /// Starts the reduce-scatter that computes the mean over the ranks.
  Work reduce(int bucket, const Stream&);
  /// Waits for all reductions that were started. Afterwards the shards hold the means, added to the values
  /// accumulated since drop().
  void finish_reductions(const Stream&);
  /// Prepares another pass after finish_reductions(), and keeps the shards.
  void carry_over(const Stream&);
  /// Drops the means; transient whole buckets are released.
  void drop();

  /// This rank's part of the means of a bucket; valid after finish_reductions().
  const Tensor& shard(int bucket) const;
  /// Bytes of the shards, and of the whole buckets that are kept.
  std::size_t bytes() const;

 private:
  struct Bucket {
    std::vector<Parameter*> members;
    std::vector<std::size_t> offsets;
    std::size_t count = 0;
    DType dtype = DType::f32;
    Range own_range;
    Tensor full;            // undefined while a transient bucket is not in use
    Tensor shard;           // persistent: a view of `full`
    Tensor accumulated;     // persistent: sum of the means of earlier passes
    bool has_mean = false;  // transient: `shard` holds a mean
    Work reduction;
  };
  Bucket& at(int bucket) { return buckets_[static_cast<std::size_t>(bucket)]; }
  void set_full(Bucket&, Tensor);
  void drop_full(Bucket&);
  void complete_oldest(const Stream&);

  FullGradients mode_;
  Communicator& communicator_;
  TransientMemory memory_;
  Wait wait_;
  std::vector<Bucket> buckets_;
  std::deque<int> in_flight_;
};

}  // namespace rz
