#include "sharding/strategy/parameter_values.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "sharding/model/host_memory.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/replicas.h"
#include "tensor/ops.h"

namespace rz {

struct ParameterValues::State {
  State(ShardedModel& m, PassRules& r, Runtime& t)
      : model(m), rules(r), runtime(t), comparison(m, t), filled(m.parameters().had_values()) {}

  /// Calls f(values, parameter, elements) for what this rank exports.
  template <class F>
  void each_owned(const F&) const;
  /// whole(), in the order of the stream of the runtime.
  Tensor gathered(const Parameter&);
  Tensor whole_master(int member);
  Tensor joined(const Parameter&, const Tensor& part);
  Tensor widened(const Tensor&);
  void release();

  ShardedModel& model;
  PassRules& rules;
  Runtime& runtime;
  ReplicaComparison comparison;
  bool filled;
  int gathered_bucket = -1;  // bucket whose masters are in gathered_masters; -1: none
  Tensor gathered_masters;
};

template <class F>
void ParameterValues::State::each_owned(const F& f) const {
  const FlatLayout& layout = model.layout();
  for (int b = 0; b < layout.size(); ++b) {
    const Tensor values = model.updated_f32(b);
    for (const ParameterSlice& slice : layout.slices(b, layout.owned(b)))
      if (const Parameter& p = model.parameters().member(slice.member); runtime.counts(p))
        f(values.view(slice.offset - layout.updated(b).begin, {slice.elements.count()}), p, slice.elements);
  }
  for (const StoredValue& stored : model.values().stored())
    if (stored.exported && runtime.counts(*stored.parameter) &&
        model.parameters().member_of(*stored.parameter) < 0)
      f(stored.values, *stored.parameter, stored.elements);
}

Tensor ParameterValues::State::gathered(const Parameter& p) {
  const int member = model.parameters().member_of(p);
  require(
      member >= 0 || std::ranges::find(model.parameters().frozen(), &p) != model.parameters().frozen().end(),
      Errc::invalid_argument, "values().whole(): ", p.name, " is not a parameter of the model");
  if (!model.options().precision.mixed()) return model.values().whole(p);
  return member >= 0 ? whole_master(member) : widened(model.values().whole(p));
}

namespace {

/// The parts of a tensor, by ranks. Collective.
std::vector<Box> parts_of(const Parameter& p, Communicator& group) {
  const std::size_t dims = p.part->shape.size();
  std::vector<std::uint64_t> mine = p.part->offset;
  mine.insert(mine.end(), p.part->extent.begin(), p.part->extent.end());
  std::vector<std::uint64_t> all(mine.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(ConstBuffer(mine.data(), mine.size()), Buffer(all.data(), all.size())).wait();
  std::vector<Box> parts;
  for (auto at = all.begin(); at != all.end(); at += static_cast<std::ptrdiff_t>(2 * dims)) {
    const auto middle = at + static_cast<std::ptrdiff_t>(dims);
    parts.push_back({p.part->shape, {at, middle}, {middle, middle + static_cast<std::ptrdiff_t>(dims)}});
  }
  return parts;
}

}  // namespace

/// The whole tensor of a parameter that is split.
Tensor ParameterValues::State::joined(const Parameter& p, const Tensor& part) {
  Communicator& group = *runtime.mesh.tp();
  const std::vector<Box> parts = parts_of(p, group);
  std::size_t each = 0;
  for (const Box& box : parts) each = std::max<std::size_t>(each, box.count());
  const Tensor all = runtime.transient.allocate({each * parts.size()});
  const std::size_t rank = static_cast<std::size_t>(group.rank());
  if (part.count())
    ops::copy(all.view(rank * each, {part.count()}), part.reshape({part.count()}), runtime.stream);
  runtime.exposed.wait(group.all_gather(all.view(rank * each, {each}).buffer(), all.buffer(), runtime.stream),
                       runtime.stream);
  const Tensor whole = runtime.transient.allocate(p.global_shape());
  for (std::size_t r = 0; r < parts.size(); ++r)
    parts[r].for_each_run(
        0, parts[r].count(), [&](std::uint64_t at, std::uint64_t index, std::uint64_t count) {
          memcpy_async(whole.raw() + index * sizeof(float), all.raw() + (r * each + at) * sizeof(float),
                       count * sizeof(float), runtime.stream);
        });
  return whole;
}

Tensor ParameterValues::State::widened(const Tensor& value) {
  const Tensor wide = runtime.transient.allocate(value.shape());
  if (value.count()) ops::copy(wide, value, runtime.stream);
  return wide;
}

Tensor ParameterValues::State::whole_master(int member) {
  const auto place = model.layout().place(member);
  const Shape& shape = model.parameters().member(member).shape;
  const Tensor& mine = model.masters()[static_cast<std::size_t>(place.bucket)];
  const std::size_t count = model.layout().bucket(place.bucket).count;
  if (mine.count() == count && mine.device() == runtime.stream.device())
    return mine.view(place.offset, shape);
  if (gathered_bucket != place.bucket) {
    release();  // before memory is allocated
    gathered_masters = runtime.transient.allocate({count});
    const Tensor part = gathered_masters.view(model.layout().updated(place.bucket).begin, mine.shape());
    memcpy_async(part.raw(), mine.raw(), mine.bytes(), runtime.stream);  // from the device or the host
    runtime.exposed.wait(
        runtime.shard_group.all_gather(part.buffer(), gathered_masters.buffer(), runtime.stream),
        runtime.stream);
    gathered_bucket = place.bucket;
  }
  return gathered_masters.view(place.offset, shape);
}

void ParameterValues::State::release() {
  gathered_bucket = -1;
  gathered_masters = {};
}

ParameterValues::ParameterValues(ShardedModel& model, PassRules& rules, Runtime& runtime)
    : state_(std::make_unique<State>(model, rules, runtime)) {}

ParameterValues::~ParameterValues() = default;

bool ParameterValues::filled() const { return state_->filled; }

void ParameterValues::release() { state_->release(); }

void ParameterValues::fill(const Fill& fill, const Selection& selected) {
  State& s = *state_;
  const auto write = [&](const Tensor& to, const Parameter& p, Range elements) {
    if (selected && !selected(p)) return;
    write_via_host(to, s.runtime.stream, [&](float* out) { fill(p, elements, out); });
  };
  s.rules.mark_values_written();
  s.comparison.record(fill, selected);
  s.release();
  s.model.values().release();
  s.model.wait_offloaded();
  for (const StoredValue& stored : s.model.values().stored())
    write(stored.values, *stored.parameter, stored.elements);
  const FlatLayout& layout = s.model.layout();
  for (int b = 0; s.model.options().precision.mixed() && b < layout.size(); ++b)
    for (const ParameterSlice& slice : layout.slices(b, layout.updated(b)))
      write(s.model.updated_f32(b).view(slice.offset - layout.updated(b).begin, {slice.elements.count()}),
            s.model.parameters().member(slice.member), slice.elements);
  s.filled = true;
}

void ParameterValues::visit_owned(const Visit& visit, const Selection& selected) const {
  const State& s = *state_;
  s.model.wait_offloaded();
  s.each_owned([&](const Tensor& from, const Parameter& p, Range elements) {
    if (selected && !selected(p)) return;
    read_via_host(from, s.runtime.stream, [&](const float* value) { visit(p, elements, value); });
  });
}

std::vector<ParameterElements> ParameterValues::owned() const {
  const State& s = *state_;
  std::vector<ParameterElements> all;
  s.each_owned([&](const Tensor&, const Parameter& p, Range elements) { all.push_back({&p, elements}); });
  return all;
}

Tensor ParameterValues::whole(const Parameter& p, const Stream& given) {
  State& s = *state_;
  const Tensor own = s.gathered(p);
  const Tensor value = s.runtime.mesh.tp() && is_split(p) ? s.joined(p, own) : own;
  const Stream& stream = s.runtime.stream;
  if (stream.device().kind == Device::cuda) s.runtime.stream_for(given).wait(stream.record());
  return value;
}

void ParameterValues::compare() {
  State& s = *state_;
  s.comparison.require_same_values([&](const Parameter& p) { return s.gathered(p); });
  s.rules.mark_values_checked();
}

}  // namespace rz
