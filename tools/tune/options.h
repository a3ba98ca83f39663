#pragma once
/// tune's command line.

#include <string>
#include <vector>

#include "comm/collective.h"
#include "tools/command_line/command_line.h"

namespace rz::tune {

struct Options {
  std::string output = "tuning.txt";
  std::size_t min_bytes = 8, max_bytes = 8 << 20;  ///< bytes of the whole buffer
  int factor = 4;                                  ///< from a size to the next
  int rounds = 5;                                  ///< of all that compete at one size, in turn
  double seconds = 40;                             ///< of measuring, about
  bool schedules = false;                          ///< on one host, over streams too
  std::vector<Collective> collectives;             ///< empty: all that have a choice

  std::vector<std::size_t> sizes() const;
};

using ParsedOptions = Parsed<Options>;

/// Errc::config, one line, for whatever is wrong.
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace rz::tune
