#pragma once
/// Kinds, options and settings of strategies.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include "../model/options.h"
#include "../optim/precision.h"
#include "../optim/unused_parameters.h"

namespace rz {

class CommunicationHook;
struct StepLimits;

/// ZeRO stages as in Rajbhandari et al., doi:10.1109/SC41405.2020.00024; ddp shards nothing.
enum class StrategyKind { ddp, zero1, zero2, zero3 };
/// "ddp", "zero1", "zero2", "zero3".
const char* name(StrategyKind);
/// Errc::config lists the valid names.
StrategyKind strategy_from_name(std::string_view);

/// Must be equal on all ranks: Errc::mismatch names the option and the rank that differs. Names and units are
/// those of DeepSpeed's "zero_optimization" where it has them. There is no round_robin_gradients: every
/// bucket consists of equal shards, so all ranks reduce and copy their gradients of a bucket at the same
/// time.
struct StrategyOptions {
  /// Elements that one call reduces at most, unless a single parameter has more. Buckets are cut so; in zero3
  /// the parameters of a scope are. Default: 25 MiB in f32; in zero2, which holds whole gradients of a
  /// bucket until it is reduced, at most an eighth of the elements of the model, but at least 2^16.
  std::optional<std::size_t> reduce_bucket_size;
  /// As above for the bucket that is reduced first, so that communication begins early. Not in zero3.
  std::size_t first_bucket_size = std::size_t{1} << 18;
  /// Elements that one call gathers at most, unless a single parameter has more; not in ddp. As updated
  /// values are gathered by the buckets that were reduced, the smaller of the two limits holds for both.
  std::size_t allgather_bucket_size = std::numeric_limits<std::size_t>::max();
  /// False: wait for each reduction where it starts, and for each gather of updated values, and do not
  /// prefetch. No more gradients are held than with overlap.
  bool overlap_comm = true;
  bool rebuild = true;  ///< ddp: rebucket by the order of gradient readiness in the first step
  Precision precision;
  GatherLimits gathers;  ///< zero3
  /// zero3: hpZ (Wang et al., ZeRO++, arXiv:2306.10209). Above 1: values, gradients and state are divided by
  /// all data ranks. Of the values that a pass has gathered, the ranks of a block of so many keep another
  /// copy until the update, divided between them, from which later passes gather: backward, and further
  /// micro-batches. These gathers stay within a block, e.g. a node; results have the same bits. The block is
  /// the dimension shard of the mesh, if its ranks are not all in one.
  int zero_hpz_partition_size = 1;
  WireFormat wire;  ///< of gradients
  /// ddp: forms the means of gradients, instead of `wire`; an own object for each strategy and rank. Null:
  /// none.
  std::shared_ptr<CommunicationHook> communication_hook;
  /// Elements of a tile of an update, rounded down to a multiple of 64, but at least 64. Results do not
  /// depend on it. It bounds the device memory of an update of offloaded memory: two tiles.
  std::size_t sub_group_size = 1'000'000'000;
  /// zero1 to zero3 on a CUDA device: optimizer state and masters lie in host memory. An update copies them
  /// tile by tile to the device and back, two tiles at a time. On the host all is there already.
  OffloadOptions offload_optimizer;
  /// zero3 on a CUDA device: the values of a rank, except for persistent ones, lie in host memory, and are
  /// copied to the device where they are gathered. On the host all is there already.
  OffloadOptions offload_param;
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
};

/// Whether anything is to be offloaded where there is a device.
inline bool offloads(const StrategyOptions& options) {
  return options.offload_optimizer.device == OffloadDevice::cpu ||
         options.offload_param.device == OffloadDevice::cpu;
}

/// Constants of the next updates: what losses are multiplied and gradients divided by, and the policy for
/// their norm. All must be equal on all ranks. Strategy::settings() returns it.
class UpdateSettings {
 public:
  /// Options of Strategy::clip_and_step().
  struct Policy {
    double max_norm = 0;         ///< as for Strategy::clip_gradients(); 0: no clipping
    bool skip_overflow = false;  ///< skip the update, on every rank alike, if norm or loss is not finite
  };

  /// Sets the number of terms that the losses of an update are expected to have, over all micro-batches and
  /// ranks; initially 1. The result does not depend on it, except for rounding and the range of 16-bit
  /// gradients. Errc::invalid_argument unless it is positive and finite.
  void set_expected_terms(double);
  /// Sets the factor by which losses are multiplied from now on: by Strategy::backward(), or by the caller of
  /// Tape::backward(). Gradients contain it until norms and updates divide it out. Errc::invalid_argument
  /// unless it is positive and finite.
  void set_loss_scale(double);
  /// The policy of the next replay of a graph that contains clip_and_step(), which sets it otherwise; call
  /// before next_update(). Errc::invalid_argument if max_norm is negative or NaN.
  void set_policy(const Policy&);

  /// Factor in the gradient of a sum over terms, which the mean over `ranks` makes a sum over expected terms.
  float loss_gradient(int ranks) const;
  /// What norms and updates read.
  StepLimits limits() const;

 private:
  double loss_scale_ = 1, expected_terms_ = 1;
  Policy policy_;
};

}  // namespace rz
