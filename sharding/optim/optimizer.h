#pragma once
/// Update rules. An Optimizer holds the hyperparameters and the number of updates. The strategy owns the
/// optimizer state (moments), for the elements that this rank updates only.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "tensor/kernels/step_outcome.h"

namespace rz {

/// A run of elements with equal update settings. Gradients are means over the ranks, before clipping.
struct UpdateSpan {
  float* value = nullptr;
  const void* gradient = nullptr;
  std::array<float*, 2> state{};  ///< the first state_count() pointers are set; zeros before the first update
  /// A multiple of 64; zero padding between parameters is updated too, and stays zero.
  std::size_t count = 0;
  bool decay = true;                  ///< whether weight decay applies
  DType gradient_dtype = DType::f32;  ///< on the host f32 only
  void* working = nullptr;            ///< on a device: 16-bit copy of the values, updated too
  DType working_dtype = DType::bf16;
};

/// How an update reads its gradients.
struct UpdateScale {
  float factor = 1;  ///< multiplies the gradients
  /// In device memory: replaces factor, and may skip the update.
  const StepOutcome* device_outcome = nullptr;
  /// In device memory: a result of constants(), replaces the current settings.
  const void* constants = nullptr;
  std::int64_t missed = 0;  ///< earlier updates that skipped these elements
};

/// Interface of update rules. Element-wise: the result for an element does not depend on how elements are
/// split into spans, so all strategies produce the same bits. Not thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  virtual const char* name() const = 0;  ///< "sgd", "adam", "adamw"
  /// The name and all options, with all digits. Ranks with different descriptions would make different
  /// updates.
  virtual std::string describe() const = 0;
  /// Number of f32 state values per element.
  virtual int state_count() const = 0;
  /// Applies update number updates() - missed to the spans, with gradient · factor as the gradient. The spans
  /// are on the device of the stream, where all of them are one kernel launch. State that would be subnormal
  /// becomes 0.
  virtual void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const = 0;
  /// The constants that differ from one update to the next, in the layout read by the device, for elements
  /// that missed `missed` earlier updates. Used by updates in a graph.
  virtual std::vector<std::byte> constants(std::int64_t missed) const = 0;

  /// Counts an update; the strategy calls it once before update().
  void begin_update() { ++updates_; }
  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t n) { updates_ = n; }  ///< for resumed training

  double learning_rate() const { return learning_rate_; }
  void set_learning_rate(double rate) { learning_rate_ = rate; }

 protected:
  explicit Optimizer(double learning_rate) : learning_rate_(learning_rate) {}

 private:
  double learning_rate_;
  std::int64_t updates_ = 0;
};

/// g += weight_decay · p; m = momentum · m + g; p -= lr · m (nesterov: lr · (g + momentum · m)), as
/// torch.optim.SGD with dampening 0. No state if momentum is 0.
struct SgdOptions {
  double learning_rate = 1e-3, momentum = 0, weight_decay = 0;
  bool nesterov = false;
};
/// Kingma and Ba, arXiv:1412.6980, with the epsilon of PyTorch: p -= lr / (1 - beta1^t) · m / (sqrt(v) /
/// sqrt(1 - beta2^t) + epsilon).
struct AdamOptions {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
};

/// Errc::invalid_argument names the option that is out of range.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions&);
/// Weight decay is added to the gradient (L2).
std::unique_ptr<Optimizer> make_adam(const AdamOptions&);
/// Weight decay is decoupled: p *= 1 - lr · weight_decay first (Loshchilov and Hutter, arXiv:1711.05101).
std::unique_ptr<Optimizer> make_adamw(const AdamOptions&);

}  // namespace rz
