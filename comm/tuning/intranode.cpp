#include "comm/tuning/intranode.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::tuning {

namespace {

constexpr std::size_t KiB = 1024;

using enum Collective;
using enum Scope;

// Exchanging buffer handles costs one slot round trip, hence the 2 KiB threshold. Rooted collectives have no
// such round trip otherwise, hence their higher thresholds.
constexpr Rule table[] = {
    {.collective = all_reduce,
     .scope = intra_node,
     .algorithm = "one_shot",
     .max_ranks = 2,
     .max_bytes = 64 * KiB},
    {.collective = all_reduce, .scope = intra_node, .algorithm = "one_shot", .max_bytes = 32 * KiB},
    {.collective = all_reduce, .scope = intra_node, .algorithm = "two_shot"},
    {.collective = reduce_scatter, .scope = intra_node, .algorithm = "staged"},
    {.collective = all_gather, .scope = intra_node, .algorithm = "staged"},
    {.collective = broadcast, .scope = intra_node, .algorithm = "staged"},
    {.collective = reduce, .scope = intra_node, .algorithm = "staged"},
    {.collective = gather, .scope = intra_node, .algorithm = "staged"},
    {.collective = scatter, .scope = intra_node, .algorithm = "staged"},
    {.collective = all_to_all, .scope = intra_node, .algorithm = "staged"},
    {.collective = all_to_all_v, .scope = intra_node, .algorithm = "staged"},
    {.collective = barrier, .scope = intra_node, .algorithm = "staged"},

    {.collective = all_reduce,
     .scope = intra_node_registered,
     .algorithm = "staged",
     .max_bytes = 2 * KiB - 1},
    {.collective = all_reduce, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = reduce_scatter,
     .scope = intra_node_registered,
     .algorithm = "staged",
     .max_bytes = 2 * KiB - 1},
    {.collective = reduce_scatter, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = all_gather,
     .scope = intra_node_registered,
     .algorithm = "staged",
     .max_bytes = 8 * KiB - 1},
    {.collective = all_gather, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = broadcast,
     .scope = intra_node_registered,
     .algorithm = "staged",
     .max_bytes = 16 * KiB - 1},
    {.collective = broadcast, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = reduce, .scope = intra_node_registered, .algorithm = "staged", .max_bytes = 16 * KiB - 1},
    {.collective = reduce, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = gather, .scope = intra_node_registered, .algorithm = "staged", .max_bytes = 64 * KiB - 1},
    {.collective = gather, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = scatter, .scope = intra_node_registered, .algorithm = "staged", .max_bytes = 16 * KiB - 1},
    {.collective = scatter, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = all_to_all,
     .scope = intra_node_registered,
     .algorithm = "staged",
     .max_bytes = 2 * KiB - 1},
    {.collective = all_to_all, .scope = intra_node_registered, .algorithm = "zero_copy"},
    {.collective = all_to_all_v, .scope = intra_node_registered, .algorithm = "staged"},
    {.collective = barrier, .scope = intra_node_registered, .algorithm = "staged"},

    {.collective = all_gather, .scope = intra_node_cma, .algorithm = "adaptive", .min_bytes = 64 * KiB - 1},
    {.collective = broadcast, .scope = intra_node_cma, .algorithm = "adaptive", .min_bytes = 64 * KiB - 1},
    {.collective = gather, .scope = intra_node_cma, .algorithm = "adaptive", .min_bytes = 64 * KiB - 1},
    {.collective = scatter, .scope = intra_node_cma, .algorithm = "adaptive", .min_bytes = 64 * KiB - 1},
    {.collective = all_to_all, .scope = intra_node_cma, .algorithm = "adaptive", .min_bytes = 64 * KiB - 1},
};

/// Resolves the rules for one group size.
class Resolver {
 public:
  Resolver(int size, const std::vector<Rule>& tuned, const std::string& name, bool deterministic,
           ReductionOrder order)
      : size_(size), name_(name), deterministic_(deterministic), order_(order), rules_(tuned) {
    rules_.insert(rules_.end(), std::begin(table), std::end(table));
  }

  /// Entries by ascending size; each limit is a limit of some rule.
  std::vector<IntranodeAlgorithm> resolve_all(Collective c) const {
    std::vector<IntranodeAlgorithm> found;
    for (const std::size_t bytes : limits(c)) {
      IntranodeAlgorithm entry = resolve(c, bytes);
      if (!found.empty() && found.back().same_algorithm(entry))
        found.back().max_bytes = bytes;
      else
        found.push_back(std::move(entry));
    }
    return found;
  }

