#pragma once
/// Update rules. An Optimizer knows hyperparameters and how many updates were made; the memory of its state
/// (momenta) belongs to the strategy, which keeps it only for the elements that this rank updates.

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

/// A run of elements that are updated alike. Gradients are means over the ranks, before clipping.
struct UpdateSpan {
  float* value = nullptr;
  const void* gradient = nullptr;
  std::array<float*, 2> state{};  ///< the first state_count() are set; zero before the first update
  std::size_t count = 0;  ///< a multiple of 64: the zeros between parameters are updated too, and stay zero
  bool decay = true;      ///< whether weight decay applies
  DType gradient_dtype = DType::f32;  ///< on the host f32 alone
  void* working = nullptr;            ///< on a device: a copy of the values in 16 bits, written too
  DType working_dtype = DType::bf16;
};

/// How gradients enter an update.
struct UpdateScale {
  float factor = 1;  ///< they are multiplied by it
  const StepOutcome* device_outcome =
      nullptr;                      ///< in device memory: its factor instead, and whether to leave it out
  const void* constants = nullptr;  ///< in device memory: what constants() gave, instead of what is now
  std::int64_t missed = 0;          ///< earlier updates that left these elements out
};

/// The seam for update rules. Element-wise: the result for an element does not depend on how elements are cut
/// into spans, so that every strategy makes the same bits. One thread at a time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  virtual const char* name() const = 0;  ///< "sgd", "adam", "adamw"
  /// The name and every option, with all digits: ranks that differ in it make other updates.
  virtual std::string describe() const = 0;
  /// f32 values of state an element.
  virtual int state_count() const = 0;
  /// Spans of update number updates() - missed, with gradient · factor for the gradient. They lie on the
  /// stream's device, where all of them are one launch. State that would be subnormal becomes 0.
  virtual void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const = 0;
  /// What differs between this update and another one, as a device reads it, of elements that so many earlier
  /// updates left out: for updates in a graph.
  virtual std::vector<std::byte> constants(std::int64_t missed) const = 0;

  /// Counts an update; the strategy calls it once before the spans of a step.
  void begin_update() { ++updates_; }
  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t n) { updates_ = n; }  ///< when training is resumed

  double learning_rate() const { return learning_rate_; }
  void set_learning_rate(double rate) { learning_rate_ = rate; }

 protected:
  explicit Optimizer(double learning_rate) : learning_rate_(learning_rate) {}

 private:
  double learning_rate_;
  std::int64_t updates_ = 0;
};

/// g += weight_decay · p; m = momentum · m + g; p -= lr · m (nesterov: lr · (g + momentum · m)), as
/// torch.optim.SGD with no dampening. No state without momentum.
struct SgdOptions {
  double learning_rate = 1e-3, momentum = 0, weight_decay = 0;
  bool nesterov = false;
};
/// Kingma and Ba, arXiv:1412.6980, with PyTorch's placement of epsilon: p -= lr / (1 - beta1^t) · m /
/// (sqrt(v) / sqrt(1 - beta2^t) + epsilon).
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
