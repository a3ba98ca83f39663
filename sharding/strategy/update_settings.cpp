#include "sharding/strategy/update_settings.h"

#include <cmath>

#include "comm/core/error.h"

namespace rz {

void UpdateSettings::set_expected_terms(double terms) {
  require(terms > 0 && std::isfinite(terms), Errc::invalid_argument, "set_expected_terms(", terms,
          "): the number must be positive and finite");
  expected_terms_ = terms;
}

void UpdateSettings::set_loss_scale(double scale) {
  require(scale > 0 && std::isfinite(scale), Errc::invalid_argument, "set_loss_scale(", scale,
          "): the factor must be positive and finite");
  loss_scale_ = scale;
}

void UpdateSettings::set_policy(const Policy& policy) {
  require(policy.max_norm >= 0, Errc::invalid_argument, "clip_and_step(): max_norm is ", policy.max_norm,
          ", expected 0 (none) or more");
  policy_ = policy;
}

}  // namespace rz
