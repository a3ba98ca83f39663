#pragma once
/// What ends a run that no longer computes anything of use.

#include "comm/core/error.h"

namespace rz::train_gpt {

/// A loss, a norm or a weight is not finite. The same on every rank, thrown by each.
class Diverged : public Error {
 public:
  explicit Diverged(const std::string& what) : Error(Errc::unsupported, what) {}
};

}  // namespace rz::train_gpt
