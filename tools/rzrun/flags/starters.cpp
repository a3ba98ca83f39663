#include "tools/rzrun/flags/starters.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "comm/core/error.h"
#include "tools/command_line/shell_words.h"
#include "tools/rzrun/hosts/connector.h"

namespace rz::rzrun {
namespace {

/// A launcher of DeepSpeed that does not start rzrun's agents, and what starts the ranks under it.
struct OtherLauncher {
  std::string_view name, instead;
};
constexpr OtherLauncher other_launchers[] = {
    {"mpich", "mpirun -n N"}, {"mvapich", "mpirun -n N"}, {"impi", "mpirun -n N"}, {"jsrun", "jsrun -n N"}};

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

/// A number of GPUs, such as "2" or "a100:2,v100:1"; nothing if the variable is not set.
std::optional<int> gpus_of(const char* name, int max) {
  const char* text = setting(name);
  if (!text) return {};
  int sum = 0;
  for (const std::string& part : parts_of(text, ',')) {
    const auto n = parse_number<int>(std::string_view(part).substr(part.rfind(':') + 1));
    require(n && *n >= 0 && *n <= max, Errc::config, name, ": ", hosts::quoted(text),
            " is no number of GPUs");
    sum += *n;
  }
  return sum;
}

/// The GPUs of each host in the allocation; 0 if it has none. Slurm names those of the first host, and all.
int gpus_of_allocation(std::size_t nodes) {
  if (const auto each = gpus_of("SLURM_GPUS_PER_NODE", hosts::max_slots)) return *each;
  const int first = gpus_of("SLURM_GPUS_ON_NODE", hosts::max_slots).value_or(0),
            all = gpus_of("SLURM_GPUS", hosts::max_slots * hosts::max_nodes)
                      .value_or(first * static_cast<int>(nodes));
  require(static_cast<std::size_t>(first) * nodes == static_cast<std::size_t>(all) || first == 0,
          Errc::config, "the GPUs of this allocation are not the same on all nodes: ", all,
          " (SLURM_GPUS) on ", nodes, ", of which the first has ", first,
          " (SLURM_GPUS_ON_NODE); ask for --gpus-per-node=K, or name the slots of each node in a --hostfile");
  return first;
}

/// Without them SLURM_TASKS_PER_NODE counts processors where a node is exclusive.
bool has_tasks() {
  return setting("SLURM_NTASKS") || setting("SLURM_NPROCS") || setting("SLURM_NTASKS_PER_NODE");
}

void append(std::vector<std::string>& words, const std::string& text) {
  for (std::string& word : shell_words(text, "--launcher_args")) words.push_back(std::move(word));
}

std::vector<std::string> srun_command(const Hosts& all) {
  const std::string hosts = concat(all.nodes.size());
  std::string names;
  for (const hosts::Host& h : all.nodes) names += concat(names.empty() ? "" : ",", h.name);
  // Each agent has all processors of its host, and no library of MPI is started for it.
  std::vector<std::string> words{"srun",
                                 "--nodes=" + hosts,
                                 "--ntasks=" + hosts,
                                 "--ntasks-per-node=1",
                                 "--nodelist=" + names,
                                 "--export=ALL",
                                 "--kill-on-bad-exit=1",
                                 "--cpu-bind=none",
                                 "--mpi=none",
                                 "--input=none"};
  append(words, all.starter.words);
  words.insert(words.end(), {hosts::own_path(), "--agent"});
  return words;
}

std::vector<std::string> mpirun_command(const Hosts& all, std::chrono::milliseconds of_ranks) {
  // An agent that has to end has the grace period for its ranks.
  const auto grace = std::chrono::ceil<std::chrono::seconds>(of_ranks).count() + 2;
  std::vector<std::string> words{"mpirun",     "--bind-to", "none", "--mca", "odls_base_sigkill_timeout",
                                 concat(grace)};
  append(words, all.starter.words);
  for (const hosts::Host& h : all.nodes) {
    if (&h != &all.nodes.front()) words.push_back(":");
    words.insert(words.end(), {"-n", "1", "--host", h.name + ":1"});
    words.insert(words.end(), {"-x", "RZ_AGENT", "-x", "RZ_ENCRYPTION", "-x", secret_variable()});
    if (setting("RZ_PORTS")) words.insert(words.end(), {"-x", "RZ_PORTS"});
    words.insert(words.end(), {hosts::own_path(), "--agent"});
  }
  return words;
}

}  // namespace

Starter choose_starter(const HostFlags& f, Remarks& remarks) {
  using Kind = Starter::Kind;
  std::string name = f.launcher;
  std::ranges::transform(name, name.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  const auto* other = std::ranges::find(other_launchers, name, &OtherLauncher::name);
  require(other == std::end(other_launchers), Errc::config, "--launcher ", f.launcher,
          ": rzrun starts its agents by ssh, openmpi or slurm; give one of these, or start the ranks with ",
          other == std::end(other_launchers) ? "" : other->instead, " PROGRAM");
  const Kind kind = name == "openmpi" ? Kind::openmpi : name == "slurm" ? Kind::slurm : Kind::ssh;
  require(kind != Kind::ssh || name.empty() || name == "ssh" || name == "pdsh", Errc::config, "--launcher ",
          f.launcher, ": unknown; rzrun starts its agents by ssh, openmpi or slurm");
  require(kind != Kind::slurm || !setting("SLURM_JOB_NODELIST_HET_GROUP_0"), Errc::config, "--launcher ",
          f.launcher,
          ": this is a heterogeneous job of Slurm, whose groups rzrun does not combine; start the ranks with "
          "srun --het-group=0,1 PROGRAM, which names its groups");
  require(kind != Kind::slurm || setting("SLURM_JOB_ID"), Errc::config, "--launcher ", f.launcher,
          ": this is no allocation of Slurm; put 'salloc --nodes=N --ntasks-per-node=K' before rzrun, or "
          "start it in a script of sbatch");
  if (name == "pdsh")
    remarks.notes.push_back("--launcher pdsh: agents are started by ssh, with the same effect");
  require(kind == Kind::ssh || (f.rsh.empty() && !f.ssh_port), Errc::config, "--launcher ", f.launcher,
          " and ", f.rsh.empty() ? "--ssh_port" : "--rsh", " exclude each other; the latter is for ssh");
  shell_words(f.rsh, "--rsh");  // a quote without the other one is an error before anything starts
  shell_words(f.launcher_args, "--launcher_args");
  require(f.launcher_args.empty() || name != "pdsh", Errc::config,
          "--launcher_args: flags of pdsh have no use, since ssh starts the agents; give ssh's, with "
          "--launcher ssh");
  require(f.launcher_args.empty() || f.rsh.empty(), Errc::config,
          "--launcher_args and --rsh exclude each other; put the words into --rsh");
  return {kind, f.launcher_args, f.rsh, f.ssh_port};
}

std::vector<std::string> nodes_of_allocation() {
  const char* list = setting("SLURM_JOB_NODELIST");
  return list ? hosts::parse_slurm_nodes(list, "SLURM_JOB_NODELIST") : std::vector<std::string>();
}

std::vector<hosts::Host> hosts_of_allocation() {
  const auto names = nodes_of_allocation();
  if (names.empty()) return {};
  const char* tasks = setting("SLURM_TASKS_PER_NODE");
  auto slots =
      tasks ? hosts::parse_slurm_counts(tasks, "SLURM_TASKS_PER_NODE") : std::vector<int>(names.size(), 1);
  require(slots.size() == names.size(), Errc::config, "SLURM_TASKS_PER_NODE has ", slots.size(),
          " nodes, and SLURM_JOB_NODELIST ", names.size(),
          "; start rzrun in the allocation itself, not in a step of srun");
  if (!has_tasks()) std::ranges::fill(slots, 1);
  if (std::ranges::all_of(slots, [](int n) { return n == 1; }))
    if (const int gpus = gpus_of_allocation(names.size()); gpus > 0) std::ranges::fill(slots, gpus);
  std::vector<hosts::Host> all;
  for (std::size_t i = 0; i < names.size(); ++i) {
    all.push_back({names[i], {}, false});
    for (int s = 0; s < slots[i]; ++s) all.back().slots.push_back(s);
  }
  return all;
}

GivenDevices devices_of_slurm() {
  const char* const devices = setting("CUDA_VISIBLE_DEVICES");
  if (!setting("SLURM_JOB_ID") || !devices) return {};
  if (std::string_view(devices) == "NoDevFiles") return GivenDevices(std::in_place);
  return parts_of(devices, ',');
}

std::string devices_of_slots(const std::vector<int>& slots, const GivenDevices& given) {
  std::string text, all;
  if (given && given->empty()) return text;
  for (const std::string& device : given.value_or(std::vector<std::string>()))
    all += concat(all.empty() ? "" : ",", device);
  for (const int slot : slots) {
    const auto place = static_cast<std::size_t>(slot);
    require(!given || place < given->size(), Errc::config, "slot ", slot, ": Slurm gave this host ",
            given ? given->size() : 0, given && given->size() == 1 ? " device" : " devices",
            " (CUDA_VISIBLE_DEVICES=", all, "), which slots count from 0");
    text += concat(text.empty() ? "" : ",", given ? (*given)[place] : concat(slot));
  }
  return text;
}

bool has_value(const char* name) { return setting(name) != nullptr; }

std::string secret_variable() {
  const char* insecure = setting("RZ_INSECURE");
  if (insecure && std::string_view(insecure) != "0") return "RZ_INSECURE";
  return !has_value("RZ_SECRET") && has_value("RZ_SECRET_FILE") ? "RZ_SECRET_FILE" : "RZ_SECRET";
}

std::vector<std::string> starter_command(const Hosts& all, std::chrono::milliseconds grace) {
  return all.starter.kind == Starter::Kind::slurm ? srun_command(all) : mpirun_command(all, grace);
}

}  // namespace rz::rzrun
