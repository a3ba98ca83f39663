#pragma once
/// Parameters that every rank holds whole. Trainable ones lie in flat buckets, so that an update or a gather
/// of a bucket is one call; frozen ones keep their own tensors.

#include <vector>

#include "sharding/strategies/strategy.h"

namespace rz {

class ReplicatedValues {
 public:
  /// Converts frozen parameters to `dtype`; those without a value become zeros.
  ReplicatedValues(Communicator&, DType dtype, std::vector<Parameter*> members,
                   std::vector<Parameter*> frozen, const Stream&);

  /// Moves the values of the members to new buckets with this layout.
  void move_to_layout(const BucketLayout&, const Stream&);
  /// The values of bucket b, padding included.
  const Tensor& bucket(int b) const { return buckets_[static_cast<std::size_t>(b)]; }

  /// Strategy::fill_parameters() for these parameters.
  void fill(const Strategy::Fill&, const Stream&);
  /// Calls `visit` on rank 0 only.
  void visit_frozen(const Strategy::Visit&, const Stream&) const;
  /// Bytes of all values, padding included.
  std::size_t bytes() const;

 private:
  Communicator& communicator_;
  DType dtype_;
  std::vector<Parameter*> members_, frozen_;
  std::vector<Tensor> buckets_;
};

/// Buckets of elements of one dtype, over the members in the order of first use, or in `order` if it is not
/// empty.
BucketLayout plan_member_buckets(std::span<Parameter* const> members, DType, const BucketOptions&,
                                 std::span<const int> order = {});

/// `count` zeros in memory of the communicator, on its device.
Tensor allocate_flat(Communicator&, std::size_t count, DType);

}  // namespace rz
