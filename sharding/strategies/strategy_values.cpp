// Import and export of parameter values, and their conversion from one layout to another.

#include <algorithm>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "sharding/memory/host_staging.h"
#include "sharding/strategies/strategy.h"
#include "tensor/ops.h"

namespace rz {

namespace {
std::size_t as_index(int i) { return static_cast<std::size_t>(i); }
}  // namespace

/// Initialises the masters from the values of the model before the strategy rounds them.
void Strategy::make_masters() {
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    const Range range = updated_range(b);
    masters_.push_back(Tensor::zeros({range.count()}, DType::f32, allocator_on(stream_.device())));
    for (const ParameterSlice& slice : parameter_slices(layout(), members_, b, range)) {
      const Shape count{slice.elements.count()};
      if (const Tensor& value = members_[as_index(slice.member)]->value; value.defined())
        ops::copy(masters_.back().view(slice.offset - range.begin, count),
                  value.view(slice.elements.begin, count), stream_);
    }
  }
}

void Strategy::change_layout(BucketLayout layout) {
  const BucketLayout before = this->layout();
  set_layout(std::move(layout));
  if (precision().mixed()) move_to_layout(masters_, before);
  for (auto& buckets : optimizer_state_) move_to_layout(buckets, before);
}

void Strategy::move_to_layout(std::vector<Tensor>& buckets, const BucketLayout& before) const {
  std::vector<Tensor> moved;
  for (const auto& b : layout().buckets)
    moved.push_back(Tensor::zeros({b.count}, DType::f32, allocator_on(stream_.device())));
  for (std::size_t m = 0; m < members_.size(); ++m) {
    const auto from = before.offsets[m], to = layout().offsets[m];
    const Shape shape{members_[m]->count()};
    ops::copy(moved[as_index(to.bucket)].view(to.offset, shape),
              buckets[as_index(from.bucket)].view(from.offset, shape), stream_);
  }
  buckets = std::move(moved);
}

// ---- import and export

void Strategy::fill_parameters(const Fill& fill) {
  drop_gathered();
  agreement_->mark_values_written();
  if (kind_ == StrategyKind::zero3) record_filled_values(fill);
  fill_values(fill);
  for (int b = 0; b < static_cast<int>(masters_.size()); ++b) {
    const Range range = updated_range(b);
    for (const ParameterSlice& slice : parameter_slices(layout(), members_, b, range))
      write_via_host(masters_[as_index(b)].view(slice.offset - range.begin, {slice.elements.count()}),
                     stream_,
                     [&](float* out) { fill(*members_[as_index(slice.member)], slice.elements, out); });
  }
}

void Strategy::visit_owned(const Visit& visit) const {
  for (int b = 0; b < static_cast<int>(layout().buckets.size()); ++b) {
    const Updated u = updated(b);
    const Tensor& values = values_to_update(b, u);
    const Range own =
        shard_range(layout().buckets[as_index(b)].count, communicator_.rank(), communicator_.size());
    for (const ParameterSlice& slice : parameter_slices(layout(), members_, b, own))
      read_via_host(
          values.view(slice.offset - updated_range(b).begin, {slice.elements.count()}), stream_,
          [&](const float* value) { visit(*members_[as_index(slice.member)], slice.elements, value); });
  }
  visit_frozen(visit);
}

Tensor Strategy::full_value(const Parameter& p, const Stream& given) {
  const int member = member_of(p);
  require(member >= 0 || std::find(frozen_.begin(), frozen_.end(), &p) != frozen_.end(),
          Errc::invalid_argument, "full_value(): ", p.name, " is not a parameter of the model");
  const Tensor value = precision().mixed() ? value_in_f32(p, member) : unsharded_value(p);
  if (stream_.device().kind == Device::cuda) device_stream(given).wait(stream_.record());
  return value;
}

Tensor Strategy::value_in_f32(const Parameter& p, int member) {
  if (member < 0) {
    const Tensor wide = transient_.allocate(p.shape);
    if (p.count()) ops::copy(wide, unsharded_value(p), stream_);
    return wide;
  }
  const auto place = layout().offsets[as_index(member)];
  const Tensor& mine = masters_[as_index(place.bucket)];
  const std::size_t count = layout().buckets[as_index(place.bucket)].count;
  if (mine.count() == count) return mine.view(place.offset, p.shape);
  if (gathered_bucket_ != place.bucket) {
    drop_gathered();  // before memory is allocated
    gathered_ = transient_.allocate({count});
    wait_exposed(communicator_.all_gather(mine.buffer(), gathered_.buffer(), stream_), stream_);
    gathered_bucket_ = place.bucket;
  }
  return gathered_.view(place.offset, p.shape);
}

void Strategy::drop_gathered() {
  gathered_bucket_ = -1;
  gathered_ = {};
}

// ---- comparison of replicas

namespace {
Fact fact_of(const Parameter& p, const void* values, std::size_t bytes) {
  return {p.name, concat("of hash ", hash_text(hash_bytes(values, bytes)))};
}
}  // namespace

void Strategy::record_filled_values(const Fill& fill) {
  filled_.clear();
  for (const auto* list : {&members_, &frozen_})
    for (const Parameter* p : *list) {
      std::vector<float> values(std::min<std::size_t>(p->count(), 64));
      fill(*p, {0, values.size()}, values.data());
      filled_.push_back(fact_of(*p, values.data(), values.size() * sizeof(float)));
    }
}

/// Compares all values that every rank holds whole: in mixed precision the working copies, and in ddp the
/// masters.
void Strategy::require_same_values() {
  std::vector<Fact> facts = filled_;
  const auto add = [&](const Parameter& p, const Tensor& value) {
    const Tensor on_host = value.on_host(stream_);
    facts.push_back(fact_of(p, on_host.raw(), on_host.bytes()));
  };
  if (kind_ != StrategyKind::zero3) {
    for (const auto* list : {&members_, &frozen_})
      for (const Parameter* p : *list) add(*p, p->value);
    if (kind_ == StrategyKind::ddp && precision().mixed())
      for (std::size_t m = 0; m < members_.size(); ++m)
        add(*members_[m], value_in_f32(*members_[m], static_cast<int>(m)));
  }
  require_same("a parameter's value", facts,
               "fill or load the same on every rank (the same seed, the same checkpoint)", communicator_);
  agreement_->mark_values_checked();
}

}  // namespace rz
