#include "sharding/strategy/sharding_plan.h"

#include "comm/core/error.h"

namespace rz {

namespace {

bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

void check(const Precision& p) {
  require(is_float(p.parameters), Errc::invalid_argument, "precision: parameters in ", name(p.parameters),
          "; choose f32, bf16 or f16");
  require(p.gradients == DType::f32 || p.gradients == p.parameters, Errc::invalid_argument,
          "precision: gradients in ", name(p.gradients), " of parameters in ", name(p.parameters),
          "; choose f32 or ", name(p.parameters));
}

}  // namespace

ShardingPlan plan_of(StrategyKind kind) {
  using enum Placement;
  switch (kind) {
    case StrategyKind::ddp:
      return {};
    case StrategyKind::zero1:
      return {.state = sharded};
    case StrategyKind::zero2:
      return {.gradients = sharded, .state = sharded};
    case StrategyKind::zero3:
      return {.values = sharded, .gradients = sharded, .state = sharded};
  }
  fail(Errc::invalid_argument, "no such strategy");
}

namespace {

void check_pairwise(const StrategyOptions& o) {
  require(o.pairwise_passes >= 0, Errc::invalid_argument, "pairwise_passes is ", o.pairwise_passes,
          "; at least 0");
  if (o.pairwise_passes == 0) return;
  require(
      o.precision.gradients == DType::f32 && o.wire == WireFormat{}, Errc::invalid_argument,
      "pairwise_passes: sums of gradients are in f32; set precision.gradients to f32, and no wire format");
  require(!o.communication_hook, Errc::invalid_argument,
          "pairwise_passes: a communication hook forms sums in its own order; remove one of them");
}

}  // namespace

MeshSizes mesh_of(const MeshSizes& sizes, const StrategyOptions& options) {
  const int block = options.zero_hpz_partition_size;
  if (block == 1) return sizes;
  const bool uncut = sizes.replicate == 1;
  require(uncut ? sizes.shard % block == 0 : sizes.shard == block, Errc::invalid_argument,
          "zero_hpz_partition_size is ", block, " on the mesh ", describe(sizes),
          uncut ? ": it must divide the size of shard" : ": it must be the size of shard");
  return uncut ? MeshSizes{sizes.shard / block, block, sizes.tp} : sizes;
}

MeshCoordinates divided_at(const MeshCoordinates& place, const StrategyOptions& options) {
  return options.zero_hpz_partition_size == 1 ? place : MeshCoordinates({0, 1}, place.data(), place.part);
}

StrategyOptions checked(StrategyOptions options, const ShardingPlan& plan) {
  require(options.zero_hpz_partition_size > 0, Errc::invalid_argument, "zero_hpz_partition_size is ",
          options.zero_hpz_partition_size, ", expected 1 or more");
  require(options.zero_hpz_partition_size == 1 || plan.values == Placement::sharded, Errc::invalid_argument,
          "zero_hpz_partition_size needs sharded values; choose zero3");
  check_pairwise(options);
  check(options.precision);
  check(options.wire);
  check(options.offload_optimizer, "offload_optimizer");
  check(options.offload_param, "offload_param");
  require(options.offload_optimizer.device == OffloadDevice::none || plan.state == Placement::sharded,
          Errc::invalid_argument,
          "offload_optimizer needs sharded optimizer state; choose zero1, zero2 or zero3");
  require(options.offload_param.device == OffloadDevice::none || plan.values == Placement::sharded,
          Errc::invalid_argument, "offload_param needs sharded values; choose zero3");
  return options;
}

}  // namespace rz
