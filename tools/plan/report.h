#pragma once
/// Plans as text for people and as JSON for programs.

#include <string>
#include <vector>

#include "tools/plan/search.h"

namespace rz::plan {

/// All that the program prints.
struct Findings {
  std::string model;             ///< "GPT-2, 12 layers, …"
  std::vector<PlannedRun> runs;  ///< one for each number of ranks
  /// One for each number of ranks, as in `runs`.
  std::vector<std::vector<Alternative>> alternatives;
  std::vector<std::vector<MeshAlternative>> meshes;  ///< the same
  std::vector<std::int64_t> micro_batches;           ///< the largest that fit; empty without a limit
  std::optional<std::size_t> memory;                 ///< the limit
};

/// Whether every rank of every run fits; true without a limit.
bool fits(const Findings&);

std::string table(const Findings&);
std::string json(const Findings&);

}  // namespace rz::plan
