#pragma once
/// Values that every rank holds whole. Trainable ones lie in flat buckets, so that an update or a gather of a
/// bucket is one call; frozen ones keep their own tensors.

#include <vector>

#include "sharding/model/flat_layout.h"
#include "sharding/model/runtime.h"
#include "sharding/model/value_store.h"

namespace rz {

class ReplicatedValues final : public ValueStore {
 public:
  /// Moves the values of the members to buckets of `dtype`, and converts those of frozen parameters.
  /// Parameters without a value become zeros.
  ReplicatedValues(const ModelParameters&, const FlatLayout&, DType dtype, Runtime&);

  Tensor updated(int bucket) const override;
  Work publish(int bucket, const Stream&) override;
  std::vector<StoredValue> stored() const override;
  Tensor whole(const Parameter& p) override { return p.value; }
  HeldBytes bytes() const override;

 private:
  void convert_frozen(DType);
  void place_members(DType);

  const ModelParameters& parameters_;
  const FlatLayout& layout_;
  Runtime& runtime_;
  std::vector<Tensor> buckets_;
};

}  // namespace rz
