#pragma once
/// Which keys a query attends to, on the host and on devices.

#include <cstddef>

#include "comm/core/math.h"

namespace rz::kernels {

/// The keys of query i are [begin(i), end(i)), if that is not empty. Neither end decreases with i.
struct VisibleKeys {
  std::size_t keys;  ///< those that exist, without padding
  bool causal;
  std::size_t past, window;  ///< window: at least 1

  RZ_HOST_DEVICE std::size_t begin(std::size_t query) const {
    return causal && past + query >= window ? past + query + 1 - window : 0;
  }
  RZ_HOST_DEVICE std::size_t end(std::size_t query) const {
    return causal && past + query + 1 < keys ? past + query + 1 : keys;
  }
  /// The queries, of `count`, that attend to a key of [first, past_last) are in [begin_query, end_query).
  RZ_HOST_DEVICE std::size_t begin_query(std::size_t first) const {
    return causal && first > past ? first - past : 0;
  }
  RZ_HOST_DEVICE std::size_t end_query(std::size_t first, std::size_t past_last, std::size_t count) const {
    if (first >= keys) return 0;
    if (!causal || window >= past + count) return count;
    const std::size_t position = past_last - 1 + window;  // of the first query after them
    const std::size_t end = position > past ? position - past : 0;
    return end < count ? end : count;
  }
};

}  // namespace rz::kernels
