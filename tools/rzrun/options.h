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
  bool bind = true;                  ///< bind each rank to its own cores
  bool prefix = false;               ///< print "[rank] " before every line
  std::string log_dir;               ///< one file per rank and stream; empty: no log files
  bool tee = false;                  ///< write to log files and the console
  std::chrono::milliseconds grace{30000};
  int max_restarts = 0;
  int master_port = 0;  ///< 0: any free port

  bool to_console() const { return log_dir.empty() || tee; }
};

using ParsedOptions = Parsed<Options>;

/// Errors are Errc::config, in one line.
ParsedOptions parse_options(int argc, const char* const* argv);

/// Starts the ranks, forwards their output, terminates all of them when one fails or a signal arrives, starts
/// them again as the options allow, and returns the exit status of rzrun. No process started by a rank
/// survives, and none of a group lives when the next group starts. Diagnostics go to standard error. Blocks
/// signals in the calling process; call it once, from a single-threaded process.
int supervise(const Options&);

}  // namespace rz::rzrun
