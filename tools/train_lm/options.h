#pragma once
/// The command line of train_lm.

#include <string>

#include "sharding/lm/options.h"
#include "tools/command_line/command_line.h"

namespace rz::train_lm {

/// Of the run, and of the program alone.
struct Options : lm::Options {
  std::string track;  ///< command that receives the course of the run; empty: none
  std::string device = "host";
  std::string backend;  ///< empty: from RZ_BACKEND
  bool plan = false;    ///< compare memory with the plan of the run
};

using ParsedOptions = Parsed<Options>;  ///< `help` also holds the output of --version

/// Errors are Errc::config, one line that names the flag, with the nearest known one for an unknown flag.
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace rz::train_lm
