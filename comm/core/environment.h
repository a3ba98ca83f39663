#pragma once
/// All environment variables that the libraries read. Those of Environment are read once, at the first call
/// of environment(); explicit options override them. The others are read by environment_variable(). An
/// invalid value is Errc::config, which names the variable, as is a name that is nearly one of them, such as
/// RZ_TIMEOUT. Tests hold these tables to the lists of environment.cpp.
///
/// | of a job | value | set by |
/// |---|---|---|
/// | RZ_LAUNCH | text that no other job has, the same for all its ranks (comm/bootstrap.h) | rzrun |
/// | RZ_SECRET | text of at least 32 characters that the ranks of several hosts share | user |
/// | RZ_SECRET_FILE | file that has it; without one ringzero/secret in XDG_CONFIG_HOME or ~/.config | user |
/// | HOME, XDG_CONFIG_HOME | where that file is | system |
/// | RZ_SECRET_FD | descriptor that has it (comm/bootstrap/secret.h) | rzrun |
/// | RZ_INSECURE | 1: no secret, and every process that reaches a port is let in | user |
/// | MASTER_ADDR, MASTER_PORT | where rank 0's store listens; Open MPI needs neither | launcher |
/// | XDG_RUNTIME_DIR, TMPDIR | where ranks of one node meet, if the launcher names no address | system |
/// | RZ_AGENT | HOST:PORT of the rzrun that an agent (rzrun --agent) connects to | rzrun |
/// | RZ_CONFIG | a DeepSpeed configuration, or its path, for engines without one | rzrun --config_file |
/// | RZ_FLIGHT_FD | descriptor in which a rank records what it does (comm/os/flight_recorder.h) | rzrun |
/// | TORCHELASTIC_ERROR_FILE | file in which a rank that fails writes its error | rzrun, torchrun |
/// | OMP_NUM_THREADS | threads of a rank; rzrun and spawn() set 1 for several ranks if it is absent | user |
/// | SLURM_JOB_END_TIME | end of the allocation, before which an engine saves | srun |
///
/// Of a launcher, for launch_info_from_environment(). Of several names ("or") the first that is set counts:
///
/// | launcher | rank | size | local rank | local size |
/// |---|---|---|---|---|
/// | torchrun | RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE or LOCAL_SIZE |
/// | openmpi | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK
///   | OMPI_COMM_WORLD_LOCAL_SIZE |
/// | pmix | PMIX_RANK | PMIX_SIZE or PRTE_COMM_WORLD_SIZE or SLURM_NTASKS
///   | PMIX_LOCAL_RANK or PRTE_COMM_WORLD_LOCAL_RANK or SLURM_LOCALID
///   | PMIX_LOCAL_SIZE or PRTE_COMM_WORLD_LOCAL_SIZE or SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE or
///     SLURM_NTASKS_PER_NODE |
/// | pals | PALS_RANKID | PMI_SIZE or PALS_SIZE | PALS_LOCAL_RANKID or PMI_LOCAL_RANK
///   | PMI_LOCAL_SIZE or PALS_LOCAL_SIZE |
/// | mpich | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID or PMI_LOCAL_RANK | MPI_LOCALNRANKS or PMI_LOCAL_SIZE |
/// | mvapich | MV2_COMM_WORLD_RANK or MVP_COMM_WORLD_RANK | MV2_COMM_WORLD_SIZE or MVP_COMM_WORLD_SIZE
///   | MV2_COMM_WORLD_LOCAL_RANK or MVP_COMM_WORLD_LOCAL_RANK
///   | MV2_COMM_WORLD_LOCAL_SIZE or MVP_COMM_WORLD_LOCAL_SIZE |
/// | jsrun | JSM_NAMESPACE_RANK | JSM_NAMESPACE_SIZE | JSM_NAMESPACE_LOCAL_RANK | JSM_NAMESPACE_LOCAL_SIZE |
/// | horovodrun | HOROVOD_RANK | HOROVOD_SIZE | HOROVOD_LOCAL_RANK | HOROVOD_LOCAL_SIZE |
/// | flux | FLUX_TASK_RANK | FLUX_JOB_SIZE | FLUX_TASK_LOCAL_ID | |
/// | slurm | SLURM_PROCID | SLURM_NTASKS or SLURM_NPROCS | SLURM_LOCALID
///   | SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE |
///
/// | launcher | job, nodes and rank 0's place |
/// |---|---|
/// | torchrun | TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_USE_AGENT_STORE |
/// | openmpi | OMPI_MCA_orte_hnp_uri |
/// | pmix | PMIX_NAMESPACE; the first of PMIX_SERVER_URI41, PMIX_SERVER_URI4, PMIX_SERVER_URI3,
///   PMIX_SERVER_URI21, PMIX_SERVER_URI2, PMIX_SERVER_URI |
/// | pals | PALS_APID |
/// | horovodrun | HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT |
/// | flux | FLUX_JOB_NNODES, FLUX_JOB_ID, FLUX_URI |
/// | slurm | SLURM_NODEID, SLURM_JOB_ID, SLURM_HET_JOB_ID, SLURM_STEP_ID, SLURM_RESTART_COUNT,
///   SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST, SLURM_DISTRIBUTION, SLURM_HOSTFILE |
/// | refused | ALPS_APP_PE, MP_CHILD, MPIRUN_RANK, PMI_ID |

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace rz {

/// TCP ports, both included; 0, 0: the system chooses.
struct PortRange {
  int first = 0, last = 0;
  /// The port after `i` others, of those from `start` on and then from the first one.
  int at(int start, int i) const { return first + (start + i) % size(); }
  int size() const { return last - first + 1; }
};

struct Environment {
  /// RZ_BACKEND: "auto" (default), "native" (over shared memory and TCP), "mpi", "nccl" or "peer_cuda".
  /// "auto" is "native" on host memory; on devices it is the first of "nccl", "peer_cuda" and "native" that
  /// all ranks can use.
  std::string backend = "auto";
  /// RZ_TRANSPORT: "auto" (default: shared memory within a node, TCP between nodes), "shm" or "tcp".
  std::string transport = "auto";
  /// RZ_INTERFACE: TCP network interface, by name, address, or leading parts of the address ("10.1").
  /// Default: the one that routes to rank 0.
  std::string interface;
  /// RZ_SOCKETS: TCP sockets between two nodes, 1 to 16; default 2. They are divided among the ranks of a
  /// node; each link has at least one.
  int sockets = 2;
  /// RZ_PORTS: FIRST-LAST: the TCP ports at which ranks, stores and rzrun listen where no port is given, for
  /// a firewall. A rank needs one port for each communicator, and each host one more. Default: any that is
  /// free.
  PortRange ports;
  /// RZ_CONGESTION: congestion control of the TCP sockets between ranks: a name such as "reno", or "system"
  /// (default), which leaves the system's setting.
  std::string congestion = "system";
  /// RZ_ENCRYPTION: connections that are encrypted (TLS 1.3 with the job's secret): "on" (default): those
  /// between hosts; "off": none; "always": those of TCP within a host, too. The same on all ranks. Without a
  /// secret (RZ_INSECURE=1) there is none.
  std::string encryption = "on";
  /// RZ_ALGORITHM: forces the algorithm of all_reduce ("ring") or of any collective
  /// ("all_reduce=ring,broadcast=tree"). Default: the tuning table.
  std::string algorithm;
  /// RZ_TUNING: file with a tuning table, as written by `tune`. Default: the built-in table. Rank 0's
  /// applies.
  std::string tuning;
  /// RZ_DETERMINISTIC: 1 (default): reduce in the order of RZ_REDUCTION_ORDER; 0: in any.
  bool deterministic = true;
  /// RZ_REDUCTION_ORDER: "rank" (default) or "pairwise".
  ReductionOrder reduction_order = ReductionOrder::rank;
  /// RZ_ALLOW_TF32: 1: f32 matrix products on CUDA devices may round their operands to TF32 (10-bit
  /// mantissa), which is several times faster; 0 (default): full f32.
  bool allow_tf32 = false;
  /// RZ_THREAD_PLACEMENT: 1 (default): a compute thread that shares a processor with its caller is moved to
  /// another one that it may use (comm/os/thread_team.h); 0: never.
  bool thread_placement = true;
  /// RZ_TIMEOUT_S: deadline of an operation in seconds; default 600.
  double timeout_s = 600;
  /// RZ_DETECTION_S: seconds without a sign of life after which a rank is lost: stopped, frozen with its
  /// control group, or on a host that has vanished; default 10. One that works is not, nor one that a
  /// debugger has stopped. 0: never.
  double detection_s = 10;
  /// RZ_WAIT_REPORT_S: seconds without progress after which a call's wait is printed to standard error, as
  /// one line (CommOptions::on_wait); default: none is, but by programs of run_entrypoint() after 10 s.
  double wait_report_s = 0;
  /// RZ_CRASH_STACK: 1 (default): a program of run_entrypoint() that crashes under rzrun records its stack;
  /// 0: it leaves signals alone.
  bool crash_stack = true;
  /// RZ_FLIGHT: folder in which each rank writes its last calls, as PyTorch's flight recorder does, when a
  /// communicator fails, and at SIGUSR1 in programs of run_entrypoint() (comm/flight_dump.h). Default: none.
  std::string flight;
  /// RZ_RENDEZVOUS_TIMEOUT_S: deadline of the rendezvous in seconds; default 30.
  double rendezvous_timeout_s = 30;
  /// RZ_HOST_ID: identifier of the node. Default: the kernel's boot id and the host name. Tests set it to
  /// simulate several nodes on one machine.
  std::string host_id;
  /// NCCL_HOSTID: NCCL's identifier of the node. Ranks that share a GPU need different values.
  std::string nccl_host_id;
  /// NCCL_MULTI_RANK_GPU_ENABLE (NCCL 2.30.3 and newer): 1 allows ranks to share a GPU.
  bool nccl_shares_gpus = false;

  /// Reads the process environment now. Errc::config names a malformed or misspelt variable.
  static Environment read();
};

/// The environment at the first call. Thread-safe.
const Environment& environment();

/// The value of a variable now. Errc::invalid_argument if its name is not in the table.
std::optional<std::string> environment_variable(const std::string& name);
/// The names of those that a report may show: the others identify a job, or lead to it.
std::vector<std::string_view> reportable_variables();

}  // namespace rz
