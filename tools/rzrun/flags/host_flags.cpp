#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/topology.h"
#include "tools/command_line/shell_words.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/flags/starters.h"
#include "tools/rzrun/hosts/connector.h"

namespace rz::rzrun {
namespace {

using hosts::Host;

Host of_all_slots(const std::string& name) {
  Host all{name, std::vector<int>(hosts::max_slots), false};
  std::iota(all.slots.begin(), all.slots.end(), 0);
  return all;
}

/// The flags about hosts as a whole: as typed, or of Accelerate's file.
struct Choice {
  const Flags& typed;
  const HostFlags flags;
  const Starter starter;
  const Node node;

  /// Without a hostfile mpirun and srun have the hosts of Slurm's allocation.
  bool has_allocation() const {
    return starter.kind != Starter::Kind::ssh && std::getenv("SLURM_JOB_ID") &&
           std::getenv("SLURM_JOB_NODELIST");
  }
  bool has_file() const { return !flags.hostfile.empty() || has_allocation(); }
  bool is_slurm() const { return starter.kind == Starter::Kind::slurm; }
};

HostFlags flags_of(const Given& given) {
  HostFlags f = given.flags.hosts;
  f.hostfile = given.text("--hostfile", f.hostfile);
  f.include = given.text("--include", f.include);
  f.exclude = given.text("--exclude", f.exclude);
  f.num_gpus = parse_number<int>(given.text("--num_gpus", concat(f.num_gpus))).value_or(0);
  f.launcher = given.text("--launcher", f.launcher);
  return f;
}

/// Without -n, DeepSpeed's hostfile has the hosts where a cluster has put one. A filter of this host alone
/// needs none.
HostFlags with_default_file(const Choice& c, Remarks& remarks) {
  HostFlags f = c.flags;
  const std::string host = f.include.substr(0, f.include.find_first_of(":@"));
  std::error_code none;
  if (c.has_file() || c.typed.is_typed("-n") || c.node.ranks != 0 ||
      (!f.include.empty() && hosts::is_this_host(host)) || !std::filesystem::exists(f.default_file, none))
    return f;
  f.hostfile = f.default_file;
  remarks.notes.push_back(
      concat("hosts of ", f.hostfile, ", as with DeepSpeed; -n N starts ranks on this host alone"));
  return f;
}

/// The slots of this host that --include names without a hostfile: any, since no file limits them.
std::vector<Host> of_this_host(const std::string& filter) {
  const std::string name = filter.substr(0, filter.find_first_of(":@"));
  require(hosts::is_this_host(name), Errc::config, "--include ", filter, ": '", name,
          "' is another host; name it and its slots in a --hostfile");
  require(filter.find(':') != std::string::npos, Errc::config, "--include ", filter,
          ": without --hostfile write ", name, ":SLOT,SLOT…, or -n N");
  return hosts::include({of_all_slots(name)}, filter);
}

/// The hosts of which filters and counts choose.
std::vector<Host> all_hosts(const Choice& c) {
  const HostFlags& f = c.flags;
  if (f.hostfile.empty()) return c.has_allocation() ? hosts_of_allocation() : of_this_host(f.include);
  auto all = hosts::read_hostfile(f.hostfile);
  if (!c.is_slurm()) return all;
  const auto allocation = nodes_of_allocation();
  for (const Host& h : all)
    require(std::ranges::count(allocation, h.name) > 0, Errc::config, f.hostfile, ": host '", h.name,
            "' is not in this allocation of Slurm; leave --hostfile out, or name its nodes");
  return all;
}

void check(const Choice& c) {
  const auto is_typed = [&](const char* flag) { return c.typed.is_typed(flag); };
  const HostFlags& f = c.flags;
  const bool filtered = is_typed("--include") || is_typed("--exclude"),
             counted = is_typed("--num_nodes") || is_typed("--num_gpus");
  require(!is_typed("--include") || !is_typed("--exclude"), Errc::config,
          "--include and --exclude exclude each other; give one");
  require(!filtered || !counted, Errc::config, is_typed("--include") ? "--include" : "--exclude", " and ",
          is_typed("--num_nodes") ? "--num_nodes" : "--num_gpus", " exclude each other; give one");
  require(
      !is_typed("-n") || !is_typed("--num_gpus"), Errc::config,
      "-n and --num_gpus exclude each other; -n N counts the ranks of all hosts, --num_gpus K those of each");
  if (c.has_file()) return;
  require(!c.is_slurm(), Errc::config,
          "--launcher slurm: SLURM_JOB_NODELIST is missing, which names the nodes of the allocation");
  require(c.starter.kind == Starter::Kind::ssh, Errc::config, "--launcher openmpi needs --hostfile FILE");
  require(!is_typed("--exclude"), Errc::config, "--exclude needs --hostfile FILE; there is no ",
          f.default_file);
  require(f.num_nodes <= 1, Errc::config, "--num_nodes ", f.num_nodes, " needs --hostfile FILE; there is no ",
          f.default_file);
  for (const auto& [is_set, name] : {std::pair(!c.starter.rsh.empty(), "--rsh"),
                                     {c.starter.ssh_port != 0, "--ssh_port"},
                                     {!c.starter.words.empty(), "--launcher_args"}})
    require(!is_set, Errc::config, name, " needs --hostfile FILE: one host needs no connection");
}

/// Outside of Slurm, slots are the numbers of all devices of a host.
void note_replaced_devices(const std::vector<Host>& all, Remarks& remarks) {
  const char* const own = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!own || !*own || devices_of_slurm()) return;
  for (const Host& h : all)
    if (const std::string slots = h.filtered ? devices_of_slots(h.slots, {}) : own; slots != own) {
      remarks.notes.push_back(concat("the slots of ", h.name, " replace CUDA_VISIBLE_DEVICES=", own, " by ",
                                     slots,
                                     ": they are numbers of the host's devices, not places in that list"));
      return;
    }
}

/// The first slots of the hosts that hold so many ranks.
std::vector<Host> of_ranks(std::vector<Host> all, int ranks) {
  std::size_t slots = 0;
  for (const Host& h : all) slots += h.slots.size();
  require(ranks >= 1 && static_cast<std::size_t>(ranks) <= slots, Errc::config, "-n ", ranks,
          ": the hosts have ", slots, " slots");
  std::size_t left = static_cast<std::size_t>(ranks);
  for (Host& h : all) {
    h.slots.resize(std::min(h.slots.size(), left));
    left -= h.slots.size();
  }
  std::erase_if(all, [](const Host& h) { return h.slots.empty(); });
  return all;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}

/// What the filters and counts leave of the hosts.
std::vector<Host> chosen_hosts(const Choice& c) {
  const HostFlags& f = c.flags;
  auto all = all_hosts(c);
  if (c.has_file() && (c.typed.is_typed("--include") || !f.include.empty()))
    all = hosts::include(all, f.include);
  if (c.typed.is_typed("--exclude") || !f.exclude.empty()) all = hosts::exclude(all, f.exclude);
  if (f.num_nodes) all = hosts::first_nodes(std::move(all), f.num_nodes);
  if (f.num_gpus) {
    auto chosen = hosts::first_slots(all, f.num_gpus);
    // Slurm chooses the devices of a host; ranks take the first of these.
    for (std::size_t i = 0; c.is_slurm() && i < all.size(); ++i) chosen[i].filtered = all[i].filtered;
    all = std::move(chosen);
  }
  return c.typed.is_typed("-n") ? of_ranks(std::move(all), c.typed.ranks) : all;
}

/// With DeepSpeed's flags and files. -n N, if it was given, are the first N slots.
void take_nodes(const Choice& c, Hosts& h, Remarks& remarks) {
  check(c);
  if (!c.has_file() && c.flags.include.empty()) {
    if (c.flags.num_gpus) h.ranks = c.flags.num_gpus;
    if (c.flags.force_multi && h.ranks > 0) h.nodes = of_ranks({of_all_slots("localhost")}, h.ranks);
    return;
  }
  auto all = chosen_hosts(c);
  h.ranks = 0;
  for (const Host& host : all) h.ranks += static_cast<int>(host.slots.size());
  if (!c.is_slurm()) note_replaced_devices(all, remarks);
  if (!c.flags.force_multi && all.size() == 1 && hosts::is_this_host(all.front().name)) {
    if (all.front().filtered) h.devices = devices_of_slots(all.front().slots, devices_of_slurm());
  } else {
    h.nodes = std::move(all);
  }
}

/// As with DeepSpeed, a program without a number has a rank for each device.
int count_devices(Remarks& remarks) {
  const int devices = cuda::device_count();
  require(devices != 0, Errc::config,
          "how many ranks? This host has no CUDA device to count; give -n N, such as -n ",
          cpu_limits().processors.size(), " for its processors, or --hostfile FILE; see --help");
  remarks.notes.push_back(concat("-n ", devices, ": a rank for each CUDA device of this host"));
  return devices;
}

/// What a filter of this host, or one whose agent finds it, means.
std::string describe_devices(const Hosts& hosts, const Host& h) {
  if (!hosts.devices.empty()) return "; CUDA_VISIBLE_DEVICES=" + hosts.devices;
  if (!h.filtered) return "";
  return concat(hosts.starter.kind == Starter::Kind::slurm ? "; of the devices that Slurm gives it numbers "
                                                           : "; CUDA_VISIBLE_DEVICES=",
                devices_of_slots(h.slots, {}));
}

/// A host, its ranks, their devices, and what starts its agent.
std::string describe_host(const Hosts& hosts, const Host& h, int first, std::size_t count) {
  std::string text =
      concat(h.name, ": ", ranks_text(first, static_cast<int>(count)), describe_devices(hosts, h));
  if (!hosts.nodes.empty() && hosts.starter.kind == Starter::Kind::ssh)
    text += concat("; agent: ", join(agent_command(hosts.starter, h.name)));
  return text + "\n";
}

/// Variables of the ranks that flags fix.
std::string describe_variables(const JobSpec& job) {
  std::string text;
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += concat(text.empty() ? "" : ", ", name, "=", value);
  };
  if (!job.hosts.rendezvous) {  // node 0 chooses both for all hosts
    add("MASTER_ADDR", job.hosts.master_addr);
    if (job.hosts.master_port) add("MASTER_PORT", concat(job.hosts.master_port));
  }
  add("TORCHELASTIC_RUN_ID", job.run_id);
  return text.empty() ? "" : text + "\n";
}

}  // namespace

