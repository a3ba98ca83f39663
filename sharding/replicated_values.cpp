#include "sharding/replicated_values.h"

#include "comm/core/memory.h"
#include "sharding/host_access.h"

namespace rz {

Tensor flat_memory(Communicator& communicator, std::size_t count) {
  return Tensor::empty({count}, DType::f32, communicator.allocator());
}

BucketLayout plan_member_buckets(std::span<Parameter* const> members, const BucketOptions& options,
                                 std::span<const int> order) {
  std::vector<BucketMember> counts;
  for (const Parameter* p : members) counts.push_back({p->count(), DType::f32});
  return plan_buckets(counts, options, order);
}

ReplicatedValues::ReplicatedValues(Communicator& communicator, std::vector<Parameter*> members,
                                   std::vector<Parameter*> frozen)
    : communicator_(communicator), members_(std::move(members)), frozen_(std::move(frozen)) {
  for (Parameter* p : frozen_)
    if (!p->value.defined())
      p->value = Tensor::zeros(p->shape, DType::f32, allocator_on(communicator.options().device));
}

void ReplicatedValues::place(const BucketLayout& layout, const Stream& stream) {
  std::vector<Tensor> buckets;
  for (const auto& b : layout.buckets) buckets.push_back(flat_memory(communicator_, b.count));
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Parameter& p = *members_[m];
    const auto place = layout.places[m];
    const Tensor value = buckets[static_cast<std::size_t>(place.bucket)].view(place.offset, p.shape);
    if (p.value.defined()) copy_bytes(value.raw(), p.value.raw(), value.bytes(), stream);
    p.value = value;
  }
  stream.synchronize();  // what was copied goes now
  buckets_ = std::move(buckets);
}

void ReplicatedValues::fill(const Strategy::Fill& f, const Stream& stream) {
  for (const auto* list : {&members_, &frozen_})
    for (Parameter* p : *list)
      write_from_host(p->value, stream, [&](float* out) { f(*p, {0, p->count()}, out); });
}

void ReplicatedValues::visit_owned(const BucketLayout& layout, const Strategy::Visit& visit,
                                   const Stream& stream) const {
  const int rank = communicator_.rank(), size = communicator_.size();
  for (int b = 0; b < static_cast<int>(buckets_.size()); ++b)
    for (const Piece& piece : pieces(layout, members_, b, part(bucket(b).count(), rank, size)))
      read_on_host(bucket(b).view(piece.offset, {piece.elements.count()}), stream, [&](const float* value) {
        visit(*members_[static_cast<std::size_t>(piece.member)], piece.elements, value);
      });
  if (rank == 0)
    for (const Parameter* p : frozen_)
      read_on_host(p->value, stream, [&](const float* value) { visit(*p, {0, p->count()}, value); });
}

std::size_t ReplicatedValues::bytes() const {
  std::size_t total = 0;
  for (const Tensor& b : buckets_) total += b.bytes();
  for (const Parameter* p : frozen_) total += p->value.bytes();
  return total;
}

}  // namespace rz
