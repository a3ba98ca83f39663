#include "comm/core/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/core/text.h"

namespace rz {

namespace {

template <class T>
void read_number(const char* variable, T min, T max, T& value) {
  const char* text = std::getenv(variable);
  if (!text) return;
  T parsed{};
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, parsed);
  require(error == std::errc{} && stop == end && parsed >= min && parsed <= max, Errc::config, variable, "='",
          text, "' is not a number from ", min, " to ", max);
  value = parsed;
}

void read_flag(const char* variable, bool& value) {
  int number = value;
  read_number(variable, 0, 1, number);
  value = number == 1;
}

void read_text(const char* variable, std::string& value) {
  if (const char* text = std::getenv(variable)) value = text;
}

void read_ports(const char* name, PortRange& ports) {
  std::string text;
  read_text(name, text);
  if (text.empty()) return;
  const std::size_t dash = text.find('-');
  const auto first = parse_number<int>(text.substr(0, dash));
  const auto last = parse_number<int>(dash == text.npos ? text : text.substr(dash + 1));
  require(first && last && *first >= 1 && *first <= *last && *last <= 65535, Errc::config, name, "='", text,
          "' is no range of ports, FIRST-LAST, within 1-65535");
  ports = {*first, *last};
}

void read_order(const char* variable, ReductionOrder& value) {
  std::string text = name(value);
  read_text(variable, text);
  for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise})
    if (text == name(order)) {
      value = order;
      return;
    }
  fail(Errc::config, variable, "='", text, "' is not one of rank, pairwise");
}

/// The variables that a report may show. environment.h documents all.
constexpr std::string_view variables =
    "RZ_BACKEND RZ_TRANSPORT RZ_INTERFACE RZ_SOCKETS RZ_PORTS RZ_CONGESTION RZ_ENCRYPTION RZ_ALGORITHM "
    "RZ_TUNING "
    "RZ_DETERMINISTIC RZ_REDUCTION_ORDER RZ_ALLOW_TF32 RZ_THREAD_PLACEMENT RZ_TIMEOUT_S RZ_DETECTION_S "
    "RZ_WAIT_REPORT_S RZ_CRASH_STACK RZ_FLIGHT RZ_RENDEZVOUS_TIMEOUT_S RZ_HOST_ID "
    "NCCL_HOSTID NCCL_MULTI_RANK_GPU_ENABLE OMP_NUM_THREADS "
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE TORCHELASTIC_RESTART_COUNT "
    "TORCHELASTIC_USE_AGENT_STORE "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE "
    "PMIX_RANK PMIX_SIZE PMIX_LOCAL_RANK PMIX_LOCAL_SIZE PRTE_COMM_WORLD_SIZE PRTE_COMM_WORLD_LOCAL_RANK "
    "PRTE_COMM_WORLD_LOCAL_SIZE "
    "PALS_RANKID PALS_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE "
    "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_ID MPI_LOCALRANKID MPI_LOCALNRANKS MPIRUN_RANK "
    "ALPS_APP_PE MP_CHILD "
    "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE "
    "MVP_COMM_WORLD_RANK MVP_COMM_WORLD_SIZE MVP_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_SIZE "
    "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE "
    "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE "
    "FLUX_TASK_RANK FLUX_TASK_LOCAL_ID FLUX_JOB_SIZE FLUX_JOB_NNODES FLUX_JOB_ID "
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE "
    "SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID SLURM_HET_JOB_ID SLURM_STEP_ID "
    "SLURM_RESTART_COUNT SLURM_JOB_END_TIME";
