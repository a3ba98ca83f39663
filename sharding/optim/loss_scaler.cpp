#include "sharding/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "comm/core/error.h"

namespace rz {

LossScaler::LossScaler(const LossScaleOptions& o)
    : options_(o),
      scale_(o.fixed > 0 ? o.fixed : std::ldexp(1.0, o.initial_power)),
      hysteresis_left_(o.hysteresis) {}

void LossScaler::update(bool overflow) {
  const std::int64_t now = updates_++;
  if (options_.fixed > 0) return;
  if (overflow) {
    if (--hysteresis_left_ <= 0) {
      hysteresis_left_ = 1;
      require(scale_ > options_.minimum, Errc::unsupported, "update ", now,
              ": gradients overflow f16 although the loss scale is ", scale_,
              ", its minimum (fp16.min_loss_scale); lower the learning rate, or train in bf16");
      scale_ = std::max(scale_ / 2, options_.minimum);
    }
    last_overflow_ = now;
    return;
  }
  if (options_.consecutive_hysteresis) hysteresis_left_ = options_.hysteresis;
  const std::int64_t since = now - last_overflow_ - 1;
  if (since == 0 || since % options_.window != 0) return;
  hysteresis_left_ = options_.hysteresis;
  scale_ *= 2;
}

}  // namespace rz
