#pragma once
/// Kinds and options of strategies, and of the parts of a sharded model.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include "../../comm/core/types.h"

namespace rz {

class CommunicationHook;

/// Dtypes of a model in training.
///
/// If `parameters` is not f32 this is mixed precision (Micikevicius et al., arXiv:1710.03740): parameters,
/// activations and communicated data have 16 bits, and each rank keeps f32 values, the masters, of the
/// elements that it updates. On the host, products of bf16 are fast where the CPU has AMX-BF16 or AVX512-BF16
/// (gemm_16bit.h of tensor/kernels/linear_algebra); other products convert to f32, at about the speed of f32.
struct Precision {
  DType parameters = DType::f32;  ///< f32, bf16 or f16
  DType gradients = DType::f32;   ///< dtype of accumulation and reduction: that of the parameters, or f32

  /// True if the model has 16-bit parameters.
  bool mixed() const { return parameters != DType::f32; }
  bool operator==(const Precision&) const = default;
};

// ---- gathering of sharded values

/// Limits of the gathering, in elements with padding. Names and units are those of the keys `stage3_*` of
/// DeepSpeed's "zero_optimization". Must be equal on all ranks. A unit is what one call gathers: parameters
/// of the same scopes. The unit that a scope needs is gathered whatever the limits. The defaults hold the
/// least memory that overlaps gathers with computation; those of a configuration are deepspeed_gather_limits.
struct GatherLimits {
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  /// Units are gathered before their use while those that wait for their use hold fewer elements; 0: none. A
  /// value of 1 therefore prefetches one unit.
  std::size_t prefetch_bucket_size = 1;
  /// Gathered elements, without persistent ones, beyond which no unit is prefetched or kept for another use.
  std::size_t max_live_parameters = none;
  /// A unit that is used again before this many elements of other uses stays gathered.
  std::size_t max_reuse_distance = 0;
  /// Parameters of up to this many elements are persistent: every rank holds their values whole. Their
  /// gradients, masters and optimizer state stay sharded, as in DeepSpeed.
  std::size_t param_persistence_threshold = 0;
  /// Elements, without padding, of all persistent parameters. A parameter that exceeds the rest is not
  /// persistent; trainable parameters come first, then frozen ones, in the order of Module::parameters().
  std::size_t model_persistence_threshold = none;

  bool operator==(const GatherLimits&) const = default;
};

/// The defaults of DeepSpeed.
inline constexpr GatherLimits deepspeed_gather_limits{.prefetch_bucket_size = 50'000'000,
                                                      .max_live_parameters = 1'000'000'000,
                                                      .max_reuse_distance = 1'000'000'000,
                                                      .param_persistence_threshold = 100'000,
                                                      .model_persistence_threshold = INT64_MAX};

// ---- what lies in host memory

enum class OffloadDevice { none, cpu };
/// "none", "cpu".
const char* name(OffloadDevice);

/// Must be equal on all ranks. Names are those of DeepSpeed's "offload_optimizer" and "offload_param".
struct OffloadOptions {
  OffloadDevice device = OffloadDevice::none;
  /// Copies from and to pinned memory overlap with computation, and may be captured in a graph. Others may
  /// not: the host waits for each of them.
  bool pin_memory = true;
  /// Share of the optimizer state, from 0 to 1. Whole buckets are offloaded, in the order of reduction, until
  /// they hold at least this share. Not of parameters.
  double ratio = 1;
  bool operator==(const OffloadOptions&) const = default;
};

/// Errc::invalid_argument if the ratio is out of range; `key` names the options.
void check(const OffloadOptions&, const char* key);

// ---- sums of gradients

/// How gradients travel between ranks: they are scaled, rounded to `dtype`, summed over the ranks, widened
/// and scaled again; the result is their mean. Sums of 16-bit types are accumulated in f32 and rounded once.
/// Must be equal on all ranks. Names and arithmetic are those of DeepSpeed, which also rounds each factor's
/// product to `dtype`.
struct WireFormat {
  /// "communication_data_type", and PyTorch's fp16 and bf16 compression hooks: f32, bf16 or f16. Empty: that
  /// of the gradients.
  std::optional<DType> communication_data_type{};
  /// Multiplies by 1 / ranks before the sum, and not after it. f16 then overflows less, and loses more small
  /// values.
  bool prescale_gradients = false;
  /// Multiplies by 1 / factor before the sum and by factor / ranks after it. No effect with
  /// prescale_gradients.
  double gradient_predivide_factor = 1;

