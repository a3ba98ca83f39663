#pragma once
/// One index of ops::local_indices(), for both compilers.

#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"
#include "tensor/ops.h"

namespace rz::ops {

RZ_HOST_DEVICE inline std::int32_t local_index(std::int32_t index, std::size_t first, std::size_t count,
                                               std::size_t total) {
  if (index < 0 || static_cast<std::size_t>(index) >= total) return index;
  const auto at = static_cast<std::size_t>(index);
  return at >= first && at - first < count ? static_cast<std::int32_t>(at - first) : elsewhere;
}

}  // namespace rz::ops
