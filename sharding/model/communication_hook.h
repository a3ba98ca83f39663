#pragma once
/// Interface of communication hooks: other ways to form the mean of whole gradients (Li et al.,
/// doi:10.14778/3415478.3415530).

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "sharding/model/runtime.h"

namespace rz {

/// The gradients of a bucket, and where each parameter's lie.
struct HookBucket {
  struct Part {
    int member;          ///< number of the parameter, the same in every layout
    std::size_t offset;  ///< elements
    Shape shape;
  };
  int index;         ///< buckets start in the order 0, 1, …
  Tensor gradients;  ///< with padding between parts, which is zero
  std::vector<Part> parts;
};

/// One object per strategy and rank, used by the thread of that rank. Every rank makes the same calls in the
/// same order, so that hooks may communicate. State must not depend on the index of a bucket: buckets change
/// after the first update.
class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;
  /// With its options, which must be equal on all ranks: "powersgd, rank 4, …".
  virtual std::string describe() const = 0;
  /// Errc::unsupported, with the reason, if gradients of this type and device are not supported.
  virtual void require_supported(DType, Device) const = 0;
  /// Whether a call may be captured in a graph and replayed: every call does the same, with the same memory.
  virtual bool capturable() const { return true; }
  /// Starts to form the means of a bucket while backward goes on.
  virtual Work start(const HookBucket&, Runtime&, const Stream&) = 0;
  /// Waits for what was started last. Either starts more and returns true, or returns false, and the
  /// gradients of the bucket are means.
  virtual bool advance(const HookBucket&, Runtime&, const Stream&) = 0;
  /// Ranks have left an update at different places: what a hook keeps, and what it has started, is dropped.
  /// It goes on as a new one.
  virtual void restart() {}
};

// ---- under the names of PyTorch's default hooks

/// The mean of gradients that are divided by the number of ranks and rounded to 16 bits: as with
/// communication_data_type and prescale_gradients, which every strategy has.
std::shared_ptr<CommunicationHook> make_fp16_compress_hook();
std::shared_ptr<CommunicationHook> make_bf16_compress_hook();

}  // namespace rz
