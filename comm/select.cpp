#include "comm/select.h"

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

using Rule = TuningRule;

using enum Collective;
using enum Where;

// The first line that fits wins; with `deterministic`, lines whose algorithm does not sum in rank order are
// passed over. Every collective ends with a line that always fits. On one host, and on a network of few
// ranks, the direct algorithms have the least traffic *and* the fewest rounds; of two ranks one_shot, too. In
// large groups on a network, their many small messages cost more than a few more rounds do. All slices of a
// chunk are pipelined, so rounds count by slices, not buffers. Where ranks share hosts, a hierarchy sends
// less over the network, and in fewer messages, at the price of rounds (docs/decisions/0018).
constexpr Rule table[] = {
    {.collective = all_reduce, .where = one_host, .algorithm = "one_shot", .traffic = 128 * KiB},
    {.collective = all_reduce, .where = one_host, .algorithm = "two_shot"},
    {.collective = all_reduce,
     .where = shared_hosts,
     .algorithm = "hierarchical_chain",
     .size = 16,
     .bytes = MiB},
    {.collective = all_reduce, .where = shared_hosts, .algorithm = "hierarchical", .bytes_above = MiB},
    {.collective = all_reduce,
     .where = shared_hosts,
     .algorithm = "hierarchical_chain_all_gather",
     .bytes_above = MiB},
    {.collective = all_reduce, .where = network, .algorithm = "one_shot", .size = 2, .bytes = 256 * KiB},
    {.collective = all_reduce, .where = network, .algorithm = "one_shot", .size = 8, .traffic = 256 * KiB},
    {.collective = all_reduce, .where = network, .algorithm = "two_shot", .size = 8},
    {.collective = all_reduce, .where = network, .algorithm = "tree", .bytes = 16 * KiB},
    {.collective = all_reduce, .where = network, .algorithm = "halving_doubling", .bytes = 4 * MiB},
    {.collective = all_reduce, .where = network, .algorithm = "ring"},
    {.collective = all_reduce, .where = network, .algorithm = "one_shot", .traffic = 64 * KiB},
    {.collective = all_reduce, .where = anywhere, .algorithm = "two_shot"},

    {.collective = reduce_scatter, .where = one_host, .algorithm = "direct"},
    {.collective = reduce_scatter,
     .where = shared_hosts,
     .algorithm = "direct",
     .size = 4,
     .bytes = 64 * KiB},
    {.collective = reduce_scatter, .where = shared_hosts, .algorithm = "hierarchical"},
    {.collective = reduce_scatter, .where = shared_hosts, .algorithm = "hierarchical_chain"},
    {.collective = reduce_scatter, .where = network, .algorithm = "direct", .size = 8},
    {.collective = reduce_scatter, .where = network, .algorithm = "halving", .bytes = 4 * MiB},
    {.collective = reduce_scatter, .where = network, .algorithm = "ring"},
    {.collective = reduce_scatter, .where = anywhere, .algorithm = "direct"},

    {.collective = all_gather, .where = one_host, .algorithm = "direct"},
    {.collective = all_gather, .where = shared_hosts, .algorithm = "hierarchical"},
    {.collective = all_gather, .where = network, .algorithm = "direct", .size = 8},
    {.collective = all_gather, .where = network, .algorithm = "doubling", .bytes = 4 * MiB},
    {.collective = all_gather, .where = anywhere, .algorithm = "ring"},

    {.collective = broadcast, .where = anywhere, .algorithm = "direct", .size = 2},
    {.collective = broadcast, .where = one_host, .algorithm = "direct", .bytes = 256 * KiB},
    {.collective = broadcast, .where = shared_hosts, .algorithm = "hierarchical_chain", .bytes_above = MiB},
    {.collective = broadcast, .where = network, .algorithm = "tree", .bytes = 64 * KiB},
    {.collective = broadcast, .where = anywhere, .algorithm = "scatter_all_gather"},

    {.collective = reduce, .where = one_host, .algorithm = "direct", .traffic = 128 * KiB},
    {.collective = reduce, .where = one_host, .algorithm = "two_shot"},
    {.collective = reduce,
     .where = shared_hosts,
     .algorithm = "hierarchical_chain",
     .bytes_above = 256 * KiB},
    {.collective = reduce, .where = network, .algorithm = "direct", .size = 8, .traffic = 64 * KiB},
    {.collective = reduce, .where = network, .algorithm = "tree", .bytes = 64 * KiB},
    {.collective = reduce, .where = anywhere, .algorithm = "two_shot"},

    {.collective = gather, .where = anywhere, .algorithm = "direct"},
    {.collective = scatter, .where = anywhere, .algorithm = "direct"},
    {.collective = all_to_all, .where = anywhere, .algorithm = "pairwise"},
    {.collective = all_to_all_v, .where = anywhere, .algorithm = "pairwise"},
    {.collective = barrier, .where = anywhere, .algorithm = "dissemination"},
};

Where place_of(const Question& q) {
  if (q.one_host) return one_host;
  return q.hosts > 1 && q.hosts < q.size ? shared_hosts : network;
}

bool orderly(const Algorithm& algorithm, const Question& q) {
  return algorithm.rank_order || !q.deterministic || !traits(q.collective).reduces;
}

// A sum that is rounded on the way depends on which algorithm a size takes, and on who shares a host.
bool allowed(const Algorithm& algorithm, const Question& q) {
  const bool depends =
      q.rounds && q.deterministic && traits(q.collective).reduces && algorithm.is(rounds_often);
  return orderly(algorithm, q) && !depends && (q.in_a_row || !algorithm.is(in_a_row));
}

const Algorithm& forced(const Question& q) {
  const Algorithm& algorithm = find_algorithm(q.collective, q.forced);
  require(q.in_a_row || !algorithm.is(in_a_row), Errc::config, "the ", name(q.collective), " algorithm '",
          q.forced, "' serves only groups whose hosts hold consecutive ranks; number the ranks host by host");
  if (orderly(algorithm, q)) return algorithm;
  std::string choices;
  for (const Algorithm& a : algorithms())
    if (a.collective == q.collective && a.rank_order) choices += str(choices.empty() ? "" : ", ", a.name);
  fail(Errc::config, "the ", name(q.collective), " algorithm '", q.forced,
       "' does not sum in rank order, which `deterministic` asks for; choose one of ", choices,
       ", or switch `deterministic` off");
}

}  // namespace

const Algorithm& select(const Question& q) { return *select_by_rule(q).algorithm; }

std::span<const TuningRule> built_in_rules() { return table; }

Selection select_by_rule(const Question& q) {
  require(q.size >= 1, Errc::invalid_argument, "no algorithm for a group of ", q.size);
  if (!q.forced.empty()) return {&forced(q)};
  const RuleQuery query{q.collective, place_of(q), q.bytes, q.size};
  for (const std::span<const Rule> rules : {q.tuned, built_in_rules()})
    for (const Rule& rule : rules) {
      if (!matches(rule, query)) continue;
      const Algorithm& algorithm = find_algorithm(q.collective, rule.algorithm);
      if (allowed(algorithm, q)) return {&algorithm, rule.chunk, &rule};
    }
  fail(Errc::invalid_argument, name(q.collective), " takes no algorithm");
}

}  // namespace rz
