#include "sharding/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/core/error.h"

namespace rz {

namespace {

void require_in_range(const LossScaleOptions& o) {
  require(std::isfinite(o.fixed) && o.fixed >= 0, Errc::invalid_argument, "loss scale: fixed = ", o.fixed,
          " must be finite and not negative; 0 is dynamic");
  require(o.window >= 1 && o.hysteresis >= 1 && o.growth_interval >= 1, Errc::invalid_argument,
          "loss scale: window = ", o.window, ", hysteresis = ", o.hysteresis,
          " and growth_interval = ", o.growth_interval, " must be at least 1");
  require(std::isfinite(o.minimum) && o.minimum > 0, Errc::invalid_argument,
          "loss scale: minimum = ", o.minimum, " must be positive");
  require(o.growth > 1 && o.backoff > 0 && o.backoff < 1, Errc::invalid_argument,
          "loss scale: growth = ", o.growth, " must be above 1, and backoff = ", o.backoff, " in (0, 1)");
}

}  // namespace

LossScaler::LossScaler(const LossScaleOptions& o) : options_(o) {
  require_in_range(o);
  state_.scale = o.fixed > 0 ? o.fixed : std::ldexp(1.0, o.initial_power);
  state_.hysteresis_left = o.hysteresis;
}

void LossScaler::update(bool overflow) {
  state_.skipped += overflow;
  if (options_.fixed == 0) {
    if (options_.rule == LossScaleRule::grad_scaler)
      update_as_grad_scaler(overflow);
    else
      overflow ? overflow_as_deepspeed() : grow_as_deepspeed();
  }
  ++state_.updates;
}

void LossScaler::overflow_as_deepspeed() {
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
  } else {
    require(state_.scale != options_.minimum, Errc::diverged, "update ", state_.updates,
            ": gradients overflow f16 although the loss scale is ", state_.scale,
            ", its minimum (fp16.min_loss_scale); lower the learning rate, or train in bf16");
    state_.scale = std::max(state_.scale / 2, options_.minimum);
  }
  state_.last_overflow = state_.updates;
}

void LossScaler::grow_as_deepspeed() {
  if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
  const std::int64_t since = state_.updates - state_.last_overflow - 1;
  if (since == 0 || since % options_.window != 0) return;
  state_.hysteresis_left = options_.hysteresis;
  state_.scale *= 2;
}

void LossScaler::update_as_grad_scaler(bool overflow) {
  if (overflow) {
    state_.scale *= options_.backoff;
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker == options_.growth_interval) {
    const double larger = state_.scale * options_.growth;
    // GradScaler keeps its factor in f32, and leaves it where growth would make it infinite.
    if (larger <= std::numeric_limits<float>::max()) state_.scale = larger;
    state_.growth_tracker = 0;
  }
}

}  // namespace rz
