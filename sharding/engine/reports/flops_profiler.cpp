#include "sharding/engine/reports/flops_profiler.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/core/text.h"
#include "sharding/io/file.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz {
namespace {

/// "12.35 M"
std::string with_unit(double value) {
  constexpr std::pair<double, const char*> units[] = {{1e12, " T"}, {1e9, " G"}, {1e6, " M"}, {1e3, " K"}};
  for (const auto& [size, unit] : units)
    if (value >= size) return fixed(value / size, 2) + unit;
  return fixed(value, 0);
}
std::string with_unit(std::uint64_t value) { return with_unit(static_cast<double>(value)); }

/// Empty for 0: the time is that of a scope around.
std::string milliseconds(double seconds) { return seconds > 0 ? fixed(seconds * 1e3, 2) : ""; }

std::string row(std::string text, std::initializer_list<std::string> cells) {
  constexpr std::size_t name_width = 36, width = 14;
  text.resize(std::max(text.size(), name_width), ' ');
  for (const std::string& cell : cells) text += std::string(width - std::min(width, cell.size()), ' ') + cell;
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

std::string row(const char* name, std::uint64_t macs, double seconds) {
  const double operations = 2 * static_cast<double>(macs);
  return row(name, {with_unit(macs), with_unit(operations), milliseconds(seconds),
                    macs && seconds > 0 ? with_unit(operations / seconds) : ""});
}

/// A module or scope with all below it.
struct Node {
  std::string name;  ///< "" is the whole
  int depth = 0;
  std::size_t parameters = 0;
  Tape::Cost cost{};
};

void add(Tape::Cost& to, const Tape::Cost& cost) {
  to.forward_macs += cost.forward_macs, to.backward_macs += cost.backward_macs;
  to.forward_seconds += cost.forward_seconds, to.backward_seconds += cost.backward_seconds;
}

std::uint64_t macs(const Node& n) { return n.cost.forward_macs + n.cost.backward_macs; }

/// Names of modules above, and its own.
std::vector<std::string> names_above(const std::string& name) {
  std::vector<std::string> all{""};
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1))
    all.push_back(name.substr(0, dot));
  if (!name.empty()) all.push_back(name);
  return all;
}

std::size_t parameters_of(Module& module, const std::string& name) {
  std::size_t below = 0, in_scope = 0;
  for (const Parameter* p : module.parameters())
    if (name.empty() || p->name.starts_with(name + ".")) below += p->count();
  for (const Scope* scope : module.scopes())
    if (scope->name == name)
      for (const Parameter* p : scope->parameters) in_scope += p->count();
  return below > 0 ? below : in_scope;
}

std::map<std::string, Node> nodes_of(const Tape::Profile& profile, Module& module) {
  std::map<std::string, Node> nodes;
  for (const auto& [part, cost] : profile) {
    int depth = 0;
    for (const std::string& name : names_above(part)) {
      Node& node = nodes[name];
      node.name = name, node.depth = depth++;
      add(node.cost, cost);
    }
  }
  for (auto& [name, node] : nodes) node.parameters = parameters_of(module, name);
  return nodes;
}

/// The node and those below it; among siblings the largest come first.
std::string tree(const std::map<std::string, Node>& nodes, const Node& node, int max_depth) {
  const std::size_t dot = node.name.rfind('.');
  const std::string name =
      node.name.empty() ? "model" : node.name.substr(dot == node.name.npos ? 0 : dot + 1);
  const double share =
      static_cast<double>(macs(node)) / static_cast<double>(std::max<std::uint64_t>(1, macs(nodes.at(""))));
  std::string text = row(std::string(2 * static_cast<std::size_t>(node.depth), ' ') + name,
                         {with_unit(std::uint64_t{node.parameters}), with_unit(node.cost.forward_macs),
                          with_unit(node.cost.backward_macs), fixed(100 * share, 1) + "%",
                          milliseconds(node.cost.forward_seconds), milliseconds(node.cost.backward_seconds)});
  if (node.depth == max_depth) return text;
  std::vector<const Node*> below;
  for (const auto& [path, n] : nodes)
    if (n.depth == node.depth + 1 && (node.name.empty() || path.starts_with(node.name + ".")))
      below.push_back(&n);
  std::ranges::sort(below, [](const Node* a, const Node* b) {
    return std::tuple(macs(*b), a->name.size(), a->name) < std::tuple(macs(*a), b->name.size(), b->name);
  });
  for (const Node* n : below) text += tree(nodes, *n, max_depth);
  return text;
}

