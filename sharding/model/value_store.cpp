#include "sharding/model/value_store.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/drain.h"
#include "comm/device/memory.h"
#include "sharding/model/gather_plan.h"
#include "tensor/ops.h"

namespace rz {

namespace {

// ---- whole on every rank

/// Trainable values lie in flat buckets, so that an update or a gather of a bucket is one call.
class ReplicatedValues final : public ValueStore {
 public:
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
  return runtime_.counted(runtime_.shard_group)
      .all_gather(updated(bucket), buckets_[static_cast<std::size_t>(bucket)], stream);
}

std::vector<StoredValue> ReplicatedValues::stored() const {
  const bool exported = runtime_.data.rank() == 0;
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

// ---- divided

class ShardedValues final : public ValueStore {
 public:
  ShardedValues(FlatParameters&, DType dtype, GatherPlan, const OffloadOptions& offload, Runtime&);
  ~ShardedValues() override;

  void enter(const ScopeUse&) override;
  void leave(const ScopeUse&) override;
  void release() override;
  void restart() override;
  Tensor updated(int bucket) const override { return at(bucket).shard; }
  Work publish(int bucket, const Stream&) override;
  std::vector<StoredValue> stored() const override;
  Tensor whole(const Parameter&) override;
  HeldBytes bytes() const override;

 private:
  /// The values of a flat parameter on this rank.
  struct Values {
    Tensor shard;     // a view of `gathered` if persistent
    Tensor gathered;  // undefined unless persistent, gathered or being gathered
    Tensor again;     // the part of what was gathered that this rank keeps in Runtime::secondary
    Work gather;
  };
  Values& at(int u) { return values_[static_cast<std::size_t>(u)]; }
  const Values& at(int u) const { return values_[static_cast<std::size_t>(u)]; }
  Tensor make_shard(int u, DType, const Allocator&) const;
  Tensor make_offloaded_shard(int u, DType) const;
  void make_persistent(int u, DType);
  void set_parameters(int u);
  void drop_parameters(int u);
  void gather_async(int u);
  Work gather_offloaded(int u);
  void wait_gathered(int u);
  void keep_part(int u);
  void run(const GatherPlan::Steps&, bool keeps = false);

  FlatParameters& flat_;
  OffloadOptions offload_;
  Runtime& runtime_;
  std::vector<Values> values_;  // by flat parameter
  GatherPlan plan_;
};

ShardedValues::ShardedValues(FlatParameters& flat, DType dtype, GatherPlan plan,
                             const OffloadOptions& offload, Runtime& runtime)
    : flat_(flat),
      offload_(offload),
      runtime_(runtime),
      values_(static_cast<std::size_t>(flat.size())),
      plan_(std::move(plan)) {
  for (int u = 0; u < flat.size(); ++u)
    if (flat[u].persistent)
      make_persistent(u, dtype);
    else if (offload.device == OffloadDevice::cpu)
      at(u).shard = make_offloaded_shard(u, dtype);
    else
      at(u).shard = make_shard(u, dtype, runtime.communicator.allocator());
  runtime.stream.synchronize();  // the sources of the copies are freed now
  for (int u = 0; u < flat.size(); ++u) flat[u].persistent ? set_parameters(u) : drop_parameters(u);
}

void ShardedValues::make_persistent(int u, DType dtype) {
  Values& values = at(u);
  values.gathered = runtime_.allocate_flat(flat_[u].count, dtype);
  values.shard = values.gathered.view(flat_.shard(u).begin, {flat_.shard(u).count()});
  for_each_piece(flat_[u], {0, flat_[u].count}, [&](const Parameter& p, Range, std::size_t offset) {
    if (p.value.defined()) ops::copy(values.gathered.view(offset, p.shape), p.value, runtime_.stream);
  });
}

Tensor ShardedValues::make_offloaded_shard(int u, DType dtype) const {
  const Stream& stream = runtime_.stream;
  const Tensor on_device = make_shard(u, dtype, allocator_on(stream.device()));
  const Tensor shard = Tensor::empty(on_device.shape(), dtype, offload_allocator(offload_, stream.device()));
  memcpy_async(shard.raw(), on_device.raw(), shard.bytes(), stream);
  stream.synchronize();  // one shard at a time is on the device
  return shard;
}

Tensor ShardedValues::make_shard(int u, DType dtype, const Allocator& allocator) const {
  const Range mine = flat_.shard(u);
  const Tensor shard = Tensor::zeros({mine.count()}, dtype, allocator);
  for_each_piece(flat_[u], mine, [&](const Parameter& p, Range elements, std::size_t offset) {
    const Shape count{elements.count()};
    if (p.value.defined())
      ops::copy(shard.view(offset, count), p.value.view(elements.begin, count), runtime_.stream);
  });
  return shard;
}

// A prefetch may be in flight although no scope will use it. The other ranks have started it too, or will, so
// it completes. An immediate abort would break gathers that they still wait for.
ShardedValues::~ShardedValues() {
  const Deadline deadline = Deadline::after(drain_timeout);
  for (Values& u : values_) {
    if (drain([&] { return u.gather.done(); }, deadline)) continue;
    runtime_.abort("a strategy was destroyed while it gathered parameters, and the other ranks did not");
    try {
      u.gather.wait();
    } catch (const std::exception&) {  // it fails because of the abort
    }
  }
}

// ---- gathering

void ShardedValues::set_parameters(int u) {
  for (std::size_t k = 0; k < flat_[u].parameters.size(); ++k) {
    Parameter& p = *flat_[u].parameters[k];
    p.value = at(u).gathered.view(flat_[u].offsets[k], p.shape);
  }
}

void ShardedValues::drop_parameters(int u) {
  for (Parameter* p : flat_[u].parameters) p->value = {};
}

void ShardedValues::gather_async(int index) {
  Values& u = at(index);
  u.gathered = runtime_.transient.allocate({flat_[index].count}, u.shard.dtype());
  u.gather = u.again.defined()
                 ? runtime_.counted(*runtime_.secondary).all_gather(u.again, u.gathered, runtime_.stream)
             : offload_.device == OffloadDevice::cpu
                 ? gather_offloaded(index)
                 : runtime_.counted(runtime_.shard_group).all_gather(u.shard, u.gathered, runtime_.stream);
}

void ShardedValues::keep_part(int index) {
  Values& u = at(index);
  const MeshCoordinates place = runtime_.mesh.place();
  const Range mine = shard_range(flat_[index].count, place.shard.rank, place.shard.ranks);
  u.again = runtime_.transient.allocate({mine.count()}, u.shard.dtype());
  ops::copy(u.again, u.gathered.view(mine.begin, {mine.count()}), runtime_.stream);
}

/// Computation does not wait for the copy.
Work ShardedValues::gather_offloaded(int index) {
  const Values& u = at(index);
  const Stream& stream = runtime_.to_device;
  require_may_copy(offload_, runtime_.stream);
  stream.wait(runtime_.stream.record());  // which may still use the memory
  const Tensor mine = u.gathered.view(flat_.shard(index).begin, u.shard.shape());
  memcpy_async(mine.raw(), u.shard.raw(), mine.bytes(), stream);
  return runtime_.counted(runtime_.shard_group).all_gather(mine, u.gathered, stream);
}

void ShardedValues::wait_gathered(int u) {
  runtime_.exposed.wait(std::exchange(at(u).gather, {}), runtime_.stream);
}

void ShardedValues::run(const GatherPlan::Steps& steps, bool keeps) {
  for (const int u : steps.drop) {
    wait_gathered(u);
    if (keeps && runtime_.secondary && !at(u).again.defined()) keep_part(u);
    at(u).gathered = {};
  }
  for (const int u : steps.gather) gather_async(u);
}

void ShardedValues::enter(const ScopeUse& use) {
  run(plan_.enter(use), true);
  for (const int u : use.flat) {
    wait_gathered(u);
    if (plan_.active_scopes(u) == 1) set_parameters(u);
  }
}

void ShardedValues::leave(const ScopeUse& use) {
  const GatherPlan::Steps& steps = plan_.leave(use);
  for (const int u : use.flat)
    if (plan_.active_scopes(u) == 0 && !flat_[u].persistent) drop_parameters(u);
  run(steps, true);
}

void ShardedValues::release() {
  for (int u = 0; u < flat_.size(); ++u)
    if (!flat_[u].persistent) drop_parameters(u);
  run(plan_.release());
  for (Values& u : values_) u.again = {};
}

void ShardedValues::restart() {
  for (int u = 0; u < flat_.size(); ++u) {
    Values& values = at(u);
    values.gather = {};
    values.again = {};
    if (flat_[u].persistent) continue;
    values.gathered = {};
    drop_parameters(u);
  }
  plan_.restart();
}

Work ShardedValues::publish(int bucket, const Stream& stream) {
  if (!flat_[bucket].persistent) return {};
  return runtime_.counted(runtime_.shard_group).all_gather(at(bucket).shard, at(bucket).gathered, stream);
}

// ---- import and export

Tensor ShardedValues::whole(const Parameter& p) {
  const int u = flat_.containing(p);
  if (flat_[u].persistent) return p.value;
  run(plan_.need(u));
  wait_gathered(u);
  const auto i = std::ranges::find(flat_[u].parameters, &p) - flat_[u].parameters.begin();
  return at(u).gathered.view(flat_[u].offsets[static_cast<std::size_t>(i)], p.shape);
}

std::vector<StoredValue> ShardedValues::stored() const {
  const bool first_copy = runtime_.place.replica.rank == 0;
  const bool first_rank = runtime_.place.shard.rank == 0;
  std::vector<StoredValue> out;
  for (int u = 0; u < flat_.size(); ++u) {
    const bool whole = flat_[u].persistent;
    const Tensor& held = whole ? at(u).gathered : at(u).shard;
    const Range range = whole ? Range{0, flat_[u].count} : flat_.shard(u);
    for_each_piece(flat_[u], range, [&](Parameter& p, Range elements, std::size_t offset) {
      out.push_back(
          {&p, elements, held.view(offset, {elements.count()}), first_copy && (!whole || first_rank)});
    });
  }
  return out;
}

HeldBytes ShardedValues::bytes() const {
  HeldBytes held;
  for (int u = 0; u < flat_.size(); ++u)
    held.add(flat_[u].persistent ? at(u).gathered : at(u).shard, runtime_.stream.device());
  return held;
}

}  // namespace

std::unique_ptr<ValueStore> make_replicated_values(const ModelParameters& parameters,
                                                   const FlatLayout& layout, DType dtype, Runtime& runtime) {
  return std::make_unique<ReplicatedValues>(parameters, layout, dtype, runtime);
}

std::unique_ptr<ValueStore> make_sharded_values(FlatParameters& flat, DType dtype, GatherPlan plan,
                                                const OffloadOptions& offload, Runtime& runtime) {
  return std::make_unique<ShardedValues>(flat, dtype, std::move(plan), offload, runtime);
}

}  // namespace rz
