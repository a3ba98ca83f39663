#include "comm/tuning/select.h"

#include "comm/core/error.h"

namespace rz::tuning {

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

using enum Collective;
using enum Scope;

// The first rule that matches wins; with `deterministic`, rules whose algorithm does not reduce in the
// group's order are skipped. So rules for the pairwise order alone come behind those that match in any other.
// The last rule of every collective matches every call. Intra-node, and inter-node with few ranks, the direct
// algorithms (linear, two_shot, pairwise; for two ranks one_shot, too) have the least traffic *and* the
// fewest rounds. In large inter-node groups their many small messages cost more than a few additional rounds.
// All slices of a chunk are pipelined, so a round costs the latency of a slice, not of a buffer. With several
// ranks on a node, hierarchical algorithms send less and fewer messages between nodes, at the price of more
// rounds (docs/decisions/0018).
constexpr Rule table[] = {
    {.collective = all_reduce,
     .scope = intra_node_schedule,
     .algorithm = "one_shot",
     .max_traffic = 128 * KiB},
    {.collective = all_reduce, .scope = intra_node_schedule, .algorithm = "two_shot"},
    {.collective = all_reduce,
     .scope = multi_rank_nodes,
     .algorithm = "hierarchical_chain",
     .max_ranks = 16,
     .max_bytes = MiB},
    {.collective = all_reduce,
     .scope = multi_rank_nodes,
     .algorithm = "recursive_doubling",
     .max_ranks = 16,
     .max_bytes = 32 * KiB},
    {.collective = all_reduce,
     .scope = multi_rank_nodes,
     .algorithm = "distance_doubling",
     .max_ranks = 16,
     .max_bytes = MiB},
    {.collective = all_reduce, .scope = multi_rank_nodes, .algorithm = "hierarchical", .min_bytes = MiB},
    {.collective = all_reduce,
     .scope = multi_rank_nodes,
     .algorithm = "hierarchical_chain_all_gather",
     .min_bytes = MiB},
    {.collective = all_reduce, .scope = multi_rank_nodes, .algorithm = "distance_doubling", .min_bytes = MiB},
    {.collective = all_reduce,
     .scope = inter_node,
     .algorithm = "one_shot",
     .max_ranks = 2,
     .max_bytes = 256 * KiB},
    {.collective = all_reduce,
     .scope = inter_node,
     .algorithm = "one_shot",
     .max_ranks = 8,
     .max_traffic = 256 * KiB},
    {.collective = all_reduce, .scope = inter_node, .algorithm = "two_shot", .max_ranks = 8},
    {.collective = all_reduce, .scope = inter_node, .algorithm = "tree", .max_bytes = 16 * KiB},
    {.collective = all_reduce, .scope = inter_node, .algorithm = "halving_doubling", .max_bytes = 4 * MiB},
    {.collective = all_reduce, .scope = inter_node, .algorithm = "ring"},
    {.collective = all_reduce,
     .scope = inter_node,
     .algorithm = "distance_doubling",
     .max_bytes = 4 * MiB,
     .min_ranks = 9},
    {.collective = all_reduce, .scope = inter_node, .algorithm = "one_shot", .max_traffic = 64 * KiB},
    {.collective = all_reduce, .scope = any, .algorithm = "two_shot"},

    {.collective = reduce_scatter, .scope = intra_node_schedule, .algorithm = "linear"},
    {.collective = reduce_scatter,
     .scope = multi_rank_nodes,
     .algorithm = "linear",
     .max_ranks = 4,
     .max_bytes = 64 * KiB},
    {.collective = reduce_scatter, .scope = multi_rank_nodes, .algorithm = "hierarchical"},
    {.collective = reduce_scatter, .scope = multi_rank_nodes, .algorithm = "hierarchical_chain"},
    {.collective = reduce_scatter, .scope = multi_rank_nodes, .algorithm = "distance_doubling"},
    {.collective = reduce_scatter, .scope = inter_node, .algorithm = "linear", .max_ranks = 8},
    {.collective = reduce_scatter, .scope = inter_node, .algorithm = "halving", .max_bytes = 4 * MiB},
    {.collective = reduce_scatter, .scope = inter_node, .algorithm = "ring"},
    {.collective = reduce_scatter,
     .scope = inter_node,
     .algorithm = "distance_doubling",
     .max_bytes = 4 * MiB,
     .min_ranks = 9},
    {.collective = reduce_scatter, .scope = any, .algorithm = "linear"},

    {.collective = all_gather, .scope = intra_node_schedule, .algorithm = "linear"},
    {.collective = all_gather, .scope = multi_rank_nodes, .algorithm = "hierarchical"},
    {.collective = all_gather, .scope = inter_node, .algorithm = "linear", .max_ranks = 8},
    {.collective = all_gather, .scope = inter_node, .algorithm = "doubling", .max_bytes = 4 * MiB},
    {.collective = all_gather, .scope = any, .algorithm = "ring"},

    {.collective = broadcast, .scope = any, .algorithm = "linear", .max_ranks = 2},
    {.collective = broadcast, .scope = intra_node_schedule, .algorithm = "linear", .max_bytes = 256 * KiB},
    {.collective = broadcast, .scope = multi_rank_nodes, .algorithm = "hierarchical_chain", .min_bytes = MiB},
    {.collective = broadcast, .scope = inter_node, .algorithm = "tree", .max_bytes = 64 * KiB},
    {.collective = broadcast, .scope = any, .algorithm = "scatter_all_gather"},

    {.collective = reduce, .scope = intra_node_schedule, .algorithm = "linear", .max_traffic = 128 * KiB},
    {.collective = reduce, .scope = intra_node_schedule, .algorithm = "two_shot"},
    {.collective = reduce,
     .scope = multi_rank_nodes,
     .algorithm = "hierarchical_chain",
     .min_bytes = 256 * KiB},
    {.collective = reduce,
     .scope = multi_rank_nodes,
     .algorithm = "distance_doubling",
     .min_bytes = 256 * KiB},
    {.collective = reduce,
     .scope = inter_node,
     .algorithm = "linear",
     .max_ranks = 8,
     .max_traffic = 64 * KiB},
    {.collective = reduce, .scope = inter_node, .algorithm = "tree", .max_bytes = 64 * KiB},
    {.collective = reduce, .scope = any, .algorithm = "two_shot"},

    {.collective = gather, .scope = any, .algorithm = "linear"},
    {.collective = scatter, .scope = any, .algorithm = "linear"},
    {.collective = all_to_all, .scope = any, .algorithm = "pairwise"},
    {.collective = all_to_all_v, .scope = any, .algorithm = "pairwise"},
    {.collective = barrier, .scope = any, .algorithm = "dissemination"},
};

Scope scope_of(const SelectionQuery& q) {
  if (q.intra_node) return intra_node_schedule;
  return q.nodes > 1 && q.nodes < q.size ? multi_rank_nodes : inter_node;
}

bool ordered(const schedule::Algorithm& algorithm, const SelectionQuery& q) {
  return algorithm.reduces_in(q.order) || !q.deterministic || !traits(q.collective).reduces;
}

// If partial sums are rounded, the result depends on the algorithm of that size and on the placement of
// ranks.
bool allowed(const schedule::Algorithm& algorithm, const SelectionQuery& q) {
  const bool depends = q.rounds_partials && q.deterministic && traits(q.collective).reduces &&
                       algorithm.is(schedule::rounds_partials);
  return ordered(algorithm, q) && !depends &&
         (q.contiguous_nodes || !algorithm.is(schedule::contiguous_nodes));
}

const schedule::Algorithm& forced(const SelectionQuery& q) {
  const schedule::Algorithm& algorithm = schedule::find_algorithm(q.collective, q.override_name);
  require(q.contiguous_nodes || !algorithm.is(schedule::contiguous_nodes), Errc::config, "the ",
          name(q.collective), " algorithm '", q.override_name,
          "' serves only groups whose nodes hold consecutive ranks; number the ranks node by node");
  if (ordered(algorithm, q)) return algorithm;
  std::string choices;
  for (const schedule::Algorithm& a : schedule::algorithms())
    if (a.collective == q.collective && a.reduces_in(q.order))
      choices += concat(choices.empty() ? "" : ", ", a.name);
  fail(Errc::config, "the ", name(q.collective), " algorithm '", q.override_name, "' does not sum in ",
       name(q.order), " order, which `deterministic` requires; choose one of ", choices,
       ", or switch `deterministic` off (RZ_DETERMINISTIC=0)");
}

}  // namespace

const schedule::Algorithm& select(const SelectionQuery& q) { return *select_by_rule(q).algorithm; }

std::span<const Rule> built_in_rules() { return table; }

SelectedAlgorithm select_by_rule(const SelectionQuery& q) {
  require(q.size >= 1, Errc::invalid_argument, "no algorithm for a group of ", q.size);
  if (!q.override_name.empty()) return {&forced(q)};
  const RuleQuery query{q.collective, scope_of(q), q.bytes, q.size};
  for (const std::span<const Rule> rules : {q.file_rules, built_in_rules()})
    for (const Rule& rule : rules) {
      if (!matches(rule, query)) continue;
      const schedule::Algorithm& algorithm = schedule::find_algorithm(q.collective, rule.algorithm);
      if (allowed(algorithm, q)) return {&algorithm, rule.slice, &rule};
    }
  fail(Errc::invalid_argument, name(q.collective), " takes no algorithm");
}

}  // namespace rz::tuning
