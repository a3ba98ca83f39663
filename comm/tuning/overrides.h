#pragma once
/// Algorithms that the caller forces by name: CommOptions::algorithm, RZ_ALGORITHM.

#include <array>
#include <string>

#include "comm/collective.h"

namespace rz {

class AlgorithmOverrides {
 public:
  AlgorithmOverrides() = default;
  /// One name, which is all_reduce's, or "all_reduce=ring,broadcast=tree": as lines of the tuning table for
  /// the place one_host or network name them, on one host "direct" and "single_copy" too. Errc::config lists
  /// what a collective has; with `deterministic`, it refuses what does not sum in rank order.
  AlgorithmOverrides(const std::string& text, bool deterministic);

  /// Empty: not forced.
  const std::string& of(Collective c) const { return names_[static_cast<std::size_t>(c)]; }
  /// The same where ranks do not meet in shared memory: "streams:" goes without saying.
  std::string schedule_of(Collective) const;

 private:
  std::array<std::string, collective_count> names_;
};

}  // namespace rz
