#pragma once
/// Starting one rank: its environment, its cores, its process group, its output.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/options.h"
#include "tools/rzrun/output.h"

namespace rz::rzrun {

/// What all ranks of a job share.
struct Job {
  Options options;
  int master_port;
  std::string run_id;  ///< random: tells this launch from every other
};

/// A port on 127.0.0.1 that nobody listens on now.
int free_port();
std::string random_id();

/// Name and value of every variable that rank `rank` gets. OMP_NUM_THREADS only if this process has none.
std::vector<std::pair<std::string, std::string>> rank_environment(const Job&, int rank);

struct ChildProcess {
  pid_t pid = -1;
  UniqueFd pidfd;     ///< readable when the process has ended
  UniqueFd out, err;  ///< read ends of its pipes; empty where it writes to the console or a file itself
  UniqueFd out_log, err_log;  ///< for what comes through the pipes
};

/// `<log-dir>/rank<R>.<stream>`.
std::string log_path(const Options&, int rank, const char* stream);

/// The process leads a group of its own and dies with this one. Throws LaunchError.
ChildProcess launch(const Job&, int rank);

/// The program could not be started: the exit status is 127 where it was not found, else 126.
struct LaunchError {
  int error;
};

}  // namespace rz::rzrun