/// The variables that identify a job or lead to it.
constexpr std::string_view variables_of_job =
    "RZ_LAUNCH RZ_AGENT RZ_CONFIG RZ_SECRET RZ_SECRET_FD RZ_SECRET_FILE RZ_INSECURE RZ_FLIGHT_FD HOME "
    "XDG_CONFIG_HOME "
    "XDG_RUNTIME_DIR TMPDIR MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE "
    "OMPI_MCA_orte_hnp_uri "
    "PMIX_NAMESPACE PMIX_SERVER_URI PMIX_SERVER_URI2 PMIX_SERVER_URI21 PMIX_SERVER_URI3 PMIX_SERVER_URI4 "
    "PMIX_SERVER_URI41 "
    "PALS_APID "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT "
    "FLUX_URI "
    "SLURM_NODELIST SLURM_JOB_NODELIST SLURM_STEP_NODELIST SLURM_DISTRIBUTION SLURM_HOSTFILE";

bool is_variable(std::string_view name) {
  return std::ranges::count(words_of(variables), name) ||
         std::ranges::count(words_of(variables_of_job), name);
}

/// A misspelt variable would be ignored silently. Other names that begin with RZ_ belong to the program.
void refuse_misspelt_variables() {
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view entry = *variable, name = entry.substr(0, entry.find('='));
    if (!name.starts_with("RZ_") || is_variable(name)) continue;
    for (const std::string_view list : {variables, variables_of_job})
      for (const std::string_view other : words_of(list))
        require(!other.starts_with("RZ_") ||
                    (3 * static_cast<std::size_t>(edit_distance(name.substr(3), other.substr(3))) >=
                         other.size() - 2 &&
                     !(name.size() > 6 && other.starts_with(name))),
                Errc::config, name, " is no variable of ringzero; did you mean ", other, "?");
  }
}

}  // namespace

Environment Environment::read() {
  refuse_misspelt_variables();
  Environment e;
  read_text("RZ_BACKEND", e.backend);
  read_text("RZ_TRANSPORT", e.transport);
  read_text("RZ_INTERFACE", e.interface);
  read_number("RZ_SOCKETS", 1, 16, e.sockets);
  read_ports("RZ_PORTS", e.ports);
  read_text("RZ_CONGESTION", e.congestion);
  read_text("RZ_ENCRYPTION", e.encryption);
  require(e.encryption == "on" || e.encryption == "off" || e.encryption == "always", Errc::config,
          "RZ_ENCRYPTION='", e.encryption, "' is not one of on, off, always");
  read_text("RZ_ALGORITHM", e.algorithm);
  read_text("RZ_TUNING", e.tuning);
  read_flag("RZ_DETERMINISTIC", e.deterministic);
  read_order("RZ_REDUCTION_ORDER", e.reduction_order);
  read_flag("RZ_ALLOW_TF32", e.allow_tf32);
  read_flag("RZ_THREAD_PLACEMENT", e.thread_placement);
  read_number("RZ_TIMEOUT_S", 0.001, 1e9, e.timeout_s);
  read_number("RZ_DETECTION_S", 0.0, 1e9, e.detection_s);
  read_number("RZ_WAIT_REPORT_S", 0.001, 1e9, e.wait_report_s);
  read_flag("RZ_CRASH_STACK", e.crash_stack);
  read_text("RZ_FLIGHT", e.flight);
  read_number("RZ_RENDEZVOUS_TIMEOUT_S", 0.001, 1e9, e.rendezvous_timeout_s);
  read_text("RZ_HOST_ID", e.host_id);
  read_text("NCCL_HOSTID", e.nccl_host_id);
  int shares = e.nccl_shares_gpus;
  read_number("NCCL_MULTI_RANK_GPU_ENABLE", 0, 1, shares);
  e.nccl_shares_gpus = shares == 1;
  return e;
}

std::vector<std::string_view> reportable_variables() { return words_of(variables); }

std::optional<std::string> environment_variable(const std::string& name) {
  require(is_variable(name), Errc::invalid_argument, name,
          " is not in the table of comm/core/environment.cpp");
  const char* const value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

const Environment& environment() {
  static constinit Lazy<Environment> e;
  return e.get(Environment::read);
}

}  // namespace rz
