#pragma once
/// Which schedule a call takes, as a pure function of what is known on every rank; the built-in tuning table.

#include <cstddef>
#include <span>
#include <string>

#include "comm/tuning/tuning.h"

namespace rz {

struct SelectionQuery {
  Collective collective;
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
  bool intra_node = true;                    ///< all ranks share memory
  bool deterministic = true;                 ///< only algorithms that sum in rank order
  std::string override_name;                 ///< a name, or empty
  std::span<const TuningRule> file_rules{};  ///< lines that come before the built-in ones
  int nodes = 1;                 ///< of the group, if it has several; as many as ranks: none is shared
  bool contiguous_nodes = true;  ///< each host holds consecutive ranks
  bool rounds_partials = false;  ///< storing a partial sum may round it: sums of small floats
};

struct SelectedAlgorithm {
  const Algorithm* algorithm;
  std::size_t chunk = 0;             ///< bytes of a slice; 0: as the executor has it
  const TuningRule* rule = nullptr;  ///< that said so; null: the call is forced
};

/// Never fails for a collective of the library; Errc::config if the forced name does not exist, does not
/// serve this placement on hosts or, with `deterministic`, does not sum in rank order.
const Algorithm& select(const SelectionQuery&);
/// The same, with what else the rule says.
SelectedAlgorithm select_by_rule(const SelectionQuery&);
/// The lines of the built-in table, in order.
std::span<const TuningRule> built_in_rules();

}  // namespace rz
