#include "sharding/strategy/prediction.h"

#include <algorithm>
#include <vector>

#include "comm/core/integer_math.h"
#include "sharding/model/pairwise_sums.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/sharding_plan.h"

namespace rz {

namespace {

/// A model as a strategy lays it out.
struct Laid {
  Laid(StrategyKind kind, Module& module, MeshCoordinates at, const StrategyOptions& options,
       Device::Kind device)
      : place(divided_at(at, options)),
        parameters(module.parameters()),
        storage(storage_options(checked(options, plan_of(kind)), plan_of(kind), module.parameters(),
                                place.data().ranks, device)),
        planned(plan_layout(module, parameters, storage, place)),
        layout(parameters, planned.buckets, storage.plan.state, place) {}

  MeshCoordinates place;
  ModelParameters parameters;
  StorageOptions storage;
  PlannedLayout planned;
  FlatLayout layout;
};

HeldBytes& operator+=(HeldBytes& sum, const HeldBytes& more) {
  sum.on_device += more.on_device, sum.on_host += more.on_host;
  return sum;
}

HeldBytes at(bool on_host, std::size_t bytes) { return on_host ? HeldBytes{0, bytes} : HeldBytes{bytes, 0}; }

HeldBytes values_of(const Laid& laid) {
  const std::size_t value = size_of(laid.storage.precision.parameters);
  HeldBytes sum;
  if (const FlatParameters* flat = laid.planned.flat_parameters.get()) {
    const bool offloads = laid.storage.offload_param.device == OffloadDevice::cpu;
    for (int u = 0; u < flat->size(); ++u)
      sum += (*flat)[u].persistent ? at(false, value * (*flat)[u].count)
                                   : at(offloads, value * flat->shard(u).count());
    return sum;
  }
  for (int b = 0; b < laid.layout.size(); ++b) sum += at(false, value * laid.layout.bucket(b).count);
  for (const Parameter* p : laid.parameters.frozen()) sum += at(false, value * p->count());
  return sum;
}

std::size_t gradients_of(const Laid& laid) {
  std::size_t elements = 0;
  for (int b = 0; b < laid.layout.size(); ++b)
    elements += laid.storage.plan.gradients == Placement::replicated ? laid.layout.bucket(b).count
                                                                     : laid.layout.shard(b).count();
  const std::size_t partial = PairwiseSums::max_kept(laid.storage.pairwise_passes);
  for (int b = 0; b < laid.layout.size(); ++b) elements += partial * laid.layout.bucket(b).count;
  return elements * size_of(laid.storage.precision.gradients);
}

/// Bytes of the state of a bucket's elements that the rank updates.
std::size_t state_of(const Laid& laid, int bucket, const Optimizer& optimizer) {
  const auto& members = laid.layout.bucket(bucket).members;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Range here =
        intersect(padded_extent(laid.layout.buckets(), bucket, i), laid.layout.updated(bucket));
    const int group = optimizer.group_of(laid.parameters.member(members[i]));
    for (const StateSpec& state : optimizer.states(group)) bytes += here.count() * size_of(state.dtype);
  }
  return bytes;
}

/// Offloaded memory of the largest tile of a bucket, each part of which is aligned.
std::size_t tile_of(const Laid& laid, int bucket, const Optimizer& optimizer, std::size_t sub_group_size) {
  constexpr std::size_t alignment = 256;
  const bool state_offloads = offloaded_buckets(
      laid.layout.buckets(), laid.storage.offload_optimizer)[static_cast<std::size_t>(bucket)];
  const FlatParameters* flat = laid.planned.flat_parameters.get();
  const bool values_offload =
      flat && !(*flat)[bucket].persistent && laid.storage.offload_param.device == OffloadDevice::cpu;
  const std::size_t count = std::min(laid.layout.updated(bucket).count(),
                                     std::max(norm_block, sub_group_size / norm_block * norm_block));
  const auto part = [&](bool offloads, DType dtype) {
    return offloads ? round_up(count * size_of(dtype), alignment) : 0;
  };
  const bool mixed = laid.storage.precision.mixed();
  std::size_t states = 0;
  for (const int m : laid.layout.bucket(bucket).members)
    states = std::max(states, optimizer.states(optimizer.group_of(laid.parameters.member(m))).size());
  return part(mixed ? state_offloads : values_offload, DType::f32) +
         (mixed ? part(values_offload, laid.storage.precision.parameters) : 0) +
         states * part(state_offloads, DType::f32);
}

}  // namespace

MemoryReport predicted_memory(StrategyKind kind, Module& module, const Optimizer& optimizer,
                              MeshCoordinates place, const StrategyOptions& options, Device::Kind device) {
  const Laid laid(kind, module, place, options, device);
  const std::vector<char> offloaded =
      offloaded_buckets(laid.layout.buckets(), laid.storage.offload_optimizer);
  HeldBytes masters, state;
  for (int b = 0; b < laid.layout.size(); ++b) {
    const bool on_host = offloaded[static_cast<std::size_t>(b)] != 0;
    if (laid.storage.precision.mixed())
      masters += at(on_host, sizeof(float) * laid.layout.updated(b).count());
    state += at(on_host, state_of(laid, b, optimizer));
  }
  const HeldBytes values = values_of(laid);
  MemoryReport report;
  report.parameters = values.on_device;
  report.gradients = gradients_of(laid);
  report.masters = masters.on_device;
  report.optimizer_state = state.on_device;
  report.offloaded = {values.on_host, masters.on_host, state.on_host};
  report.offload_has_no_effect = device == Device::host && offloads(options);
  return report;
}

std::size_t predicted_tiles(StrategyKind kind, Module& module, const Optimizer& optimizer,
                            MeshCoordinates place, const StrategyOptions& options, Device::Kind device) {
  const Laid laid(kind, module, place, options, device);
  std::size_t largest = 0;
  for (int b = 0; b < laid.layout.size(); ++b)
    largest = std::max(largest, tile_of(laid, b, optimizer, options.sub_group_size));
  return 2 * largest;
}

}  // namespace rz
