#pragma once
/// Error of a training run that has diverged.

#include "comm/core/error.h"

namespace rz {

/// A loss, a norm or a weight is not finite. Thrown by every rank alike.
class Diverged : public Error {
 public:
  explicit Diverged(const std::string& what) : Error(Errc::unsupported, what) {}
};

}  // namespace rz
