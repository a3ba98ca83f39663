#pragma once
/// --config_file, and the flags of `accelerate launch`, as far as rzrun has no flag of that name already.

#include <deque>
#include <string>

#include "tools/rzrun/accelerate/launch_file.h"
#include "tools/rzrun/flags/host_flags.h"
#include "tools/rzrun/flags/options.h"
#include "tools/rzrun/flags/torchrun_flags.h"

namespace rz::rzrun {

struct AccelerateFlags {
  std::string file;
  std::deque<std::string> values;  ///< by row of accelerate::keys(); a toggle is in `toggles`
  std::deque<bool> toggles;
  std::vector<int> devices;
};

void add_accelerate_flags(CommandLine&, AccelerateFlags&);

/// Before the other flags are applied: hands them what the file and Accelerate's flags give and the user did
/// not type by rzrun's own flags. Errors are Errc::config, and name file and line, or the flag.
void apply_accelerate_flags(const CommandLine&, AccelerateFlags&, Options&, TorchrunFlags&, HostFlags&);
/// Once the hosts are known: the devices of gpu_ids.
void apply_devices(const AccelerateFlags&, Options&);

}  // namespace rz::rzrun
