#pragma once
/// torchrun's flags, with its names and meaning. Each may also be a variable: PET_NNODES for --nnodes. A PET_
/// variable of no flag is named in a line.

#include <map>
#include <string>
#include <vector>

#include "tools/rzrun/accelerate/launch_file.h"
#include "tools/rzrun/flags/options.h"

namespace rz::rzrun {

struct TorchrunFlags {
  std::string nnodes, node_rank, nproc, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, local_addr;
  std::string monitor_interval, start_method;
  bool standalone = false;
  std::map<std::string, accelerate::Setting> of_file;  ///< by flag: what was not typed, but is in a file
};

void add_torchrun_flags(CommandLine&, Options&, TorchrunFlags&);

/// The value of a flag, of a file in its place, or of its variable, which counts if the command line does not
/// choose ranks and hosts itself.
accelerate::Setting torchrun_setting(const CommandLine&, const TorchrunFlags&, const std::string& flag,
                                     const std::string& value);

/// The same of a flag without a value: whether it is typed, or its variable is true.
bool torchrun_switch(const CommandLine&, const TorchrunFlags&, const std::string& flag, bool is_typed);

/// Sets the number of ranks, and Options::rendezvous if rzrun is started on several hosts. Errors are
/// Errc::config, and name the flag or the variable.
void apply_torchrun_flags(const CommandLine&, TorchrunFlags, Options&);

// Parts of it, for tests. `where`: "--nnodes", for messages.

/// "2" or "2:4".
std::pair<int, int> parse_nnodes(const std::string& text, const std::string& where);
/// A number, "cpu" (processors), "gpu" (devices) or "auto" (devices if there are any, else processors).
int parse_nproc(const std::string& text, const std::string& where, int devices, int processors);
/// "join_timeout=900,last_call_timeout=10,is_host=1". Keys of torchrun that rzrun does not need change
/// nothing; unknown ones are errors.
void parse_rdzv_conf(const std::string& text, const std::string& where, Rendezvous&);

}  // namespace rz::rzrun
