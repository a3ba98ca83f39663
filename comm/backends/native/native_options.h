#pragma once
/// How the native backend performs its calls.

#include <chrono>
#include <string>

#include "comm/tuning/tuning.h"

namespace rz {

struct NativeOptions {
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its submission
  bool deterministic = true;
  std::string algorithm;  ///< that are forced (comm/tuning/overrides.h)
  Tuning tuning;          ///< that comes before the built-in one; the same on every rank
};

}  // namespace rz
