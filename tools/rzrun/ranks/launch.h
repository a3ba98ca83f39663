#pragma once
/// Launch of one rank: its environment, core binding, process group, and output.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/net/authentication.h"
#include "tools/rzrun/flags/job.h"
#include "tools/rzrun/ranks/output.h"

namespace rz::rzrun {

/// The processors of each of the ranks of one host, or nothing if the ranks are not bound. Reads the
/// machine's topology, which may last long.
std::vector<std::vector<int>> bindings(const Program&, int local_ranks);

/// Makes the folder of the log files, without those of an earlier job: Errc::config if that fails.
void make_log_folder(const Job&);

/// A port that is free now.
int free_port();
std::string random_id();

/// Name and value of every variable set for a rank. OMP_NUM_THREADS is set only if this process does not have
/// it.
std::vector<std::pair<std::string, std::string>> rank_environment(const Job&, int local_rank);

struct ChildProcess {
  pid_t pid = -1;
  UniqueFd pidfd;     ///< readable when the process has ended
  UniqueFd out, err;  ///< read ends of its pipes; empty if it writes directly to the console or a file
  UniqueFd flight;    ///< what it records (comm/os/flight_recorder.h); may be empty
  UniqueFd out_log, err_log;  ///< log files for the data read from the pipes
};

/// `<log-dir>/rank<R>.<stream>`, and after K restarts `<log-dir>/restart<K>/rank<R>.<stream>`.
std::string log_path(const Output&, int restarts, int rank, const char* stream);

/// `rank<R>.error.json` in the folder of error files.
std::string error_path(const std::string& folder, int rank);

/// Starts the process as the leader of a new process group; the kernel kills it when this process ends.
/// Throws LaunchError.
ChildProcess launch(const Job&, int local_rank);

/// The program could not be started. rzrun then exits with 127 if it was not found, otherwise with 126.
struct LaunchError {
  int error;
};

}  // namespace rz::rzrun
