#pragma once
/// What rzrun is to do: hosts, program and output of a job, each chosen by a stage that the next ones cannot
/// change (flags.h).

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/net/authentication.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::rzrun {

/// The hosts of a job, as torchrun's flags describe them.
struct Rendezvous {
  int min_nodes = 1, max_nodes = 1;
  int node_rank = -1;  ///< of this host; -1: 0 if the endpoint is its address, else by arrival
  std::string host;    ///< the endpoint, where node 0 listens
  int port = 0;
  std::string local_address;    ///< of node 0: where it listens instead, and MASTER_ADDR; or empty
  std::string id = "none";      ///< --rdzv-id
  std::optional<bool> is_host;  ///< is_host of --rdzv-conf
  std::chrono::seconds join_timeout{600}, last_call{30};
};

/// What starts the agents of several hosts: ssh once a host, or mpirun or srun once for all.
struct Starter {
  enum class Kind { ssh, openmpi, slurm };
  Kind kind = Kind::ssh;
  std::string words;  ///< more words for ssh, mpirun or srun
  std::string rsh;    ///< a command instead of ssh
  int ssh_port = 0;   ///< 0: ssh's own
};

/// --nnodes: "2" or "2:4".
std::string nodes_text(int min_nodes, int max_nodes);
/// "rank 4", "ranks 4 to 7".
std::string ranks_text(int first, int count);

/// Names and values of environment variables.
using Variables = std::vector<std::pair<std::string, std::string>>;

/// Where the ranks run.
struct Hosts {
  int ranks = 0;                   ///< of all hosts; with a rendezvous those of this one
  std::vector<hosts::Host> nodes;  ///< where agents start the ranks; empty: this process does, on this host
  std::string devices;             ///< of this host alone: CUDA_VISIBLE_DEVICES; empty: as it is
  std::optional<Rendezvous> rendezvous;  ///< several hosts, at each of which rzrun is started
  Starter starter;
  std::string master_addr;  ///< empty: an address of the first host that the others have a route to
  int master_port = 0;      ///< 0: any free port

  bool are_several() const { return !nodes.empty() || rendezvous; }
};

/// What each rank runs.
struct Program {
  std::vector<std::string> command;  ///< the program and its arguments
  int local_rank_at = 0;             ///< where --local_rank=R is added to the command; 0: it is not
  Variables variables;               ///< of equal names the last
  std::string role = "default";      ///< ROLE_NAME
  bool bind = true;                  ///< bind each rank to its own cores
};

/// The streams, output and errors, that a log file or the console has of each rank of a host.
struct Streams {
  static constexpr int out = 1, err = 2, both = 3;  ///< torchrun's numbers; 0: none

  int of_all = 0;
  std::vector<std::pair<int, int>> of_rank;  ///< by local rank; if there are some, the others have none
  bool has(int local_rank, int stream) const;
  bool any() const;
};

/// Where the output of the ranks goes.
struct Output {
  bool prefix = false;       ///< print "[rank] " before every line
  std::string log_dir;       ///< one file per rank and stream; empty: no log files
  Streams files;             ///< what log files have instead of the console,
  Streams tees;              ///< and what both have;
  bool prefix_tees = false;  ///< the latter with "[rank] " before every line
  std::vector<int> shown;    ///< local ranks whose output the console has; empty: all

  bool to_file(int local_rank, int stream) const;
  bool to_console(int local_rank, int stream) const;
  bool has_prefix(int local_rank, int stream) const {
    return prefix || (prefix_tees && tees.has(local_rank, stream));
  }
};

/// What the command line says of a job.
struct JobSpec {
  Hosts hosts;
  Program program;
  Output output;
  std::string run_id;  ///< TORCHELASTIC_RUN_ID; empty: a random one
  int max_restarts = 0;
  std::chrono::milliseconds grace{30000};
};

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

/// Lines that the stages add to, and do not read.
struct Remarks {
  std::vector<std::string> notes;  ///< for standard error, at the start
  std::vector<std::string> plan;   ///< for --dry-run
};

struct Options {
  bool agent = false;  ///< runs the ranks of one host, for another rzrun; the rest is not used then
  bool dry_run = false;
  JobSpec job;
  Remarks remarks;
};

}  // namespace rz::rzrun
