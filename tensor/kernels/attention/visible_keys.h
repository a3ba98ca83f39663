#pragma once
/// Which keys a query attends to, on the host and on devices.

#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"

namespace rz::kernels {

/// The keys of query i are [begin(i), end(i)), if that is not empty. Neither end decreases with i.
struct VisibleKeys {
  std::size_t keys;  ///< those that exist, without padding
  bool causal;
  std::size_t past, window;  ///< window: at least 1
  /// The key at which the document of each query begins, not decreasing; null: all are of one document.
  const std::int32_t* document_starts = nullptr;

  RZ_HOST_DEVICE std::size_t begin(std::size_t query) const {
    const std::size_t first = causal && past + query >= window ? past + query + 1 - window : 0;
    if (!document_starts) return first;
    const std::size_t start = document_start(query);
    return start > first ? start : first;
  }
  RZ_HOST_DEVICE std::size_t end(std::size_t query) const {
    return causal && past + query + 1 < keys ? past + query + 1 : keys;
  }
  /// The queries, of `count`, that attend to a key of [first, past_last) are in [begin_query, end_query).
  RZ_HOST_DEVICE std::size_t begin_query(std::size_t first) const {
    return causal && first > past ? first - past : 0;
  }
  RZ_HOST_DEVICE std::size_t end_query(std::size_t first, std::size_t past_last, std::size_t count) const {
    std::size_t end = end_query_of_window(first, past_last, count);
    if (!document_starts) return end;
    for (std::size_t low = 0; low < end;) {
      const std::size_t middle = (low + end) / 2;
      if (document_start(middle) < past_last)
        low = middle + 1;
      else
        end = middle;
    }
    return end;
  }
  /// The same without regard to documents.
  RZ_HOST_DEVICE std::size_t end_query_of_window(std::size_t first, std::size_t past_last,
                                                 std::size_t count) const {
    if (first >= keys) return 0;
    if (!causal || window >= past + count) return count;
    const std::size_t position = past_last - 1 + window;  // of the first query after them
    const std::size_t end = position > past ? position - past : 0;
    return end < count ? end : count;
  }
  /// The query's document begins here. Values are not checked: a wrong one lets the query attend to its own
  /// position.
  RZ_HOST_DEVICE std::size_t document_start(std::size_t query) const {
    const std::int32_t start = document_starts[query];
    if (start < 0) return 0;
    return static_cast<std::size_t>(start) < past + query ? static_cast<std::size_t>(start) : past + query;
  }
  RZ_HOST_DEVICE bool same_document(std::size_t query, std::size_t key) const {
    return !document_starts || document_start(query) <= key;
  }
};

}  // namespace rz::kernels
