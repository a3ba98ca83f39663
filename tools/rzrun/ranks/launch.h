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

/// What the ranks of one host need that are started at once.
struct Job {
  Program program;
  Output output;
  int ranks = 0;  ///< of all hosts
  int max_restarts = 0;
  std::chrono::milliseconds grace{30000};  ///< between SIGTERM and SIGKILL
  std::string run_id;                      ///< random; the same after a restart
  std::string launch;  ///< random; another one after a restart, so that ranks of both cannot connect
  int restarts = 0;
  net::Secret secret = net::Secret::random();  ///< of these ranks alone (comm/bootstrap/secret.h)
  int local_ranks = 0;                         ///< of this host
  int first_rank = 0;                          ///< of this host
  int node = 0, nodes = 1;                     ///< number of this host, and how many there are
  std::string host;                            ///< its name; empty if it is the only one
  std::string folder;                          ///< where the ranks start; empty: that of this process
  std::string error_folder;                    ///< absolute; empty: there are no error files
  std::vector<int> slots;                      ///< that a filter chose; empty: none did
  std::string devices;                         ///< CUDA_VISIBLE_DEVICES; empty: that is left as it is
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::vector<std::vector<int>> processors;  ///< of each local rank; empty: the ranks are not bound
};

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
