#pragma once
/// The command line of plan.

#include <cstddef>
#include <optional>
#include <vector>

#include "comm/core/types.h"
#include "sharding/lm/options.h"
#include "tools/command_line/command_line.h"

namespace rz::plan {

struct Options {
  lm::Options run;            ///< of the run that is planned
  std::vector<int> ranks{1};  ///< numbers of ranks, as given
  int ranks_per_node = 0;     ///< 0: all are on one node
  Device::Kind device = Device::host;
  std::optional<std::size_t> memory;  ///< bytes that a rank may hold
  bool json = false;
};

using ParsedOptions = Parsed<Options>;

/// Errors are Errc::config, one line that names the flag.
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace rz::plan
