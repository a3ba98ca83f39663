#pragma once
/// Whole gradients of which each rank reduces its shard.

#include <vector>

#include "sharding/model/flat_layout.h"
#include "sharding/model/gradient_store.h"
#include "sharding/model/gradient_wire.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Whole buckets are kept; a reduce-scatter replaces this rank's shard of a bucket by the mean. The rest of
/// the bucket is then undefined.
class KeptGradients final : public GradientStore {
 public:
  KeptGradients(const ModelParameters&, const FlatLayout&, DType, GradientWire&, Runtime&);

  void provide(int, const Stream&) override {}
  Work reduce(int bucket, const Stream&) override;
  void settle(const Stream&) override;
  void reopen(const Stream&) override;
  void forget() override;
  const Tensor& mean(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].shard; }
  const Tensor& whole(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].whole; }
  std::size_t bytes() const override;

 private:
  struct Bucket {
    Tensor whole;
    Tensor shard;        // a view of `whole`
    Tensor accumulated;  // sum of the means of earlier passes, if there were any
    GradientWire::Reduction reduction;
  };

  const ModelParameters& parameters_;
  GradientWire& wire_;
  std::vector<Bucket> buckets_;
  std::vector<int> in_flight_;
};

}  // namespace rz
