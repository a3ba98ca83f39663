#pragma once
/// Limits of an update in device memory, where updates in a graph read them.

#include <optional>

#include "comm/device/stream.h"
#include "tensor/kernels/scalar/step_outcome.h"
#include "tensor/tensor.h"

namespace rz {

/// What an update on a device reads.
struct UpdateWords {
  StepLimits limits;
  float loss_gradient = 1;  ///< factor of Tape::backward()
  bool operator==(const UpdateWords&) const = default;
};

class DeviceLimits {
 public:
  /// Writes the words, unless they are there, in the order of the stream. Errc::invalid_argument if they
  /// would change while the stream is captured: the graph would always write the same ones.
  void write(const UpdateWords&, const Stream&);
  /// Valid after write().
  const StepLimits* limits() const;
  /// A scalar in f32. Valid after write().
  Tensor loss_gradient() const;

 private:
  Tensor memory_;
  std::optional<UpdateWords> written_;
};

}  // namespace rz