  bool operator==(const WireFormat&) const = default;
};

/// Errc::invalid_argument unless the type is f32, bf16 or f16, and the factor positive and finite.
void check(const WireFormat&);

/// Names as in PyTorch's PowerSGDState.
struct PowerSgdOptions {
  int matrix_approximation_rank = 1;
  /// Reduced passes before compression begins; at least 2, since buckets are rebuilt after the first update.
  std::int64_t start_iter = 1000;
  /// Adds what compression has lost to the next gradients; keeps as much memory as the compressed gradients.
  bool use_error_feedback = true;
  /// Starts from the last factor; otherwise from a new random one each time.
  bool warm_start = true;
  /// A parameter is compressed if its gradient has more than this many times the elements of its factors.
  double min_compression_rate = 2;
  std::uint64_t random_seed = 0;
  bool operator==(const PowerSgdOptions&) const = default;
};

// ---- a strategy

/// ZeRO stages as in Rajbhandari et al., doi:10.1109/SC41405.2020.00024; ddp shards nothing.
enum class StrategyKind { ddp, zero1, zero2, zero3 };
/// "ddp", "zero1", "zero2", "zero3".
const char* name(StrategyKind);
/// Errc::config lists the valid names.
StrategyKind strategy_from_name(std::string_view);

/// What an update does with a parameter that was used on no rank. Named after the framework that does so.
enum class UnusedParameterPolicy {
  pytorch,   ///< the update skips it: no weight decay, no momentum, and its first update is still to come
  deepspeed  ///< it is updated with a zero gradient: weight decay and momentum apply
};
/// "pytorch", "deepspeed".
const char* name(UnusedParameterPolicy);
/// Errc::config lists the valid names.
UnusedParameterPolicy unused_parameter_policy_from_name(std::string_view);

/// Must be equal on all ranks: Errc::mismatch names the option and the rank that differs. Names and units are
/// those of DeepSpeed's "zero_optimization" where it has them. There is no round_robin_gradients: every
/// bucket consists of equal shards, so all ranks reduce and copy their gradients of a bucket at the same
/// time.
struct StrategyOptions {
  /// Elements that one call reduces at most, unless a single parameter has more. Buckets are cut so; in zero3
  /// the parameters of a scope are. Default: 25 MiB in f32; in zero2, which holds whole gradients of a
  /// bucket until it is reduced, at most an eighth of the elements of the model, but at least 2^16.
  std::optional<std::size_t> reduce_bucket_size{};
  /// As above for the bucket that is reduced first, so that communication begins early; at most
  /// reduce_bucket_size. Not in zero3.
  std::size_t first_bucket_size = std::size_t{1} << 18;
  /// Elements that one call gathers at most, unless a single parameter has more; not in ddp. As updated
  /// values are gathered by the buckets that were reduced, the smaller of the two limits holds for both.
  std::size_t allgather_bucket_size = std::numeric_limits<std::size_t>::max();
  /// False: wait for each reduction where it starts, and for each gather of updated values, and do not
  /// prefetch. No more gradients are held than with overlap.
  bool overlap_comm = true;
  bool rebuild = true;  ///< ddp: rebucket by the order of gradient readiness in the first step
  Precision precision{};
  GatherLimits gathers{};  ///< zero3
  /// zero3: hpZ (Wang et al., ZeRO++, arXiv:2306.10209). Above 1: values, gradients and state are divided by
  /// all data ranks. Of the values that a pass has gathered, the ranks of a block of so many keep another
  /// copy until the update, divided between them, from which later passes gather: backward, and further
  /// micro-batches. These gathers stay within a block, e.g. a node; results have the same bits. The block is
  /// the dimension shard of the mesh, if its ranks are not all in one.
  int zero_hpz_partition_size = 1;
  WireFormat wire{};  ///< of gradients
  /// ddp: forms the means of gradients, instead of `wire`; an own object for each strategy and rank. Null:
  /// none.
  std::shared_ptr<CommunicationHook> communication_hook{};
  /// Elements of a tile of an update, rounded down to a multiple of 64, but at least 64. Results do not
  /// depend on it. It bounds the device memory of an update of offloaded memory: two tiles.
  std::size_t sub_group_size = 1'000'000'000;
  /// zero1 to zero3 on a CUDA device: optimizer state and masters lie in host memory. An update copies them
  /// tile by tile to the device and back, two tiles at a time. On the host all is there already.
  OffloadOptions offload_optimizer{};
  /// zero3 on a CUDA device: the values of a rank, except for persistent ones, lie in host memory, and are
  /// copied to the device where they are gathered. On the host all is there already.
  OffloadOptions offload_param{};
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;
  /// False: a parameter of which a rank has computed no gradient since zero_grad() is an error of
  /// finish_gradients(), with its name and ranks. Frozen parameters are not unused. PyTorch's default is
  /// false; DeepSpeed's, as ignore_unused_parameters, is true. Neither costs anything here.
  bool find_unused_parameters = true;
  /// The graph of a rank is that of its first update: which gradients it computes, and in which order. A
  /// later difference is an error of finish_gradients(). ddp then does not reduce gradients that no rank
  /// computes, unless they share a bucket with others (rebuild).
  bool static_graph = false;
  /// Buffers of the module (running means) are those of rank 0 in every forward pass that trains: they are
  /// broadcast before its first scope. A module without buffers costs nothing. False: each rank has its own.
  bool broadcast_buffers = true;
  /// Above 0: an update has so many passes on each rank, of which the last one synchronises, and gradients
  /// are their sums over passes and ranks in pairwise order (ReductionOrder), which the communicator must
  /// have. With a power of two of ranks, and passes that together are the same, gradients have the same bits
  /// for any number of ranks. They are not divided by the number of ranks: backward() divides by the expected
  /// terms, and the caller of Tape::backward() by what he wants. This needs log2(passes) copies of whole
  /// gradients, in every strategy, and gradients in f32 without a wire format or hook. 0: passes add up in
  /// their order.
  std::int64_t pairwise_passes = 0;

