#pragma once
/// Keys of "ringzero" about DistributedDataParallel.

#include <cstdint>

namespace rz {

/// The section "ringzero.comm_state_option": names and defaults are those of PyTorch's PowerSGDState.
struct CommStateOption {
  int matrix_approximation_rank = 1;
  std::int64_t start_power_sgd_iter = 1000;  ///< start_powerSGD_iter
  double min_compression_rate = 2;
  bool use_error_feedback = true, warm_start = true;
  std::uint64_t random_seed = 0;
  bool operator==(const CommStateOption&) const = default;
};

/// The section "ringzero.join": arguments of PyTorch's DistributedDataParallel.join().
struct JoinConfig {
  bool enable = true, divide_by_initial_world_size = true, throw_on_early_termination = false;
  bool operator==(const JoinConfig&) const = default;
};

/// Names are those of PyTorch's DistributedDataParallel, and of DistributedDataParallelKwargs in Hugging
/// Face's Accelerate.
struct DdpConfig {
  bool find_unused_parameters = true;  ///< absent: zero_optimization.ignore_unused_parameters
  bool static_graph = false;
  bool broadcast_buffers = true;
  enum class CommHook { no, fp16, bf16, power_sgd, batched_power_sgd };
  CommHook comm_hook = CommHook::no;
  CommStateOption comm_state_option;  ///< of the two PowerSGD hooks
  JoinConfig join;
  bool operator==(const DdpConfig&) const = default;
};
/// "no", "fp16", "bf16", "power_sgd", "batched_power_sgd".
const char* name(DdpConfig::CommHook);

}  // namespace rz
