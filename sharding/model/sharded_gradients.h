#pragma once
/// Sharded gradients: each rank keeps the mean over the ranks for its own shard of every bucket.

#include <deque>
#include <vector>

#include "sharding/model/flat_layout.h"
#include "sharding/model/gradient_store.h"
#include "sharding/model/gradient_wire.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Backward writes whole buckets; reduce-scatter turns them into shards. A whole bucket lives from its first
/// gradient to the end of its reduction.
class ShardedGradients final : public GradientStore {
 public:
  ShardedGradients(const ModelParameters&, const FlatLayout&, DType, GradientWire&, Runtime&);

  /// May wait for the oldest reduction: one bucket is filled while another is reduced.
  void provide(int bucket, const Stream&) override;
  Work reduce(int bucket, const Stream&) override;
  void settle(const Stream&) override;
  void forget() override;
  const Tensor& mean(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].shard; }
  const Tensor& whole(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].whole; }
  std::size_t bytes() const override;

 private:
  struct Bucket {
    Tensor whole;  // undefined while it is not in use
    Tensor shard;
    bool has_mean = false;  // `shard` holds a mean
    GradientWire::Reduction reduction;
  };
  Bucket& at(int bucket) { return buckets_[static_cast<std::size_t>(bucket)]; }
  /// The part of this rank in a whole bucket.
  Tensor own_part(int bucket) const;
  Tensor destination(int bucket);
  void set_whole(int bucket, Tensor);
  void drop_whole(int bucket);
  void complete_oldest(const Stream&);

  const ModelParameters& parameters_;
  const FlatLayout& layout_;
  GradientWire& wire_;
  Runtime& runtime_;
  std::vector<Bucket> buckets_;
  std::deque<int> in_flight_;
};

}  // namespace rz
