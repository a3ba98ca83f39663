#pragma once
/// Means or sums of gradients over the ranks, in a wire format.

#include <optional>

#include "comm/core/types.h"
#include "sharding/model/options.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Stores call start functions in the order of the buckets, and finish() later. Not thread-safe.
class GradientWire {
 public:
  /// A reduction in flight.
  struct Reduction {
    Work work;
    Tensor sum;  ///< as it arrives; undefined if the result is in place
  };

  /// `result`: avg, or sum, which needs a default format. The runtime must outlive the wire.
  GradientWire(const WireFormat&, ReduceOp result, Runtime&);

  /// Of whole gradients, in place.
  Reduction all_reduce(const Tensor& in_out, const Stream&);
  /// Of this rank's shard of `in`, which may be overwritten. `out` may be that shard.
  Reduction reduce_scatter(const Tensor& in, const Tensor& out, const Stream&);
  /// Waits for the reduction and writes the result to `out`, which was passed when it started. Call it once.
  void finish(Reduction&, const Tensor& out, const Stream&);

 private:
  bool is_plain(DType gradients) const;
  Tensor encoded(const Tensor& gradients, const Stream&);
  ReduceOp op() const;

  WireFormat format_;
  ReduceOp result_;
  Runtime& runtime_;
  float before_ = 1, after_ = 1;  // factors
};

}  // namespace rz
