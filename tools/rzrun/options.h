#pragma once
/// The command line of rzrun.

#include <chrono>
#include <string>
#include <vector>

#include "tools/command_line/command_line.h"

namespace rz::rzrun {

struct Options {
  int ranks = 0;
  std::vector<std::string> command;  ///< the program and its arguments
  bool bind = true;                  ///< each rank to cores of its own
  bool prefix = false;               ///< "[rank] " before every line
  std::string log_dir;               ///< one file a rank and stream; empty: none
  bool tee = false;                  ///< log files and the console
  std::chrono::milliseconds grace{5000};
  int master_port = 0;  ///< 0: a free one

  bool to_console() const { return log_dir.empty() || tee; }
};

using ParsedOptions = Parsed<Options>;

/// Errc::config, one line, for whatever is wrong.
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace rz::rzrun
