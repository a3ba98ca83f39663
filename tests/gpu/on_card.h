#pragma once
/// Ranks on cards.

#include <chrono>
#include <string>

#include "comm/device/cuda_runtime.h"
#include "comm/options.h"

namespace rz::test {

/// Of a rank with a card of its own if there are enough.
inline CommOptions on_card(int rank, const std::string& backend) {
  return {.device = {Device::cuda, rank % cuda::device_count()},
          .timeout = std::chrono::seconds(60),
          .backend = backend};
}
inline CommOptions on_a_card(int rank) { return on_card(rank, "peer_cuda"); }

}  // namespace rz::test
