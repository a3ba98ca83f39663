#include "sharding/strategy/value_access.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "sharding/model/host_staging.h"
#include "tensor/ops.h"

namespace rz {

ValueAccess::ValueAccess(ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

void ValueAccess::fill(const Fill& fill, const Selection& selected) {
  const auto write = [&](const Tensor& to, const Parameter& p, Range elements) {
    if (!selected(p)) return;
    write_via_host(to, runtime_.stream, [&](float* out) { fill(p, elements, out); });
  };
  release();
  model_.values().release();
  model_.wait_offloaded();
  for (const StoredValue& stored : model_.values().stored())
    write(stored.values, *stored.parameter, stored.elements);
  if (!model_.options().precision.mixed()) return;
  const FlatLayout& layout = model_.layout();
  for (int b = 0; b < layout.size(); ++b)
    for (const ParameterSlice& slice : layout.slices(b, layout.updated(b)))
      write(model_.updated_f32(b).view(slice.offset - layout.updated(b).begin, {slice.elements.count()}),
            model_.parameters().member(slice.member), slice.elements);
}

template <class F>
void ValueAccess::each_owned(const F& f) const {
  const FlatLayout& layout = model_.layout();
  for (int b = 0; b < layout.size(); ++b) {
    const Tensor values = model_.updated_f32(b);
    for (const ParameterSlice& slice : layout.slices(b, layout.shard(b)))
      f(values.view(slice.offset - layout.updated(b).begin, {slice.elements.count()}),
        model_.parameters().member(slice.member), slice.elements);
  }
  for (const StoredValue& stored : model_.values().stored())
    if (stored.exported && model_.parameters().member_of(*stored.parameter) < 0)
      f(stored.values, *stored.parameter, stored.elements);
}

void ValueAccess::visit_owned(const Visit& visit) const {
  model_.wait_offloaded();
  each_owned([&](const Tensor& from, const Parameter& p, Range elements) {
    read_via_host(from, runtime_.stream, [&](const float* value) { visit(p, elements, value); });
  });
}

std::vector<ParameterElements> ValueAccess::owned() const {
  std::vector<ParameterElements> all;
  each_owned([&](const Tensor&, const Parameter& p, Range elements) { all.push_back({&p, elements}); });
  return all;
}

Tensor ValueAccess::whole(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0 ||
              std::ranges::find(model_.parameters().frozen(), &p) != model_.parameters().frozen().end(),
          Errc::invalid_argument, "values().whole(): ", p.name, " is not a parameter of the model");
  if (!model_.options().precision.mixed()) return model_.values().whole(p);
  return member >= 0 ? whole_master(member) : widened(model_.values().whole(p));
}

Tensor ValueAccess::widened(const Tensor& value) {
  const Tensor wide = runtime_.transient.allocate(value.shape());
  if (value.count()) ops::copy(wide, value, runtime_.stream);
  return wide;
}

Tensor ValueAccess::whole_master(int member) {
  const auto place = model_.layout().place(member);
  const Shape& shape = model_.parameters().member(member).shape;
  const Tensor& mine = model_.masters()[static_cast<std::size_t>(place.bucket)];
  const std::size_t count = model_.layout().bucket(place.bucket).count;
  if (mine.count() == count && mine.device() == runtime_.stream.device())
    return mine.view(place.offset, shape);
  if (gathered_bucket_ != place.bucket) {
    release();  // before memory is allocated
    gathered_ = runtime_.transient.allocate({count});
    const Tensor part = gathered_.view(model_.layout().updated(place.bucket).begin, mine.shape());
    memcpy_async(part.raw(), mine.raw(), mine.bytes(), runtime_.stream);  // from the device or the host
    runtime_.exposed.wait(runtime_.shard_group.all_gather(part.buffer(), gathered_.buffer(), runtime_.stream),
                          runtime_.stream);
    gathered_bucket_ = place.bucket;
  }
  return gathered_.view(place.offset, shape);
}

void ValueAccess::release() {
  gathered_bucket_ = -1;
  gathered_ = {};
}

}  // namespace rz
