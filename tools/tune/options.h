#pragma once
/// Command line of tune.

#include <string>
#include <vector>

#include "comm/collective.h"
#include "tools/command_line/command_line.h"

namespace rz::tune {

struct Options {
  std::string output = "tuning.txt";
  std::size_t min_bytes = 8, max_bytes = 8 << 20;  ///< bytes of the whole buffer
  int factor = 4;                                  ///< ratio of consecutive sizes
  int rounds = 5;                                  ///< measurements per candidate and size, interleaved
  double seconds = 40;                             ///< approximate duration of the measurement
  bool schedules = false;                          ///< intra-node: also measure schedules over the transport
  std::vector<Collective> collectives;             ///< empty: all that have alternatives

  std::vector<std::size_t> sizes() const;
};

using ParsedOptions = Parsed<Options>;

/// Errors are Errc::config, in one line.
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace rz::tune
