#pragma once
/// Launch of one rank: its environment, core binding, process group, and output.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/options.h"
#include "tools/rzrun/output.h"

namespace rz::rzrun {

/// Settings shared by all ranks that are started at once.
struct Job {
  Options options;
  std::vector<std::vector<int>> processors;  ///< of each rank; empty: the ranks are not bound
  int master_port;
  std::string run_id;  ///< random; the same after a restart
  std::string launch;  ///< random; another one after a restart, so that ranks of both cannot connect
  int restarts = 0;
  UniqueFd secret;  ///< of the job's ranks alone; another one after a restart (comm/bootstrap/secret.h)
};

/// The processors of each rank, or nothing if the ranks are not bound. Reads the machine's topology, which
/// may last long.
std::vector<std::vector<int>> bindings(const Options&);

/// The job at its start, or after that many restarts. Makes the folder of the log files: Errc::config if that
/// fails.
Job new_job(const Options&, std::vector<std::vector<int>> processors, const std::string& run_id,
            int restarts);

/// A port on 127.0.0.1 that is free now.
int free_port();
std::string random_id();

/// Name and value of every variable set for rank `rank`. OMP_NUM_THREADS is set only if this process does not
/// have it.
std::vector<std::pair<std::string, std::string>> rank_environment(const Job&, int rank);

struct ChildProcess {
  pid_t pid = -1;
  UniqueFd pidfd;     ///< readable when the process has ended
  UniqueFd out, err;  ///< read ends of its pipes; empty if it writes directly to the console or a file
  UniqueFd out_log, err_log;  ///< log files for the data read from the pipes
};

/// `<log-dir>/rank<R>.<stream>`, and after K restarts `<log-dir>/restart<K>/rank<R>.<stream>`.
std::string log_path(const Options&, int restarts, int rank, const char* stream);

/// Starts the process as the leader of a new process group; the kernel kills it when this process ends.
/// Throws LaunchError.
ChildProcess launch(const Job&, int rank);

/// The program could not be started. rzrun then exits with 127 if it was not found, otherwise with 126.
struct LaunchError {
  int error;
};

}  // namespace rz::rzrun
