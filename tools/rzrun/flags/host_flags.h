#pragma once
/// The flags of rzrun that name hosts and their slots, with DeepSpeed's names and grammar.

#include <optional>
#include <string>

#include "tools/rzrun/flags/options.h"

namespace rz::rzrun {

struct HostFlags {
  std::string hostfile, include, exclude;
  int num_nodes = 0, num_gpus = 0;
  bool force_multi = false;                    ///< an agent also for this host alone
  std::string default_file = "/job/hostfile";  ///< DeepSpeed's, in place of `hostfile` if it is there
};

void add_host_flags(CommandLine&, Options&, HostFlags&);

/// Sets the hosts, the number of ranks, and the devices. -n N, if it was given, are the first N slots.
/// Errors are Errc::config.
void apply_host_flags(const CommandLine&, const HostFlags&, Options&);

/// What would run where, as --dry-run prints it. `node`: the lines about this host, if rzrun is started on
/// each.
std::string describe_plan(const Options&, const std::string& node);

}  // namespace rz::rzrun
