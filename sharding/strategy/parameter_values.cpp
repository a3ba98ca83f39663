#include "sharding/strategy/parameter_values.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "sharding/model/host_memory.h"
#include "tensor/ops.h"

namespace rz {

ParameterValues::ParameterValues(ShardedModel& model, PassRules& rules, Runtime& runtime)
    : model_(model),
      rules_(rules),
      runtime_(runtime),
      comparison_(model, runtime),
      filled_(model.parameters().had_values()) {}

void ParameterValues::fill(const Fill& fill, const Selection& selected) {
  const auto write = [&](const Tensor& to, const Parameter& p, Range elements) {
    if (selected && !selected(p)) return;
    write_via_host(to, runtime_.stream, [&](float* out) { fill(p, elements, out); });
  };
  rules_.mark_values_written();
  comparison_.record(fill, selected);
  release();
  model_.values().release();
  model_.wait_offloaded();
  for (const StoredValue& stored : model_.values().stored())
    write(stored.values, *stored.parameter, stored.elements);
  const FlatLayout& layout = model_.layout();
  for (int b = 0; model_.options().precision.mixed() && b < layout.size(); ++b)
    for (const ParameterSlice& slice : layout.slices(b, layout.updated(b)))
      write(model_.updated_f32(b).view(slice.offset - layout.updated(b).begin, {slice.elements.count()}),
            model_.parameters().member(slice.member), slice.elements);
  filled_ = true;
}

template <class F>
void ParameterValues::each_owned(const F& f) const {
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

void ParameterValues::visit_owned(const Visit& visit) const {
  model_.wait_offloaded();
  each_owned([&](const Tensor& from, const Parameter& p, Range elements) {
    read_via_host(from, runtime_.stream, [&](const float* value) { visit(p, elements, value); });
  });
}

std::vector<ParameterElements> ParameterValues::owned() const {
  std::vector<ParameterElements> all;
  each_owned([&](const Tensor&, const Parameter& p, Range elements) { all.push_back({&p, elements}); });
  return all;
}

Tensor ParameterValues::whole(const Parameter& p, const Stream& given) {
  const Tensor value = gathered(p);
  const Stream& stream = runtime_.stream;
  if (stream.device().kind == Device::cuda) runtime_.stream_for(given).wait(stream.record());
  return value;
}

Tensor ParameterValues::gathered(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0 ||
              std::ranges::find(model_.parameters().frozen(), &p) != model_.parameters().frozen().end(),
          Errc::invalid_argument, "values().whole(): ", p.name, " is not a parameter of the model");
  if (!model_.options().precision.mixed()) return model_.values().whole(p);
  return member >= 0 ? whole_master(member) : widened(model_.values().whole(p));
}

Tensor ParameterValues::widened(const Tensor& value) {
  const Tensor wide = runtime_.transient.allocate(value.shape());
  if (value.count()) ops::copy(wide, value, runtime_.stream);
  return wide;
}

Tensor ParameterValues::whole_master(int member) {
  const auto place = model_.layout().place(member);
  const Shape& shape = model_.parameters().member(member).shape;
  const Tensor& mine = model_.masters()[static_cast<std::size_t>(place.bucket)];
  const std::size_t count = model_.layout().bucket(place.bucket).count;
  if (mine.count() == count && mine.device() == runtime_.stream.device())
    return mine.view(place.offset, shape);
  if (gathered_bucket_ != place.bucket) {
    release();  // before memory is allocated
    gathered_masters_ = runtime_.transient.allocate({count});
    const Tensor part = gathered_masters_.view(model_.layout().updated(place.bucket).begin, mine.shape());
    memcpy_async(part.raw(), mine.raw(), mine.bytes(), runtime_.stream);  // from the device or the host
    runtime_.exposed.wait(
        runtime_.shard_group.all_gather(part.buffer(), gathered_masters_.buffer(), runtime_.stream),
        runtime_.stream);
    gathered_bucket_ = place.bucket;
  }
  return gathered_masters_.view(place.offset, shape);
}

void ParameterValues::release() {
  gathered_bucket_ = -1;
  gathered_masters_ = {};
}

void ParameterValues::compare(const Stream& stream) {
  comparison_.require_same_scopes(rules_);
  if (!rules_.values_need_check() || stream.capturing()) return;
  comparison_.require_same_values([&](const Parameter& p) { return gathered(p); });
  rules_.mark_values_checked();
}

}  // namespace rz