  bool operator==(const StrategyOptions&) const = default;
};

/// Calls archive(name, option) for every option, with the name of its key where there is one (without
/// "stage3_"). The third argument, if any, is what an empty option stands for.
template <class Archive>
void fields(Archive& a, const StrategyOptions& o) {
  a("reduce_bucket_size", o.reduce_bucket_size, "default");
  a("first_bucket_size", o.first_bucket_size);
  a("allgather_bucket_size", o.allgather_bucket_size);
  a("overlap_comm", o.overlap_comm);
  a("rebuild", o.rebuild);
  a("precision.parameters", o.precision.parameters);
  a("precision.gradients", o.precision.gradients);
  a("zero_hpz_partition_size", o.zero_hpz_partition_size);
  a("sub_group_size", o.sub_group_size);
  a("unused_parameters", o.unused_parameters);
  a("find_unused_parameters", o.find_unused_parameters);
  a("static_graph", o.static_graph);
  a("broadcast_buffers", o.broadcast_buffers);
  a("pairwise_passes", o.pairwise_passes);
  a("offload_optimizer.device", o.offload_optimizer.device);
  a("offload_optimizer.pin_memory", o.offload_optimizer.pin_memory);
  a("offload_optimizer.ratio", o.offload_optimizer.ratio);
  a("offload_param.device", o.offload_param.device);
  a("offload_param.pin_memory", o.offload_param.pin_memory);
  a("offload_param.ratio", o.offload_param.ratio);
  a("prefetch_bucket_size", o.gathers.prefetch_bucket_size);
  a("max_live_parameters", o.gathers.max_live_parameters);
  a("max_reuse_distance", o.gathers.max_reuse_distance);
  a("param_persistence_threshold", o.gathers.param_persistence_threshold);
  a("model_persistence_threshold", o.gathers.model_persistence_threshold);
  a("communication_data_type", o.wire.communication_data_type, "that of gradients");
  a("prescale_gradients", o.wire.prescale_gradients);
  a("gradient_predivide_factor", o.wire.gradient_predivide_factor);
  a("communication_hook", o.communication_hook, "none");
}

/// Whether anything is to be offloaded where there is a device.
inline bool offloads(const StrategyOptions& options) {
  return options.offload_optimizer.device == OffloadDevice::cpu ||
         options.offload_param.device == OffloadDevice::cpu;
}

}  // namespace rz
