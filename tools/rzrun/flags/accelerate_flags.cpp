#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/flags/flags.h"

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
accelerate::Typed typed_of(const Flags& f) {
  accelerate::Typed typed;
  typed.hosts = f.any_typed({"--hostfile", "--include", "--exclude", "--num_nodes", "--standalone"});
  typed.ranks = typed.hosts || f.any_typed({"-n", "--num_gpus", "--nproc-per-node"});
  if (f.is_typed("--standalone")) typed.ranks = f.any_typed({"-n", "--nproc-per-node"});
  if (f.is_typed("--nnodes")) typed.nnodes = parse_nnodes(f.torchrun.nnodes, "--nnodes").second;
  return typed;
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

accelerate::Translation read_accelerate(const Flags& flags) {
  const AccelerateFlags& f = flags.accelerate;
  accelerate::Values values;
  bool any = flags.is_typed("--config_file");
  if (any) values.read_file(accelerate::read_yaml(f.file), f.file);
  for (std::size_t i = 0; i < accelerate::keys().size(); ++i) {
    const Key& key = accelerate::keys()[i];
    if (key.flag == FlagKind::none || !flags.is_typed(concat("--", key.name))) continue;
    values.set_flag(key, key.flag == FlagKind::toggle ? "true" : f.values[i]);
    any = true;
  }
  return any ? translate(values, typed_of(flags)) : accelerate::Translation();
}

}  // namespace rz::rzrun
