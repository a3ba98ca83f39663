#pragma once
/// Means or sums of gradients over the ranks, in a wire format.

#include <optional>

#include "comm/core/types.h"
#include "sharding/model/runtime.h"

namespace rz {

/// How gradients travel between ranks: they are scaled, rounded to `dtype`, summed over the ranks, widened
/// and scaled again; the result is their mean. Sums of 16-bit types are accumulated in f32 and rounded once.
/// Must be equal on all ranks. Names and arithmetic are those of DeepSpeed, which also rounds each factor's
/// product to `dtype`.
struct WireFormat {
  /// "communication_data_type", and PyTorch's fp16 and bf16 compression hooks: f32, bf16 or f16. Empty: that
  /// of the gradients.
  std::optional<DType> communication_data_type;
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