/// "transformer.h 12.35 M, transformer.head 3.15 M", the largest by a value; those without one are left out.
template <class Value, class Text>
std::string largest(std::vector<const Node*> nodes, std::int64_t count, const Value& value,
                    const Text& text_of) {
  std::ranges::stable_sort(nodes, [&](const Node* a, const Node* b) { return value(*a) > value(*b); });
  std::string text;
  for (std::size_t i = 0; i < nodes.size() && static_cast<std::int64_t>(i) < count; ++i)
    if (const auto v = value(*nodes[i]); v > 0)
      text += concat(text.empty() ? "" : ", ", nodes[i]->name.empty() ? "model" : nodes[i]->name, ' ',
                     text_of(v));
  return text;
}

std::string top_modules(const std::map<std::string, Node>& nodes, int max_depth, std::int64_t count) {
  const auto unit = [](std::uint64_t value) { return with_unit(value); };
  const auto ms = [](double seconds) { return fixed(seconds * 1e3, 3); };
  std::string text;
  for (int depth = 0; depth <= max_depth; ++depth) {
    std::vector<const Node*> here;
    for (const auto& [name, node] : nodes)
      if (node.depth == depth) here.push_back(&node);
    const std::string products = largest(here, count, macs, unit);
    const std::string parameters = largest(
        here, count, [](const Node& n) { return std::uint64_t{n.parameters}; }, unit);
    const std::string times = largest(
        here, count, [](const Node& n) { return n.cost.forward_seconds; }, ms);
    text += concat("top of depth ", depth, ": MACs: ", products, "; parameters: ", parameters,
                   times.empty() ? "" : "; forward ms: ", times, "\n");
  }
  return text;
}

}  // namespace

FlopsProfiler::FlopsProfiler(const FlopsProfilerConfig& config, World& world, Module& module, Tape& tape,
                             std::int64_t micro_batches, std::string prefix, std::FILE* log)
    : config_(config),
      world_(world),
      module_(module),
      tape_(tape),
      micro_batches_(micro_batches),
      prefix_(std::move(prefix)),
      log_(log) {}

void FlopsProfiler::begin_run(std::int64_t step) {
  if (std::exchange(begun_, true) || step > config_.profile_step || config_.output_file.empty()) return;
  check_on_all_ranks(world_.communicator(), [&] {
    if (world_.is_main())
      write_durably(config_.output_file, "");  // an earlier run's is not taken for this one's
  });
}

void FlopsProfiler::begin_update(std::int64_t step) {
  profile_.clear();
  seconds_ = {};
  profiling_ = step == config_.profile_step;
  tape_.set_profile(profiling_ ? &profile_ : nullptr);
}

void FlopsProfiler::add_phase(Phase phase, double seconds) {
  seconds_[static_cast<std::size_t>(phase)] += seconds;
}

std::string FlopsProfiler::describe(const StepReport& report) const {
  const std::map<std::string, Node> nodes = nodes_of(profile_, module_);
  if (nodes.empty()) return concat("flops profiler: update ", report.step + 1, " has entered no scope\n");
  int max_depth = 0;
  for (const auto& [name, node] : nodes) max_depth = std::max(max_depth, node.depth);
  if (config_.module_depth >= 0)
    max_depth = static_cast<int>(std::min<std::int64_t>(max_depth, config_.module_depth));
  const Node& whole = nodes.at("");
  const auto seconds = [&](Phase phase) { return seconds_[static_cast<std::size_t>(phase)]; };
  std::string text = concat("flops profiler: update ", report.step + 1, " on rank ", world_.rank(), " of ",
                            world_.size(), ", micro-batches: ", micro_batches_,
                            ", parameters: ", with_unit(std::uint64_t{whole.parameters}), "\n");
  text += row("", {"MACs", "FLOPs", "ms", "FLOP/s"});
  text += row("forward", whole.cost.forward_macs, seconds(Phase::forward));
  text += row("backward", whole.cost.backward_macs, seconds(Phase::backward));
  text += row("reduction", {"", "", milliseconds(seconds(Phase::reduction))});
  text += row("optimizer", {"", "", milliseconds(seconds(Phase::step))});
  text += row("update", macs(whole), report.seconds);
  text += top_modules(nodes, max_depth, config_.top_modules);
  if (!config_.detailed) return text;
  text += row("module",
              {"parameters", "forward MACs", "backward MACs", "of all MACs", "forward ms", "backward ms"});
  return text + tree(nodes, whole, max_depth);
}

void FlopsProfiler::end_update(const StepReport& report) {
  profiling_ = false;
  tape_.set_profile(nullptr);
  check_on_all_ranks(world_.communicator(), [&] {
    if (!world_.is_main()) return;
    const std::string text = describe(report);
    if (!config_.output_file.empty()) return write_durably(config_.output_file, text);
    report_ = prefix_.empty() ? text : prefix_ + "\n" + text;
    reported_ = report.step;
    if (!log_) return;
    std::fputs(report_.c_str(), log_);
    std::fflush(log_);
  });
}

}  // namespace rz
