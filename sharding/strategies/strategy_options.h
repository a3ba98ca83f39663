#pragma once
/// Kinds and options of strategies.

#include <cstddef>
#include <string_view>

#include "comm/bucket_scheduler.h"
#include "comm/communicator.h"
#include "sharding/layout/sharding_plan.h"
#include "sharding/optim/precision.h"
#include "sharding/optim/unused_parameters.h"
#include "sharding/stores/gather_limits.h"

namespace rz {

/// ZeRO stages as in Rajbhandari et al., doi:10.1109/SC41405.2020.00024; ddp shards nothing.
enum class StrategyKind { ddp, zero1, zero2, zero3 };
/// "ddp", "zero1", "zero2", "zero3".
const char* name(StrategyKind);
/// Errc::config lists the valid names.
StrategyKind strategy_from_name(std::string_view);
/// zero1 shards optimizer state, zero2 gradients too, zero3 values too.
ShardingPlan plan_of(StrategyKind);

/// Must be equal on all ranks: Errc::mismatch names the option and the rank that differs.
struct StrategyOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;  ///< cap of the bucket that is reduced first
  std::size_t bucket_bytes = std::size_t{25} << 20;  ///< cap of the others; zero3 reduces by scope instead
  bool overlap = true;  ///< false: wait for each reduction where it starts, and do not prefetch
  bool rebuild = true;  ///< ddp: rebucket by the order of gradient readiness in the first step
  Precision precision;
  GatherLimits gathers;  ///< zero3
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;
};

/// The options. Errc::invalid_argument for a precision that does not exist.
StrategyOptions checked(StrategyOptions);
/// Sizes and alignment of buckets.
BucketOptions bucket_options(const StrategyOptions&, const Communicator&);

}  // namespace rz
