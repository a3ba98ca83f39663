#include "sharding/model/replicated_values.h"

#include <utility>

#include "comm/device/allocate.h"
#include "tensor/ops.h"

namespace rz {

ReplicatedValues::ReplicatedValues(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                                   Runtime& runtime)
    : parameters_(parameters), layout_(layout), runtime_(runtime) {
  convert_frozen(dtype);
  place_members(dtype);
}

void ReplicatedValues::convert_frozen(DType dtype) {
  const Stream& stream = runtime_.stream;
  std::vector<Tensor> before;
  for (Parameter* p : parameters_.frozen()) {
    if (p->value.defined() && p->value.dtype() == dtype) continue;
    const Tensor value = Tensor::zeros(p->shape, dtype, allocator_on(stream.device()));
    if (p->value.defined() && p->count()) ops::copy(value, p->value, stream);
    before.push_back(std::exchange(p->value, value));
  }
  if (!before.empty()) stream.synchronize();  // the sources of the copies are freed now
}

void ReplicatedValues::place_members(DType dtype) {
  const Stream& stream = runtime_.stream;
  for (int b = 0; b < layout_.size(); ++b)
    buckets_.push_back(runtime_.allocate_flat(layout_.bucket(b).count, dtype));
  for (std::size_t m = 0; m < parameters_.members().size(); ++m) {
    Parameter& p = *parameters_.members()[m];
    const auto place = layout_.place(static_cast<int>(m));
    const Tensor value = buckets_[static_cast<std::size_t>(place.bucket)].view(place.offset, p.shape);
    if (p.value.defined() && p.count()) ops::copy(value, p.value, stream);
    p.value = value;
  }
  stream.synchronize();  // the sources of the copies are freed now
}

Tensor ReplicatedValues::updated(int bucket) const {
  const Range range = layout_.updated(bucket);
  return buckets_[static_cast<std::size_t>(bucket)].view(range.begin, {range.count()});
}

Work ReplicatedValues::publish(int bucket, const Stream& stream) {
  if (layout_.state() == Placement::replicated) return {};
  return runtime_.all_gather(updated(bucket), buckets_[static_cast<std::size_t>(bucket)], stream);
}

std::vector<StoredValue> ReplicatedValues::stored() const {
  const bool exported = runtime_.communicator.rank() == 0;
  std::vector<StoredValue> out;
  for (const auto* list : {&parameters_.members(), &parameters_.frozen()})
    for (Parameter* p : *list) out.push_back({p, {0, p->count()}, p->value, exported});
  return out;
}

HeldBytes ReplicatedValues::bytes() const {
  HeldBytes held;
  for (const Tensor& b : buckets_) held.add(b, runtime_.stream.device());
  for (const Parameter* p : parameters_.frozen()) held.add(p->value, runtime_.stream.device());
  return held;
}

}  // namespace rz
