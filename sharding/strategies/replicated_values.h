#pragma once
/// Parameters that every rank holds whole: the trainable ones in flat buckets, where an update or a gather of
/// a bucket is one call, the frozen ones where they are.

#include <vector>

#include "sharding/strategies/strategy.h"

namespace rz {

class ReplicatedValues {
 public:
  /// Frozen parameters take on `dtype`, zeros if they have no value.
  ReplicatedValues(Communicator&, DType dtype, std::vector<Parameter*> members,
                   std::vector<Parameter*> frozen, const Stream&);

  /// Moves the members' values into new memory with this layout.
  void move_to_layout(const BucketLayout&, const Stream&);
  const Tensor& bucket(int b) const { return buckets_[static_cast<std::size_t>(b)]; }

  void fill(const Strategy::Fill&, const Stream&);
  /// On rank 0.
  void visit_frozen(const Strategy::Visit&, const Stream&) const;
  std::size_t bytes() const;

 private:
  Communicator& communicator_;
  DType dtype_;
  std::vector<Parameter*> members_, frozen_;
  std::vector<Tensor> buckets_;
};

/// Buckets of elements of a type over the members in the order of first use, or in the given ready order.
BucketLayout plan_member_buckets(std::span<Parameter* const> members, DType, const BucketOptions&,
                                 std::span<const int> order = {});

/// `count` zeros in the communicator's memory, on its device.
Tensor allocate_flat(Communicator&, std::size_t count, DType);

}  // namespace rz
