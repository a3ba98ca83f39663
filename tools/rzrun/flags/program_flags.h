#pragma once
/// The flags of rzrun about the program and its variables, and those of DeepSpeed's launcher that have a
/// counterpart.

#include <string>
#include <vector>

#include "tools/rzrun/flags/host_flags.h"
#include "tools/rzrun/flags/options.h"

namespace rz::rzrun {

struct ProgramFlags {
  bool module = false, no_python = false, local_rank = false, no_local_rank = false;
  bool bind_cores_to_rank = false, no_ssh_check = false;
  std::vector<std::string> variables;  ///< NAME or NAME=VALUE
  std::string launcher, launcher_args, each_rank_log;
};

void add_program_flags(CommandLine&, ProgramFlags&, HostFlags&);

/// Before apply_host_flags(): sets what DeepSpeed's flags stand for. Errors are Errc::config.
void apply_deepspeed_flags(const CommandLine&, const ProgramFlags&, Options&);

/// Puts the interpreter before a Python program, and reads the variables of files and of -x. Errors are
/// Errc::config.
void apply_program_flags(const ProgramFlags&, Options&);

}  // namespace rz::rzrun