void add_host_flags(CommandLine& line, HostFlags& f, bool& dry_run) {
  const std::string heading = "Several hosts";
  line.add_option("-H,--hostfile", f.hostfile, "Hosts, one a line: NAME slots=N; a rank for each slot")
      .type_name("FILE")
      .group(heading);
  line.add_option("-i,--include", f.include, "These alone; slots are devices: NAME[:SLOT,…][@NAME…]")
      .type_name("FILTER")
      .group(heading);
  line.add_option("-e,--exclude", f.exclude, "All but these").type_name("FILTER").group(heading);
  line.add_option("--num_nodes,--num-nodes", f.num_nodes, "The first N hosts")
      .within(1, hosts::max_nodes)
      .type_name("N")
      .group(heading);
  line.add_option("--num_gpus,--num-gpus,--num_accelerators,--num-accelerators", f.num_gpus,
                  "The first K slots of each; without --hostfile: -n K")
      .within(1, hosts::max_slots)
      .type_name("K")
      .group(heading);
  line.add_option("--ssh_port,--ssh-port", f.ssh_port, "ssh's port; default: its own")
      .within(1, 65535)
      .type_name("PORT")
      .group(heading);
  line.add_option("--rsh", f.rsh, "Instead of ssh; it gets the host, and a command for a shell there")
      .type_name("COMMAND")
      .group(heading);
  line.add_option("--master-addr,--master_addr", f.master_addr,
                  "MASTER_ADDR; default: an address of the first host in a network of the others")
      .type_name("ADDRESS")
      .group(heading);
  line.add_flag("--dry-run", dry_run, "Print what would run where, and start nothing");
}

