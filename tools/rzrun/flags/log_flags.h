#pragma once
/// Where the output of the ranks goes: --log-dir, --tee and --prefix, and torchrun's --redirects, --tee WHAT
/// and --local-ranks-filter.

#include <string>
#include <vector>

#include "tools/rzrun/flags/options.h"
#include "tools/rzrun/flags/torchrun_flags.h"

namespace rz::rzrun {

struct LogFlags {
  std::string redirects, filter;
  bool tee = false;    ///< --tee of rzrun, which has no value
  std::string tee_of;  ///< torchrun's --tee WHAT; take_tee() sets it
};

void add_log_flags(CommandLine&, Options&, LogFlags&);

/// The words without the values of torchrun's `--tee WHAT`, since --tee of rzrun has none. WHAT begins with a
/// digit: "3", or "0:1,1:2" for local ranks 0 and 1.
std::vector<std::string> take_tee(const CommandLine&, std::vector<std::string> words, LogFlags&);

/// Takes them, once the ranks of all hosts are known. Errors are Errc::config.
void apply_log_flags(const CommandLine&, const TorchrunFlags&, const LogFlags&, Options&);

/// "0", "1", "2" or "3" for all ranks, or "0:1,1:3" for local ranks 0 and 1, below `ranks`. `where`: "--tee",
/// for messages.
Streams parse_streams(const std::string& text, const std::string& where, int ranks);

}  // namespace rz::rzrun
