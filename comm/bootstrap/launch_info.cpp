#include <algorithm>
#include <fstream>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/bootstrap/local_rendezvous.h"
#include "comm/bootstrap/mpi_rendezvous.h"
#include "comm/bootstrap/node_lists.h"
#include "comm/bootstrap/secret.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/listening.h"
#include "comm/net/socket.h"
#include "comm/os/process.h"

namespace rz {

namespace {

/// Environment variables of one launcher. Of several names, the first that is set is used.
struct LauncherVariables {
  const char* launcher;
  std::vector<const char*> rank, size, local_rank, local_size;  ///< empty local_size: see local_size_of()
};

std::vector<LauncherVariables> launchers() {
  const std::vector<LauncherVariables> all = {
      {"torchrun", {"RANK"}, {"WORLD_SIZE"}, {"LOCAL_RANK"}, {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"}},
      {"openmpi",
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {"pmix",
       {"PMIX_RANK"},
       {"PMIX_SIZE", "PRTE_COMM_WORLD_SIZE", "SLURM_NTASKS"},
       {"PMIX_LOCAL_RANK", "PRTE_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"},
       {"PMIX_LOCAL_SIZE", "PRTE_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
        "SLURM_NTASKS_PER_NODE"}},
      {"pals",
       {"PALS_RANKID"},
       {"PMI_SIZE", "PALS_SIZE"},
       {"PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"},
       {"PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"}},
      {"mpich",
       {"PMI_RANK"},
       {"PMI_SIZE"},
       {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}},
      {"mvapich",
       {"MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"},
       {"MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"},
       {"MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"},
       {"MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"}},
      {"jsrun",
       {"JSM_NAMESPACE_RANK"},
       {"JSM_NAMESPACE_SIZE"},
       {"JSM_NAMESPACE_LOCAL_RANK"},
       {"JSM_NAMESPACE_LOCAL_SIZE"}},
      {"horovodrun", {"HOROVOD_RANK"}, {"HOROVOD_SIZE"}, {"HOROVOD_LOCAL_RANK"}, {"HOROVOD_LOCAL_SIZE"}},
      {"flux", {"FLUX_TASK_RANK"}, {"FLUX_JOB_SIZE"}, {"FLUX_TASK_LOCAL_ID"}, {}},
      {"slurm",
       {"SLURM_PROCID"},
       {"SLURM_NTASKS", "SLURM_NPROCS"},
       {"SLURM_LOCALID"},
       {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}}};
  return all;
}

/// A variable of a launcher of which no row above has the rank.
constexpr struct {
  const char *variable, *launcher;
} parts_of_launchers[] = {{"ALPS_APP_PE", "aprun"},
                          {"MP_CHILD", "poe"},
                          {"MPIRUN_RANK", "mpirun_rsh"},
                          {"PMI_ID", "mpiexec"},
                          {"PMI_SIZE", "mpiexec"},
                          {"MPI_LOCALRANKID", "mpiexec"},
                          {"PMI_LOCAL_RANK", "mpiexec"},
                          {"PALS_LOCAL_RANKID", "PALS"},
                          {"OMPI_COMM_WORLD_SIZE", "Open MPI"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI"},
                          {"PMIX_NAMESPACE", "PMIx"},
                          {"FLUX_TASK_LOCAL_ID", "Flux"},
                          {"MV2_COMM_WORLD_SIZE", "MVAPICH"},
                          {"MVP_COMM_WORLD_SIZE", "MVAPICH"},
                          {"HOROVOD_SIZE", "horovodrun"},
                          {"LOCAL_RANK", "torchrun"}};

std::optional<int> parse_int(std::string_view text) { return parse_number<int>(text); }

/// Reads variables and collects all problems, so that one error message lists them.
class EnvironmentReader {
 public:
  EnvironmentReader(const Variables& variables, const LauncherVariables& names)
      : variables_(variables), names_(names) {}

  int number(const std::vector<const char*>& any, int min) {
    for (const char* name : any) {
      const auto text = variables_(name);
      if (!text) continue;
      if (std::string_view(name).ends_with("_TASKS_PER_NODE")) return tasks_of_this_node(*text, name);
      const auto value = parse_int(*text);
      if (!value || *value < min) complain(concat(name, "='", *text, "' is not a number from ", min, " on"));
      return value.value_or(min);
    }
    std::string list;
    for (const char* name : any) list += concat(list.empty() ? "" : " or ", name);
    complain(list + " is missing");
    return min;
  }

  void check(bool ok, const std::string& problem) {
    if (!ok && problems_.empty()) complain(problem);
  }
  void complain(const std::string& problem) { problems_ += (problems_.empty() ? "" : "; ") + problem; }
  void finish() const {
    require(
        problems_.empty(), Errc::config, "the environment of ", names_.launcher, ": ", problems_,
        "; start through the launcher, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT");
  }

 private:
  /// This node's entry in Slurm's list of tasks per node.
  int tasks_of_this_node(const std::string& list, const char* name) try {
    const std::vector<int> tasks = hosts::parse_slurm_counts(list, name);
    const std::string node = variables_("SLURM_NODEID").value_or("0");
    const auto index = parse_number<std::size_t>(node);
    if (index && *index < tasks.size()) return tasks[*index];
    complain(
        concat("SLURM_NODEID='", node, "' is no node of ", name, "='", list, "', which has ", tasks.size()));
    return 1;
  } catch (const Error& e) {
    complain(e.what());
    return 1;
  }
  const Variables& variables_;
  const LauncherVariables& names_;
  std::string problems_;
};

/// Number of consecutive ports that the store may use, so that a port in use does not fail the launch.
constexpr int ports_of_a_launch = 8;

std::optional<std::string> slurm_job(const Variables& variables) {
  const auto heterogeneous = variables("SLURM_HET_JOB_ID");
  return heterogeneous ? heterogeneous : variables("SLURM_JOB_ID");
}

/// The number of srun's step; nullopt outside of one, as in a batch script or an interactive allocation,
/// which Slurm counts as steps of their own with the highest numbers.
std::optional<int> slurm_step(const Variables& variables) {
  return parse_int(variables("SLURM_STEP_ID").value_or(""));
}

/// First port of the store. The steps of a job start at different ports.
int slurm_port(const Variables& variables) {
  const int job = parse_int(slurm_job(variables).value_or("")).value_or(0);
  const int step = slurm_step(variables).value_or(0);
  return 20000 + (job + step % 20000 * ports_of_a_launch) % 20000;
}

/// First host of a list of Slurm's; empty after a complaint.
std::string first_node(std::string_view list, const std::string& where, EnvironmentReader& reader) {
  try {
    return hosts::parse_slurm_nodes(list, where).front();
  } catch (const Error& e) {
    reader.complain(e.what());
    return "";
  }
}

/// The host of the first task in an order of the user's own, which is that of the lines of SLURM_HOSTFILE.
std::string first_host_of_file(const Variables& variables, EnvironmentReader& reader) {
  const std::string path = variables("SLURM_HOSTFILE").value_or("");
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto words = words_of(std::string_view(line).substr(0, line.find_first_of("#*")));
    if (!words.empty()) return first_node(words.front(), concat("SLURM_HOSTFILE=", path), reader);
  }
  reader.complain(
      concat("the distribution of the tasks is arbitrary, and SLURM_HOSTFILE='", path,
             "' has no line to read here, so that the host of rank 0 is not known; set "
             "MASTER_ADDR=$(head -n 1 FILE) and MASTER_PORT, for FILE with the nodes in the order "
             "of the ranks"));
  return "";
}

/// Slurm sorts its lists of nodes. Rank 0 is on the first one, unless the user has chosen the order of tasks.
std::string slurm_host(const Variables& variables, int rank, EnvironmentReader& reader) {
  if (variables("SLURM_DISTRIBUTION").value_or("").starts_with("arbitrary"))
    return first_host_of_file(variables, reader);
  const std::string node = variables("SLURM_NODEID").value_or("0");
  if (rank == 0 && node != "0")
    reader.complain(concat("rank 0 is on node ", node,
                           " of the step (SLURM_NODEID), and not on its first one, where the others look for "
                           "it; set MASTER_ADDR to that host, and MASTER_PORT"));
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})
    if (const auto list = variables(name)) return first_node(*list, name, reader);
  reader.complain("MASTER_ADDR and MASTER_PORT, or SLURM_NODELIST, are missing");
  return "";
}

std::string slurm_master(const Variables& variables, int rank, EnvironmentReader& reader) {
  const std::string host = slurm_host(variables, rank, reader);
  return host.empty() ? "" : net::join_host_port(host, slurm_port(variables));
}

/// LaunchInfo::master of a launch in which MPI hands on where rank 0 is.
constexpr const char* by_mpi = "mpi:";

bool is_single_node(const LaunchInfo& info) { return info.local_size == info.size; }

/// Identifier of a job whose launcher names none: its process on this host. Nothing else is common to the
/// ranks of one job and to no other.
std::string job_of_launcher_process(const LaunchInfo& info, EnvironmentReader& reader) {
  const LauncherProcess process = find_launcher_process();
  if (process.id.empty())
    reader.complain(concat(
        "it does not name the job, and the launcher's process is not visible here, as in a container with "
        "a pid namespace of its own; set RZ_LAUNCH to a text that no other job has, for all ranks of this "
        "job, as in mpirun -genv RZ_LAUNCH $(uuidgen)"));
  return concat("job:", info.launcher, '/', process.id);
}

/// What makes the identity of a launch on one host unique there. Identities that a launcher forms from
/// process ids or ports repeat in other containers of the host.
std::string place_on_host(const Variables& variables, const LaunchInfo& info) {
  if (!variables("RZ_LAUNCH").value_or("").empty()) return "";
  if (info.launcher == "torchrun") return " at " + machine_id();
  for (const char* name : {"FLUX_URI", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3",
                           "PMIX_SERVER_URI21", "PMIX_SERVER_URI2", "PMIX_SERVER_URI"})
    if (const auto value = variables(name)) return concat(" at ", *value);
  return "";
}

/// Each torchrun agent has its own restart count ("membership changes do not count as retries"). So the count
/// is part of the identity only if there is a single agent.
std::string torchrun_launch(const Variables& variables, const LaunchInfo& info) {
  const auto run = variables("TORCHELASTIC_RUN_ID");
  if (!run || run == variables("RZ_LAUNCH")) return "";
  const std::string port = variables("MASTER_PORT").value_or("");
  const std::string restart = variables("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return concat("torchrun run ", *run, " port ", port, is_single_node(info) ? " restart " + restart : "");
}

std::string slurm_launch(const Variables& variables, EnvironmentReader& reader) {
  const auto job = slurm_job(variables);
  if (!job) reader.complain("SLURM_JOB_ID is missing");
  return concat("slurm job ", job.value_or(""), " step ", variables("SLURM_STEP_ID").value_or(""),
                " restart ", variables("SLURM_RESTART_COUNT").value_or("0"));
}

std::string launch_id_of(const Variables& variables, const LaunchInfo& info, EnvironmentReader& reader) {
  std::string launch;
  const auto add = [&](const std::string& part) {
    launch += (launch.empty() || part.empty() ? "" : " ") + part;
  };
  if (info.launcher == "torchrun") {
    add(torchrun_launch(variables, info));
  } else if (info.launcher == "slurm") {
    add(slurm_launch(variables, reader));
  } else if (info.launcher == "flux") {
    if (const auto job = variables("FLUX_JOB_ID")) add("flux job " + *job);
  } else if (info.launcher == "pals") {
    if (const auto job = variables("PALS_APID")) add("pals " + *job);
  } else if (info.launcher == "horovodrun") {
    const auto host = variables("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
               port = variables("HOROVOD_GLOO_RENDEZVOUS_PORT");
    if (host && port) add(concat("horovod ", *host, " ", *port));
  } else if (const auto name = variables("PMIX_NAMESPACE")) {
    add("pmix " + *name);
    if (const auto restart = variables("SLURM_RESTART_COUNT")) add("restart " + *restart);
  } else if (!is_single_node(info) && slurm_step(variables)) {  // srun has started the launcher's proxies
    add(slurm_launch(variables, reader));
  }
  if (const auto token = variables("RZ_LAUNCH"); token && !token->empty()) add("RZ_LAUNCH " + *token);
  // Two jobs with the same MASTER_ADDR and MASTER_PORT. On several hosts, each has a process of its own.
  if (launch.empty() && is_single_node(info) && info.launcher != "torchrun" && variables("MASTER_ADDR"))
    add(find_launcher_process().id);
  return launch;
}

std::string master_of(const Variables& variables, const LaunchInfo& info, EnvironmentReader& reader) {
  if (info.launcher == "torchrun" && is_single_node(info) && !info.launch.empty())
    return concat("job:", info.launch, place_on_host(variables, info));
  auto host = variables("MASTER_ADDR");
  const auto port = variables("MASTER_PORT");
  if (host && host->size() > 2 && host->front() == '[' && host->back() == ']')  // as in a URL
    host = host->substr(1, host->size() - 2);
  if (host || port || info.launcher == "torchrun") {
    if (!host || host->empty()) reader.complain("MASTER_ADDR is missing");
    if (!port) reader.complain("MASTER_PORT is missing");
    if (!host || !port) return "";
    const auto number = parse_int(*port);
    if (!number || *number < 1 || *number > 65535)
      reader.complain(concat("MASTER_PORT='", *port, "' is not a number from 1 to 65535"));
    if (net::is_unspecified(*host)) {
      // torchrun numbers the ranks of a host in a row, so that the first ones are on the host of rank 0.
      if (info.launcher == "torchrun" && info.rank != info.local_rank)
        reader.complain(concat("MASTER_ADDR=", *host, " is each host itself, and rank ", info.rank,
                               " is not on that of rank 0; set it to a name or address of that host"));
      if (is_single_node(info)) host = "localhost";
    }
    const bool agent = variables("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
    return net::join_host_port(*host, number.value_or(0) + agent);
  }
  // Under mpirun in an allocation of Slurm, variables of Slurm are those of the step that started mpirun's
  // daemon on this host.
  if (info.launcher == "openmpi" && !is_single_node(info)) return by_mpi;
  if (variables("SLURM_PROCID") && info.launcher != "flux" && !is_single_node(info))
    return slurm_master(variables, info.rank, reader);
  if (!is_single_node(info)) {
    reader.complain(concat("MASTER_ADDR and MASTER_PORT are missing, and only ", info.local_size, " of ",
                           info.size, " ranks are on this host"));
    return "";
  }
  if (!info.launch.empty()) return concat("job:", info.launch, place_on_host(variables, info));
  if (const auto server = variables("OMPI_MCA_orte_hnp_uri"))
    return concat("job:", info.launcher, '/', *server);
  return job_of_launcher_process(info, reader);
}

/// Whether this launcher has set its variables. srun --mpi=pmi2 and Flux also set PMI_RANK and PMI_SIZE;
/// their own variables take precedence.
bool is_set(const LauncherVariables& names, const Variables& variables) {
  const std::string_view launcher = names.launcher;
  // One of the two is enough, so that an incomplete set is an error and does not select another launcher.
  if (launcher == "torchrun") return variables("RANK") || variables("WORLD_SIZE");
  const bool of_hydra = variables("MPI_LOCALRANKID") || variables("MPI_LOCALNRANKS");
  if (launcher == "pals" && of_hydra) return false;  // within a job of PALS
  if (launcher == "mpich" && !of_hydra &&
      (variables("SLURM_PROCID") || variables("FLUX_TASK_RANK") || variables("MV2_COMM_WORLD_RANK") ||
       variables("MVP_COMM_WORLD_RANK")))
    return false;
  return std::any_of(names.rank.begin(), names.rank.end(),
                     [&](const char* name) { return variables(name).has_value(); });
}

/// MPICH's mpiexec.gforker starts all ranks on this host, and sets neither local rank nor local size.
Variables with_local_ranks(const Variables& variables) {
  if (!variables("PMI_RANK") || variables("MPI_LOCALRANKID") || variables("PMI_LOCAL_RANK") ||
      find_launcher_process().name != "mpiexec.gforker")
    return variables;
  return [&variables](const std::string& name) {
    return variables(name == "MPI_LOCALRANKID" ? "PMI_RANK" : name == "MPI_LOCALNRANKS" ? "PMI_SIZE" : name);
  };
}

/// A process that no launcher started: a group of one. Refuses an environment that has a part of a
/// launcher's.
LaunchInfo group_of_one(const Variables& variables) {
  for (const auto& [name, launcher] : parts_of_launchers)
    if (const auto value = variables(name))
      fail(Errc::config, name, "='", *value, "' is set, as by ", launcher,
           ", but no variable that ringzero reads has the rank; set RANK, WORLD_SIZE, LOCAL_RANK, "
           "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset ",
           name, " for a group of one");
  LaunchInfo alone;
  alone.launcher = "none";
  return alone;
}

/// Slurm sets SLURM_PROCID=0 in a batch script, too. It has the number of tasks that srun would start.
LaunchInfo without_srun(const Variables& variables) {
  for (const char* name : {"SLURM_NTASKS", "SLURM_NPROCS"})
    if (const auto tasks = variables(name); tasks && *tasks != "1")
      fail(Errc::config, name, "=", *tasks, ", but SLURM_STEP_ID",
           variables("SLURM_STEP_ID") ? "=" + *variables("SLURM_STEP_ID") + " is no step of srun's"
                                      : " is missing",
           ": this process was started without srun, in a batch script or an allocation; start it with srun "
           "or "
           "rzrun, or unset SLURM_PROCID for a group of one");
  return group_of_one(variables);
}

/// Ranks on this node. Flux has no variable for it; it distributes tasks evenly if their number allows.
int local_size_of(const LauncherVariables& names, EnvironmentReader& reader, int size) {
  if (!names.local_size.empty()) return reader.number(names.local_size, 1);
  const int nodes = reader.number({"FLUX_JOB_NNODES"}, 1);
  reader.check(
      size % nodes == 0,
      concat("FLUX_JOB_SIZE=", size, " tasks on FLUX_JOB_NNODES=", nodes,
             " nodes: no variable has the number of tasks on this one; set RANK, WORLD_SIZE, LOCAL_RANK, "
             "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"));
  return std::max(1, size / nodes);
}

}  // namespace

LaunchInfo launch_info_from(const Variables& given) {
  const Variables variables = with_local_ranks(given);
  for (const LauncherVariables& names : launchers()) {
    if (!is_set(names, variables)) continue;
    if (names.launcher == std::string_view("slurm") && !slurm_step(variables)) return without_srun(variables);
    EnvironmentReader reader(variables, names);
    LaunchInfo info;
    info.launcher = names.launcher;
    info.rank = reader.number(names.rank, 0);
    info.size = reader.number(names.size, 1);
    info.local_rank = reader.number(names.local_rank, 0);
    info.local_size = local_size_of(names, reader, info.size);
    reader.check(info.rank < info.size,
                 concat(names.rank.front(), "=", info.rank, " is not below the size, ", info.size));
    const std::string local_size = names.local_size.empty() ? "the local size" : names.local_size.front();
    reader.check(info.local_size <= info.size,
                 concat(local_size, "=", info.local_size, " is more than the size, ", info.size));
    reader.check(info.local_rank < info.local_size,
                 concat(names.local_rank.front(), "=", info.local_rank, " is not below the local size, ",
                        info.local_size));
    reader.finish();
    if (info.size > 1) {
      info.launch = launch_id_of(variables, info, reader);
      info.master = master_of(variables, info, reader);
    }
    reader.finish();
    return info;
  }
  return group_of_one(variables);
}

LaunchInfo launch_info_from_environment() { return launch_info_from(environment_variable); }

std::shared_ptr<Store> store_for_launch(const LaunchInfo& info, std::chrono::milliseconds timeout,
                                        const std::string& backend) {
  keep_secret_descriptor();
  if (info.size == 1) return memory_store();
  require(!info.master.empty(), Errc::config, "a group of ", info.size, " ranks without a master");
  if (info.master.rfind("job:", 0) == 0)
    return local_rendezvous_store(info.master.substr(4), info.rank, info.size, Deadline::after(timeout));
  if (info.master == by_mpi)
    return mpi_rendezvous_store(info, backend.empty() ? environment().backend : backend, timeout);
  return tcp_store(info.master, {.serve = info.rank == 0,
                                 .timeout = timeout,
                                 .launch = info.launch,
                                 .remote = !is_single_node(info),
                                 .size = info.size,
                                 .ports = info.launch.empty() ? 1 : ports_of_a_launch,
                                 .rank = info.rank});
}

}  // namespace rz