  std::vector<IntranodeAlgorithm> forced(Collective c, const std::string& algorithm) const {
    const std::string why = concat("forced: ", name(c), "=", algorithm);
    const bool zero_copy = algorithm == "zero_copy";
    if (zero_copy || algorithm == "single_copy") {
      auto found = resolve_all(c);
      for (IntranodeAlgorithm& entry : found) {
        entry.forced = true;
        entry.reason += concat("; ", algorithm, " is forced, but not all of the memory can be ",
                               zero_copy ? "reached" : "read");
        if (zero_copy)
          entry.try_zero_copy = true, entry.zero_copy_reason = why;
        else
          entry.single_copy = SingleCopyPolicy::always, entry.single_copy_reason = why;
      }
      return found;
    }
    Rule rule{c, intra_node, ""};
    set_algorithm(rule, algorithm);
    IntranodeAlgorithm entry;
    use(rule, entry);
    entry.reason = why;
    return {entry};
  }

 private:
  std::vector<std::size_t> limits(Collective c) const {
    std::vector<std::size_t> all{any_bytes};
    for (const Rule& r : rules_) {
      if (r.collective != c || !is_intra_node(r.scope)) continue;
      all.push_back(r.max_bytes);
      if (r.min_bytes > 0) all.push_back(r.min_bytes);
      if (r.max_traffic != any_bytes) all.push_back(r.max_traffic / static_cast<std::size_t>(size_));
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

  IntranodeAlgorithm resolve(Collective c, std::size_t bytes) const {
    IntranodeAlgorithm entry{.max_bytes = bytes};
    const auto find = [&](Scope scope) {
      return find_rule(rules_, {c, scope, bytes, size_}, deterministic_, order_);
    };
    const Rule* const any = find(intra_node);
    const Rule* const registered = find(intra_node_registered);
    if (any) use(*any, entry);  // null for send and recv
    const Rule* const cma = find(intra_node_cma);
    if (entry.schedule) return entry;
    if (registered && std::string_view(registered->algorithm) == "zero_copy") {
      entry.try_zero_copy = true;
      entry.zero_copy_reason = reason(*registered);
    }
    if (cma) use_single_copy(*cma, entry);
    return entry;
  }

  void use_single_copy(const Rule& rule, IntranodeAlgorithm& entry) const {
    const std::string_view algorithm = rule.algorithm;
    if (algorithm == "staged") return;
    entry.single_copy = algorithm == "adaptive" ? SingleCopyPolicy::adaptive : SingleCopyPolicy::always;
    entry.single_copy_reason = reason(rule);
  }

  void use(const Rule& rule, IntranodeAlgorithm& entry) const {
    const std::string_view algorithm = rule.algorithm;
    entry.schedule = rule.is_schedule ? &schedule::find_algorithm(rule.collective, algorithm) : nullptr;
    entry.two_shot = !rule.is_schedule && algorithm == "two_shot";
    entry.chunk = rule.chunk;
    entry.slice = rule.slice;
    entry.reason = reason(rule);
  }

  std::string reason(const Rule& rule) const { return source_prefix(rule, name_) + to_string(rule); }

  int size_;
  const std::string& name_;
  bool deterministic_;
  ReductionOrder order_;
  std::vector<Rule> rules_;
};

}  // namespace

bool IntranodeAlgorithm::same_algorithm(const IntranodeAlgorithm& o) const {
  return schedule == o.schedule && two_shot == o.two_shot && try_zero_copy == o.try_zero_copy &&
         forced == o.forced && single_copy == o.single_copy && chunk == o.chunk && slice == o.slice &&
         reason == o.reason && zero_copy_reason == o.zero_copy_reason &&
         single_copy_reason == o.single_copy_reason;
}

IntranodeTable::IntranodeTable(int size) : IntranodeTable(size, {}, "", {}, true) {}

IntranodeTable::IntranodeTable(int size, const std::vector<Rule>& tuned, const std::string& name,
                               const AlgorithmOverrides& forced, bool deterministic, ReductionOrder order)
    : order_(order) {
  const Resolver resolver(size, tuned, name, deterministic, order);
  for (int i = 0; i < collective_count; ++i) {
    const Collective c{static_cast<std::uint8_t>(i)};
    auto& entries = algorithms_[static_cast<std::size_t>(i)];
    entries = forced.of(c).empty() ? resolver.resolve_all(c) : resolver.forced(c, forced.of(c));
    for (const IntranodeAlgorithm& entry : entries)
      has_schedule_[static_cast<std::size_t>(i)] |= entry.schedule != nullptr;
  }
}

}  // namespace rz::tuning
