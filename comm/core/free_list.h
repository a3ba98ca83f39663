#pragma once
/// The free ranges of one block of memory, as offsets: adjacent ranges are merged. Touches no memory.

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace rz {

/// Not thread-safe.
class FreeList {
 public:
  /// All of [0, bytes) is free.
  explicit FreeList(std::size_t bytes) : bytes_(bytes), free_{{0, bytes}} {}

  /// Takes the begin of the smallest free range that is large enough and returns its offset; nullopt: there
  /// is none. `bytes` is not 0. Offsets are multiples of every number that all sizes are multiples of.
  std::optional<std::size_t> acquire(std::size_t bytes) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    if (best == free_.end()) return std::nullopt;
    const auto [offset, size] = *best;
    free_.erase(best);
    if (size > bytes) free_.emplace(offset + bytes, size - bytes);
    return offset;
  }

  /// Frees a range that acquire() returned.
  void release(std::size_t offset, std::size_t bytes) {
    auto it = free_.emplace(offset, bytes).first;
    if (const auto next = std::next(it); next != free_.end() && offset + bytes == next->first)
      it->second += next->second, free_.erase(next);
    if (it == free_.begin()) return;
    if (const auto previous = std::prev(it); previous->first + previous->second == offset)
      previous->second += it->second, free_.erase(it);
  }

  bool all_free() const { return free_.size() == 1 && free_.begin()->second == bytes_; }

 private:
  std::size_t bytes_;
  std::map<std::size_t, std::size_t> free_;  // size by offset
};

}  // namespace rz
