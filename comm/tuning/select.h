#pragma once
/// Selection of the schedule of a call, as a pure function of values that are the same on every rank; the
/// built-in tuning table of schedules. Thread safe.

#include <cstddef>
#include <span>
#include <string>

#include "comm/tuning/tuning.h"

namespace rz::tuning {

struct SelectionQuery {
  Collective collective;
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
  bool intra_node = true;              ///< all ranks share memory
  bool deterministic = true;           ///< only algorithms that reduce in `order`
  std::string override_name;           ///< name of a forced schedule, or empty
  std::span<const Rule> file_rules{};  ///< rules before the built-in ones
  int nodes = 1;                       ///< of the group; `size`: one rank on each
  bool contiguous_nodes = true;        ///< each node has consecutive ranks
  bool rounds_partials = false;        ///< sums of 8- or 16-bit floats: storing a partial sum rounds it
  ReductionOrder order = ReductionOrder::rank;
};

struct SelectedAlgorithm {
  const schedule::Algorithm* algorithm;
  std::size_t slice = 0;       ///< bytes; 0: default_slice_bytes
  const Rule* rule = nullptr;  ///< the rule that matched; null: forced
};

/// The algorithm of a collective; every one of the library has one. Errc::config if the forced name does not
/// exist, requires contiguous nodes that the group does not have or, with `deterministic`, does not reduce in
/// `order`.
const schedule::Algorithm& select(const SelectionQuery&);
/// The same, with size of a slice and rule.
SelectedAlgorithm select_by_rule(const SelectionQuery&);
/// The rules of the built-in table, in order.
std::span<const Rule> built_in_rules();

}  // namespace rz::tuning
