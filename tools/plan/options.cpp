#include "tools/plan/options.h"

#include <array>
#include <charconv>
#include <string>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "tools/lm_flags/lm_flags.h"

namespace rz::plan {
namespace {

constexpr const char* description =
    "Predicts what each rank of a training run holds, by category, and what it sends in an update.\n"
    "Nothing is trained, and neither the memory nor the ranks nor the devices of the run are needed.\n\n"
    "  plan --model config.json --config ds.json --ranks 4               one run\n"
    "  plan --model config.json --config ds.json --ranks 1,2,4,8         side by side\n"
    "  plan --model config.json --config ds.json --ranks 4 --memory 16GiB    does it fit, and what would?\n"
    "  plan --model config.json --config ds.json --ranks 8 --mesh replicate=2    copies, each divided\n"
    "  plan --model config.json --config ds.json --ranks 8 --mesh tp=2           ranks share layers\n\n"
    "With --memory, every number of copies and every tp that divides a node and the model is planned. A\n"
    "mesh is proposed: the smallest tp that fits, which exchanges the least activations, and of it the\n"
    "most copies.\n\n"
    "The run is that of train_lm with the same flags.";

constexpr const char* footer =
    "Categories:\n"
    "  parameters        values that forward and backward read; the 16-bit ones in mixed precision\n"
    "  masters           f32 copies of the values that a rank updates, in mixed precision\n"
    "  gradients         and what optimizers keep: optimizer state\n"
    "  transient         ZeRO: gathered parameters, whole gradients until reduced, wire format, tiles\n"
    "  activations       what the tape holds: outputs of operators, and gradients of them\n"
    "  offloaded …       in host memory, beside a device\n\n"
    "Bytes are those of a run after some updates, with what it caches; a run on the host holds exactly so\n"
    "much, except for reductions that overlap with backward, whose transient bytes vary. Not included:\n"
    "the loader's batches, memory of communicators and libraries, and on a GPU its context and the\n"
    "padding of rows.\n\n"
    "Bytes sent in an update are those of gradients, values, module buffers, norms (of gradients, and of\n"
    "parameters for Lamb), directions of matrices (Muon), of what ranks agree on in a pass, and of what\n"
    "layers exchange where ranks share them (tp: activations, and parts of losses); exact for algorithms\n"
    "that send the minimum (ring, and one copy within a node), the mean over the ranks for a broadcast.\n"
    "Reports of losses and checkpoints add some bytes that are not included.\n\n"
    "Exit status: 0 done, 1 a rank needs more than --memory, 2 an input is wrong.";

int rank_count(const std::string& word) {
  int n = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), n);
  require(error == std::errc() && end == word.data() + word.size() && n >= 1 && n <= 65536, Errc::config,
          "--ranks: '", word, "' is no number of ranks; give numbers from 1 to 65536, as in 1,2,4,8");
  return n;
}

Device::Kind device_kind(const std::string& name) {
  if (name == "host") return Device::host;
  require(name == "cuda" || name.starts_with("cuda:"), Errc::config, "--device: '", name,
          "' is no device; choose host or cuda");
  return Device::cuda;
}

}  // namespace

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& o = parsed.options;
  std::string ranks = "1", device = "host", memory, decay;
  constexpr std::array groups{ArgumentGroup::configuration};
  CommandLine line(description, "plan", footer);
  line.column_width(34);
  line.add_option("--ranks", ranks, "Numbers of ranks, e.g. 4 or 1,2,4,8; default 1")
      .type_name("N,…")
      .group("Plan");
  line.add_option(
          "--ranks-per-node", o.ranks_per_node,
          "A node fills the inner of two auto of --mesh, and limits a proposed tp; default: all ranks")
      .type_name("N")
      .within(1, 65536)
      .group("Plan");
  line.add_option("--memory", memory, "What a rank may hold, e.g. 16GiB: shows what fits, and what would")
      .type_name("SIZE")
      .group("Plan");
  line.add_option("--device", device, "Device of the run: host (default) or cuda")
      .type_name("NAME")
      .group("Plan");
  line.add_flag("--json", o.json, "Print JSON with exact bytes of every rank").group("Plan");
  lm::add_run_flags(line, o.run, decay);
  parsed.help = lm::parse_words(line, o.run, groups, argc, argv);
  if (!parsed.help.empty()) return parsed;
  lm::require_configuration(o.run);
  lm::read_words(o.run, decay);
  o.ranks.clear();
  for (const std::string& word : split_at_commas(ranks)) o.ranks.push_back(rank_count(word));
  o.device = device_kind(device);
  if (!memory.empty()) o.memory = byte_size_of_flag("--memory", memory, 1);
  if (!o.run.steps) o.run.steps = 1;  // schedules need a number, which changes nothing here
  return parsed;
}

}  // namespace rz::plan
