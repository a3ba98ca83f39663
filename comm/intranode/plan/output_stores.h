#pragma once
/// How a call stores its results: by which kernel, and past the caches or not. A plain value.

#include <cstddef>
#include <span>

#include "comm/reduce/reduce.h"

namespace rz::intranode {

struct OutputStores {
  static constexpr std::size_t block_bytes = 8 << 10;  ///< fits L1: several passes over the same bytes

  /// Reduces the operands into `to`, and into `too` unless that is null, through the caches.
  void reduce_block(void* to, void* too, std::span<const void* const> operands, std::size_t bytes) const {
    if (bytes) kernel(to, too, operands, bytes / element_bytes, divide);
  }
  /// Reduces the operands into `to`, and into `too`, from where peers read it, unless that is null. Advances
  /// the operands if stores are non-temporal.
  void reduce(std::byte* to, std::byte* too, std::span<const void*> operands, std::size_t bytes) const;
  /// Copies `bytes`, which may be 0, unless both are the same memory.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

  ReduceKernel kernel = nullptr;  ///< of collectives that reduce
  std::size_t element_bytes = 1;
  int divide = 1;
  bool nontemporal = false;  ///< results are stored past the caches
};

}  // namespace rz::intranode
