#include "sharding/strategies/replicated_values.h"

#include <utility>

#include "comm/device/allocate.h"
#include "sharding/memory/host_staging.h"
#include "tensor/ops.h"

namespace rz {

Tensor allocate_flat(Communicator& communicator, std::size_t count, DType dtype) {
  return Tensor::empty({count}, dtype, communicator.allocator());
}

BucketLayout plan_member_buckets(std::span<Parameter* const> members, DType dtype,
                                 const BucketOptions& options, std::span<const int> order) {
  std::vector<BucketMember> counts;
  for (const Parameter* p : members) counts.push_back({p->count(), dtype});
  return plan_buckets(counts, options, order);
}

ReplicatedValues::ReplicatedValues(Communicator& communicator, DType dtype, std::vector<Parameter*> members,
                                   std::vector<Parameter*> frozen, const Stream& stream)
    : communicator_(communicator), dtype_(dtype), members_(std::move(members)), frozen_(std::move(frozen)) {
  std::vector<Tensor> before;
  for (Parameter* p : frozen_) {
    if (p->value.defined() && p->value.dtype() == dtype) continue;
    const Tensor value = Tensor::zeros(p->shape, dtype, allocator_on(communicator.options().device));
    if (p->value.defined() && p->count()) ops::copy(value, p->value, stream);
    before.push_back(std::exchange(p->value, value));
  }
  if (!before.empty()) stream.synchronize();  // the sources of the copies are freed now
}

void ReplicatedValues::move_to_layout(const BucketLayout& layout, const Stream& stream) {
  std::vector<Tensor> buckets;
  for (const auto& b : layout.buckets) buckets.push_back(allocate_flat(communicator_, b.count, dtype_));
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Parameter& p = *members_[m];
    const auto place = layout.offsets[m];
    const Tensor value = buckets[static_cast<std::size_t>(place.bucket)].view(place.offset, p.shape);
    if (p.value.defined() && p.count()) ops::copy(value, p.value, stream);
    p.value = value;
  }
  stream.synchronize();  // the sources of the copies are freed now
  buckets_ = std::move(buckets);
}

void ReplicatedValues::fill(const Strategy::Fill& f, const Stream& stream) {
  for (const auto* list : {&members_, &frozen_})
    for (Parameter* p : *list)
      write_via_host(p->value, stream, [&](float* out) { f(*p, {0, p->count()}, out); });
}

void ReplicatedValues::visit_frozen(const Strategy::Visit& visit, const Stream& stream) const {
  if (communicator_.rank() != 0) return;
  for (const Parameter* p : frozen_)
    read_via_host(p->value, stream, [&](const float* value) { visit(*p, {0, p->count()}, value); });
}

std::size_t ReplicatedValues::bytes() const {
  std::size_t total = 0;
  for (const Tensor& b : buckets_) total += b.bytes();
  for (const Parameter* p : frozen_) total += p->value.bytes();
  return total;
}

}  // namespace rz
