#pragma once
/// Gradients of which each rank keeps the mean over the ranks for its own part of every bucket.

#include <deque>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "sharding/memory/transient_memory.h"
#include "sharding/strategies/partition.h"

namespace rz {

/// Whole buckets are what backward writes; they are reduced into shards.
class ShardedGradients {
 public:
  /// `persistent`: whole buckets stay, and a shard is the rank's part of one. `transient`: a whole bucket
  /// lives from its first gradient to the end of its reduction.
  enum class FullGradients { persistent, transient };
  /// Waits for an operation and counts the time.
  using Wait = std::function<void(const Work&)>;

  ShardedGradients(FullGradients, Communicator&, TransientMemory, const BucketLayout&,
                   std::vector<Parameter*> members, Wait);

  /// Defines Parameter::grad of the bucket's members. For transient buckets it may wait: one is filled while
  /// another is reduced.
  void ensure_storage(int bucket, const Stream&);
  /// Starts the mean over the ranks.
  Work reduce(int bucket, const Stream&);
  /// Waits for what was started; afterwards means are in the shards, added to what was there since drop().
  void finish_reductions(const Stream&);
  /// Makes room for another pass after finish_reductions(), with the shards kept.
  void carry_over(const Stream&);
  void drop();

  const Tensor& shard(int bucket) const;
  /// Of shards, and of whole buckets that are kept.
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
    Tensor accumulated;     // persistent: means of earlier passes, to be added to those of this one
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
