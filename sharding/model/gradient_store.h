#pragma once
/// The memory that holds gradients, and the wire format in which they are reduced over the ranks.

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/core/types.h"
#include "comm/work.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/options.h"
#include "sharding/model/runtime.h"
#include "tensor/tensor.h"

namespace rz {

/// Means or sums of gradients over the ranks, in a wire format. Stores call start functions in the order of
/// the buckets, and finish() later, in the same order. Not thread-safe.
///
/// With several copies of the model a shard is reduced in two steps: over the ranks of a copy, and then over
/// the copies. All ranks start the second steps in the order of the first ones.
class GradientWire {
 public:
  /// A reduction in flight.
  struct Reduction {
    Work work;
    Tensor sum;   ///< as it arrives; undefined if the result is in place
    Tensor part;  ///< what the copies add up once `work` has ended; undefined: nothing
  };

  /// `result`: avg, or sum, which needs a default format. The runtime must outlive the wire. Without
  /// `overlap`, start functions wait for all steps but the last.
  GradientWire(const WireFormat&, ReduceOp result, bool overlap, Runtime&);

  /// Sums whole gradients, in place, over all data ranks at once.
  Reduction all_reduce(const Tensor& in_out, const Stream&);
  /// Sums this rank's shard of `in`, which may be overwritten. `out` may be that shard. The reduction stays
  /// where it is until it is finished.
  void reduce_scatter(Reduction&, const Tensor& in, const Tensor& out, const Stream&);
  /// Starts the second steps of the reductions whose first ones have ended. `wait`: of all, as those end.
  void advance(const Stream&, bool wait = false);
  /// Starts the second step of this one and of those before it, as their first ones end.
  void enter_second_step(const Reduction&, const Stream&);
  /// Waits for the reduction and writes the result to `out`, which was passed when it started. Call it once.
  void finish(Reduction&, const Tensor& out, const Stream&);
  /// Reductions that are not finished have failed, and are dropped.
  void restart() { in_first_.clear(); }

 private:
  bool is_plain(DType gradients) const;
  Tensor encoded(const Tensor& gradients, const Stream&);
  ReduceOp op() const;
  void start_second_step(Reduction&, const Stream&);

  WireFormat format_;
  ReduceOp result_;
  bool overlap_;
  Runtime& runtime_;
  float before_ = 1, after_ = 1;      // factors
  std::vector<Reduction*> in_first_;  // whose second step has not started
};

/// Defines Parameter::grad while backward writes it, and holds the means over the ranks. Not thread-safe.
class GradientStore {
 public:
  virtual ~GradientStore() = default;

  /// Defines Parameter::grad of the members of a bucket. Called before one is written or reduced.
  virtual void provide(int bucket, const Stream&) = 0;
  /// Starts the mean over the ranks. The gradients of the bucket are complete, and its padding is zero.
  virtual Work reduce(int bucket, const Stream&) = 0;
  /// Waits for all reductions that were started. Afterwards the means are added to those that were kept.
  virtual void settle(const Stream&) {}
  /// Prepares another pass after settle(), and keeps the means.
  virtual void reopen(const Stream&) {}
  /// Drops gradients and means, and reductions that have failed.
  virtual void forget() {}

  /// The means of FlatLayout::updated() of a bucket; valid after settle().
  virtual const Tensor& mean(int bucket) const = 0;
  /// The gradients of this rank; defined between provide() and the start of the reduction.
  virtual const Tensor& whole(int bucket) const = 0;
  /// Bytes kept between passes.
  virtual std::size_t bytes() const = 0;
};

/// The store of a plan. `hook` forms the means of whole gradients instead of the wire, unless it is null. All
/// references must outlive the store.
std::unique_ptr<GradientStore> make_gradient_store(const ShardingPlan&, const ModelParameters&,
                                                   const FlatLayout&, DType, GradientWire&,
                                                   CommunicationHook* hook, Runtime&);

}  // namespace rz
