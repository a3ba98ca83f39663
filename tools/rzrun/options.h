#pragma once
/// The command line of rzrun.

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/command_line/command_line.h"
#include "tools/rzrun/hosts/hosts.h"
#include "tools/rzrun/joining.h"

namespace rz::rzrun {

struct Options {
  int ranks = 0;                     ///< of all hosts
  std::vector<std::string> command;  ///< the program and its arguments
  bool bind = true;                  ///< bind each rank to its own cores
  bool prefix = false;               ///< print "[rank] " before every line
  std::string log_dir;               ///< one file per rank and stream; empty: no log files
  bool tee = false;                  ///< write to log files and the console
  std::chrono::milliseconds grace{30000};
  int max_restarts = 0;
  int master_port = 0;      ///< 0: any free port
  std::string master_addr;  ///< empty: an address of the first host that the others have a route to

  std::vector<hosts::Host> nodes;  ///< several, or one that is not this host; empty: this host alone
  std::vector<int> devices;        ///< of this host alone: for CUDA_VISIBLE_DEVICES
  std::string run_id;              ///< TORCHELASTIC_RUN_ID; empty: a random one
  std::string role = "default";    ///< ROLE_NAME of the ranks
  std::optional<Rendezvous>
      rendezvous;   ///< several hosts, at each of which rzrun is started; `ranks` are those of this host
  std::string rsh;  ///< a command instead of ssh
  std::string launcher_args;  ///< more words for ssh
  int ssh_port = 0;           ///< 0: ssh's own
  bool dry_run = false;
  std::vector<std::pair<std::string, std::string>> variables;  ///< of the ranks; of equal names the last
  int local_rank_at = 0;           ///< where --local_rank=R is added to the command; 0: it is not
  std::vector<std::string> notes;  ///< lines for standard error, at the start
  std::vector<std::string> plan;   ///< lines for --dry-run
  bool agent = false;              ///< runs the ranks of one host, for another rzrun

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
