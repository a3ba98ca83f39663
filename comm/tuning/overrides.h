#pragma once
/// Algorithms that the caller forces by name: CommOptions::algorithm, RZ_ALGORITHM. Immutable, so thread
/// safe.

#include <array>
#include <string>

#include "comm/collective.h"
#include "comm/core/types.h"

namespace rz::tuning {

class AlgorithmOverrides {
 public:
  AlgorithmOverrides() = default;
  /// Parses one name, for all_reduce, or a list "all_reduce=ring,broadcast=tree". Names are those of tuning
  /// rules for the scopes intra_node and inter_node; within a node also "zero_copy" and "single_copy".
  /// Errc::config, with the valid names, for others and, with `deterministic`, for algorithms that do not
  /// reduce in that order.
  AlgorithmOverrides(const std::string& text, bool deterministic, ReductionOrder = ReductionOrder::rank);

  /// The forced name; empty: none.
  const std::string& of(Collective c) const { return names_[static_cast<std::size_t>(c)]; }
  /// The same without the prefix "schedule:", for groups without the intra-node engine.
  std::string schedule_of(Collective) const;
  /// Whether a name is forced that only the intra-node engine has.
  bool is_of_a_node(Collective) const;

 private:
  std::array<std::string, collective_count> names_;
};

}  // namespace rz::tuning
