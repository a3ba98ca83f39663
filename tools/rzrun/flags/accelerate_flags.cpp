#include "tools/rzrun/flags/accelerate_flags.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/flags/launchers.h"

namespace rz::rzrun {
namespace {

using accelerate::FlagKind;
using accelerate::Key;

/// "--zero_stage,--zero-stage".
std::string names_of(const Key& key) {
  std::string dashed = concat("--", key.name);
  std::ranges::replace(dashed, '_', '-');
  const std::string name = concat("--", key.name);
  return dashed == name ? name : concat(name, ",", dashed);
}

/// What the user chose by flags of rzrun itself.
accelerate::Typed typed_of(const CommandLine& line, const TorchrunFlags& t) {
  const auto any = [&](std::initializer_list<const char*> flags) {
    return std::ranges::any_of(flags, [&](const char* flag) { return line.is_set(flag); });
  };
  accelerate::Typed typed;
  typed.hosts = any({"--hostfile", "--include", "--exclude", "--num_nodes", "--standalone"});
  typed.ranks = typed.hosts || any({"-n", "--num_gpus", "--nproc-per-node"});
  if (any({"--standalone"})) typed.ranks = any({"-n", "--nproc-per-node"});
  if (line.is_set("--nnodes")) typed.nnodes = parse_nnodes(t.nnodes, "--nnodes").second;
  return typed;
}

void take_hosts(const CommandLine& line, bool on_each_host, accelerate::Launch& launch, Options& o,
                HostFlags& h) {
  const auto take = [&](const char* flag, std::string& value) {
    const auto found = launch.flags.extract(flag);
    if (found && !line.is_set(flag)) value = found.mapped().value;
  };
  take("--hostfile", h.hostfile);
  take("--include", h.include);
  take("--exclude", h.exclude);
  std::string launcher;
  take("--launcher", launcher);
  if (!launcher.empty()) apply_launcher(launcher, "", o);
  std::string each;
  take("--num_gpus", each);
  if (!each.empty()) h.num_gpus = parse_number<int>(each).value_or(0);
  if (on_each_host) return;  // torchrun's flags have the address of node 0
  std::string port;
  take("--master-addr", o.master_addr);
  take("--master-port", port);
  if (!port.empty()) o.master_port = parse_number<int>(port).value_or(0);
}

}  // namespace

void add_accelerate_flags(CommandLine& line, AccelerateFlags& f) {
  const std::string heading = "Accelerate's file and flags";
  line.add_option("--config_file,--config-file", f.file,
                  "Accelerate's file (YAML): ranks, hosts, devices, and a DeepSpeed configuration or FSDP's "
                  "keys, handed on in RZ_CONFIG; flags win")
      .type_name("FILE")
      .group(heading);
  for (const Key& key : accelerate::keys()) {
    f.values.emplace_back();
    f.toggles.push_back(false);
    const std::string names = key.name == "quiet" ? "-q,--quiet" : names_of(key), what(key.help);
    if (key.flag == FlagKind::toggle)
      line.add_flag(names, f.toggles.back(), what).group(key.help.empty() ? "" : heading);
    else if (key.flag == FlagKind::value)
      line.add_option(names, f.values.back(), what).type_name("VALUE").group(key.help.empty() ? "" : heading);
  }
}

void apply_accelerate_flags(const CommandLine& line, AccelerateFlags& f, Options& o, TorchrunFlags& t,
                            HostFlags& h) {
  accelerate::Values values;
  if (line.is_set("--config_file")) values.read_file(accelerate::read_yaml(f.file), f.file);
  bool any = line.is_set("--config_file");
  for (std::size_t i = 0; i < accelerate::keys().size(); ++i) {
    const Key& key = accelerate::keys()[i];
    if (key.flag == FlagKind::none || !line.is_set(concat("--", key.name))) continue;
    values.set_flag(key, key.flag == FlagKind::toggle ? "true" : f.values[i]);
    any = true;
  }
  if (!any) return;
  const accelerate::Typed typed = typed_of(line, t);
  accelerate::Launch launch = launch_of(values, typed);
  take_hosts(line, typed.nnodes > 1 || launch.flags.contains("--nnodes"), launch, o, h);
  t.of_file = std::move(launch.flags);
  f.devices = std::move(launch.devices);
  o.variables = std::move(launch.variables);
  o.notes.insert(o.notes.end(), launch.notes.begin(), launch.notes.end());
  o.plan.insert(o.plan.end(), launch.plan.begin(), launch.plan.end());
}

void apply_devices(const AccelerateFlags& f, Options& o) {
  if (f.devices.empty()) return;
  require(o.nodes.empty(), Errc::config,
          "gpu_ids is of one host, and a hostfile has several; name devices with --include HOST:SLOT,SLOT");
  const std::string text = devices_of_slots(f.devices, devices_of_slurm());
  if (!o.rendezvous) {
    o.devices = text;
    return;
  }
  o.plan.push_back("CUDA_VISIBLE_DEVICES=" + text);
  o.variables.emplace_back("CUDA_VISIBLE_DEVICES", text);
}

}  // namespace rz::rzrun
