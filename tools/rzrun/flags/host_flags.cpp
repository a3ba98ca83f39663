#include "tools/rzrun/flags/host_flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "comm/core/error.h"
#include "tools/rzrun/flags/launchers.h"

namespace rz::rzrun {
namespace {

using hosts::Host;

Host of_all_slots(const std::string& name) {
  Host all{name, std::vector<int>(hosts::max_slots), false};
  std::iota(all.slots.begin(), all.slots.end(), 0);
  return all;
}

/// Without a hostfile mpirun and srun have the hosts of Slurm's allocation.
bool has_allocation(const Options& o) {
  return o.launcher != Launcher::ssh && std::getenv("SLURM_JOB_ID") && std::getenv("SLURM_JOB_NODELIST");
}

/// Without -n, DeepSpeed's hostfile has the hosts where a cluster has put one. A filter of this host alone
/// needs none.
bool takes_default_file(const CommandLine& line, const HostFlags& f, const Options& o) {
  const std::string host = f.include.substr(0, f.include.find_first_of(":@"));
  std::error_code none;
  return f.hostfile.empty() && !line.is_set("-n") && o.ranks == 0 && !has_allocation(o) &&
         (f.include.empty() || !hosts::is_this_host(host)) && std::filesystem::exists(f.default_file, none);
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
std::vector<Host> all_hosts(const HostFlags& f, const Options& o) {
  if (f.hostfile.empty()) return has_allocation(o) ? hosts_of_allocation() : of_this_host(f.include);
  auto all = hosts::read_hostfile(f.hostfile);
  if (o.launcher != Launcher::slurm) return all;
  const auto allocation = nodes_of_allocation();
  for (const Host& h : all)
    require(std::ranges::count(allocation, h.name) > 0, Errc::config, f.hostfile, ": host '", h.name,
            "' is not in this allocation of Slurm; leave --hostfile out, or name its nodes");
  return all;
}

void check_flags(const CommandLine& line, const HostFlags& f, const Options& o) {
  const bool filtered = line.is_set("--include") || line.is_set("--exclude"),
             counted = line.is_set("--num_nodes") || line.is_set("--num_gpus");
  require(!line.is_set("--include") || !line.is_set("--exclude"), Errc::config,
          "--include and --exclude exclude each other; give one");
  require(!filtered || !counted, Errc::config, line.is_set("--include") ? "--include" : "--exclude", " and ",
          line.is_set("--num_nodes") ? "--num_nodes" : "--num_gpus", " exclude each other; give one");
  require(
      !line.is_set("-n") || !line.is_set("--num_gpus"), Errc::config,
      "-n and --num_gpus exclude each other; -n N counts the ranks of all hosts, --num_gpus K those of each");
  if (!f.hostfile.empty() || has_allocation(o)) return;
  require(o.launcher != Launcher::slurm, Errc::config,
          "--launcher slurm: SLURM_JOB_NODELIST is missing, which names the nodes of the allocation");
  require(o.launcher == Launcher::ssh, Errc::config, "--launcher openmpi needs --hostfile FILE");
  require(!line.is_set("--exclude"), Errc::config, "--exclude needs --hostfile FILE; there is no ",
          f.default_file);
  require(f.num_nodes <= 1, Errc::config, "--num_nodes ", f.num_nodes, " needs --hostfile FILE; there is no ",
          f.default_file);
  for (const auto& [is_set, name] : {std::pair(!o.rsh.empty(), "--rsh"),
                                     {o.ssh_port != 0, "--ssh_port"},
                                     {!o.launcher_args.empty(), "--launcher_args"}})
    require(!is_set, Errc::config, name, " needs --hostfile FILE: one host needs no connection");
}

/// Outside of Slurm, slots are the numbers of all devices of a host.
void note_replaced_devices(const std::vector<Host>& all, Options& o) {
  const char* const own = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!own || !*own || o.launcher == Launcher::slurm || devices_of_slurm()) return;
  for (const Host& h : all)
    if (const std::string slots = h.filtered ? devices_of_slots(h.slots, {}) : own; slots != own) {
      o.notes.push_back(concat("the slots of ", h.name, " replace CUDA_VISIBLE_DEVICES=", own, " by ", slots,
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

/// What a filter of this host, or one whose agent finds it, means.
std::string describe_devices(const Options& o, const Host& h) {
  if (!o.devices.empty()) return "; CUDA_VISIBLE_DEVICES=" + o.devices;
  if (!h.filtered) return "";
  return concat(o.launcher == Launcher::slurm ? "; of the devices that Slurm gives it numbers "
                                              : "; CUDA_VISIBLE_DEVICES=",
                devices_of_slots(h.slots, {}));
}

/// A host, its ranks, their devices, and what starts its agent.
std::string describe_host(const Options& o, const Host& h, int first, std::size_t count) {
  std::string text = concat(h.name, ": ", ranks_text(first, static_cast<int>(count)), describe_devices(o, h));
  if (!o.nodes.empty() && o.launcher == Launcher::ssh)
    text += concat("; agent: ", join(agent_command(o, h.name)));
  return text + "\n";
}

/// Variables of the ranks that flags fix.
std::string describe_variables(const Options& o) {
  std::string text;
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += concat(text.empty() ? "" : ", ", name, "=", value);
  };
  if (!o.rendezvous) add("MASTER_ADDR", o.master_addr);  // node 0 chooses both for all hosts
  if (!o.rendezvous && o.master_port) add("MASTER_PORT", concat(o.master_port));
  add("TORCHELASTIC_RUN_ID", o.run_id);
  return text.empty() ? "" : text + "\n";
}

}  // namespace

void add_host_flags(CommandLine& line, Options& o, HostFlags& f) {
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
  line.add_option("--ssh_port,--ssh-port", o.ssh_port, "ssh's port; default: its own")
      .within(1, 65535)
      .type_name("PORT")
      .group(heading);
  line.add_option("--rsh", o.rsh, "Instead of ssh; it gets the host, and a command for a shell there")
      .type_name("COMMAND")
      .group(heading);
  line.add_option("--master-addr,--master_addr", o.master_addr,
                  "MASTER_ADDR; default: an address of the first host in a network of the others")
      .type_name("ADDRESS")
      .group(heading);
  line.add_flag("--dry-run", o.dry_run, "Print what would run where, and start nothing");
}

void apply_host_flags(const CommandLine& line, const HostFlags& given, Options& o) {
  HostFlags f = given;
  if (takes_default_file(line, f, o)) {
    f.hostfile = f.default_file;
    o.notes.push_back(
        concat("hosts of ", f.hostfile, ", as with DeepSpeed; -n N starts ranks on this host alone"));
  }
  check_flags(line, f, o);
  const bool has_file = !f.hostfile.empty() || has_allocation(o);
  if (!has_file && f.include.empty()) {
    if (f.num_gpus) o.ranks = f.num_gpus;
    if (f.force_multi && o.ranks > 0) o.nodes = of_ranks({of_all_slots("localhost")}, o.ranks);
    return;
  }
  auto all = all_hosts(f, o);
  if (has_file && (line.is_set("--include") || !f.include.empty())) all = hosts::include(all, f.include);
  if (line.is_set("--exclude") || !f.exclude.empty()) all = hosts::exclude(all, f.exclude);
  if (f.num_nodes) all = hosts::first_nodes(std::move(all), f.num_nodes);
  if (f.num_gpus) {
    auto chosen = hosts::first_slots(all, f.num_gpus);
    // Slurm chooses the devices of a host; ranks take the first of these.
    for (std::size_t i = 0; o.launcher == Launcher::slurm && i < all.size(); ++i)
      chosen[i].filtered = all[i].filtered;
    all = std::move(chosen);
  }
  if (line.is_set("-n")) all = of_ranks(std::move(all), o.ranks);
  o.ranks = 0;
  for (const Host& h : all) o.ranks += static_cast<int>(h.slots.size());
  note_replaced_devices(all, o);
  if (!f.force_multi && all.size() == 1 && hosts::is_this_host(all.front().name)) {
    if (all.front().filtered) o.devices = devices_of_slots(all.front().slots, devices_of_slurm());
    return;
  }
  o.nodes = std::move(all);
}

std::string describe_plan(const Options& o, const std::string& node) {
  std::vector<Host> all = o.nodes;
  if (all.empty()) all = {{"this host", std::vector<int>(static_cast<std::size_t>(o.ranks)), false}};
  std::string text = concat(o.ranks, o.ranks == 1 ? " rank" : " ranks", o.rendezvous ? " on this host" : "",
                            " of: ", join(o.command), "\n");
  text += node;
  int first = 0;
  for (const Host& h : o.rendezvous ? std::vector<Host>() : all) {
    const std::size_t count = o.nodes.empty() ? static_cast<std::size_t>(o.ranks) : h.slots.size();
    text += describe_host(o, h, first, count);
    first += static_cast<int>(count);
  }
  text += describe_variables(o);
  if (!o.nodes.empty() && o.launcher != Launcher::ssh)
    text += concat("agents: ", join(launcher_command(o)), "\n");
  for (const std::string& line : o.plan) text += line + "\n";
  return text;
}

}  // namespace rz::rzrun