std::vector<std::string> agent_command(const Starter& starter, const std::string& host) {
  std::vector<std::string> shell = shell_words(starter.rsh, "--rsh");
  if (shell.empty()) {
    shell = hosts::ssh_words();
    if (starter.ssh_port) shell.insert(shell.end(), {"-p", concat(starter.ssh_port)});
  }
  for (const std::string& word : shell_words(starter.words, "--launcher_args")) shell.push_back(word);
  return hosts::remote_command(shell, host, hosts::own_path(), std::filesystem::current_path().native());
}

Hosts choose_hosts(const Given& given, Remarks& remarks) {
  const HostFlags typed = flags_of(given);
  const Starter starter = choose_starter(typed, remarks);
  const Node node = choose_node(given, remarks);
  const auto address = given.setting("--master-addr", typed.master_addr),
             port = given.setting("--master-port", concat(typed.master_port));
  Hosts h{.ranks = given.flags.is_typed("-n") ? given.flags.ranks : node.ranks,
          .rendezvous = node.rendezvous,
          .starter = starter,
          .master_addr = address.is_set() ? address.value : node.master_addr,
          .master_port = port.is_set() ? number_of(port, 1, 65535) : 0};
  require(!h.rendezvous || starter.kind == Starter::Kind::ssh, Errc::config,
          "--launcher and --nnodes exclude each other: with --nnodes the user starts rzrun on each host");
  if (!h.rendezvous) {
    const Choice as_given{given.flags, typed, starter, node};
    take_nodes({given.flags, with_default_file(as_given, remarks), starter, node}, h, remarks);
  }
  const auto& devices = given.file.devices;
  require(devices.empty() || h.nodes.empty(), Errc::config,
          "gpu_ids is of one host, and a hostfile has several; name devices with --include HOST:SLOT,SLOT");
  if (!devices.empty() && !h.rendezvous) h.devices = devices_of_slots(devices, devices_of_slurm());
  if (h.ranks == 0) h.ranks = count_devices(remarks);
  return h;
}

std::string describe_plan(const JobSpec& job, const std::vector<std::string>& plan, const std::string& node) {
  const Hosts& hosts = job.hosts;
  std::vector<Host> all = hosts.nodes;
  if (all.empty()) all = {{"this host", std::vector<int>(static_cast<std::size_t>(hosts.ranks)), false}};
  std::string text =
      concat(hosts.ranks, hosts.ranks == 1 ? " rank" : " ranks", hosts.rendezvous ? " on this host" : "",
             " of: ", join(job.program.command), "\n");
  text += node;
  int first = 0;
  for (const Host& h : hosts.rendezvous ? std::vector<Host>() : all) {
    text += describe_host(hosts, h, first, h.slots.size());
    first += static_cast<int>(h.slots.size());
  }
  text += describe_variables(job);
  if (!hosts.nodes.empty() && hosts.starter.kind != Starter::Kind::ssh)
    text += concat("agents: ", join(starter_command(hosts, job.grace)), "\n");
  for (const std::string& line : plan) text += line + "\n";
  return text;
}

}  // namespace rz::rzrun
