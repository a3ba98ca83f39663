#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <iterator>
#include <limits>
#include <map>

#include "comm/core/text.h"
#include "comm/topology.h"
#include "comm/tuning/tuning.h"
#include "tools/tune/measure.h"

namespace rz::tune {
namespace {

/// Minimal gain for a change of algorithm, in the logarithm of the ratio of times, summed over the sizes up
/// to the next change. Otherwise noise would cause half of the rules.
constexpr double switch_penalty = 0.15;

/// Times of one collective in one scope: by size and algorithm.
struct TimeTable {
  std::vector<std::string> names;
  std::map<std::size_t, std::map<std::string, double>> us;
};

TimeTable time_table_of(const Measured& m, Collective c, tuning::Scope scope) {
  TimeTable f;
  for (const Time& t : m.times) {
    if (t.candidate.collective != c || t.candidate.scope != scope) continue;
    if (std::find(f.names.begin(), f.names.end(), t.candidate.name) == f.names.end())
      f.names.push_back(t.candidate.name);
    f.us[t.bytes][t.candidate.name] = t.us;
  }
  return f;
}

/// The size between `low` and `high` at which `next` becomes faster than `now`, rounded to a readable number.
std::size_t crossing(const TimeTable& f, std::size_t low, std::size_t high, const std::string& now,
                     const std::string& next) {
  const auto ahead = [&](std::size_t at) { return std::log(f.us.at(at).at(next) / f.us.at(at).at(now)); };
  const double before = ahead(low), after = ahead(high);
  const double share = before > 0 && after <= 0 ? before / (before - after) : 0.5;
  const double bytes =
      std::pow(static_cast<double>(low), 1 - share) * std::pow(static_cast<double>(high), share);
  const auto exact = static_cast<std::size_t>(bytes);
  std::size_t grain = 1;
  while (grain * 16 <= exact) grain *= 2;  // keep four significant binary digits
  return std::clamp(exact / grain * grain, low, high - 1);
}

struct SizeRange {
  std::string name;
  std::size_t max_bytes = tuning::any_bytes;
};

/// Chooses an algorithm for each size: minimises the sum of the logarithms of times plus a penalty per
/// change.
std::vector<std::string> choose_names(const TimeTable& f, const std::vector<std::string>& names) {
  struct State {
    double cost = 0;
    std::vector<std::string> way;
  };
  std::map<std::string, State> states;
  for (const std::string& name : names) states[name];
  for (const auto& [bytes, us] : f.us) {
    const auto cheapest = std::min_element(states.begin(), states.end(), [](const auto& a, const auto& b) {
                            return a.second.cost < b.second.cost;
                          })->second;
    for (auto& [name, state] : states) {
      if (!cheapest.way.empty() && cheapest.cost + switch_penalty < state.cost)
        state = cheapest, state.cost += switch_penalty;
      state.cost += std::log(us.at(name));
      state.way.push_back(name);
    }
  }
  return std::min_element(states.begin(), states.end(),
                          [](const auto& a, const auto& b) { return a.second.cost < b.second.cost; })
      ->second.way;
}

std::vector<SizeRange> size_ranges(const TimeTable& f, const std::vector<std::string>& names) {
  std::vector<SizeRange> found;
  const std::vector<std::string> best = choose_names(f, names);
  auto at = f.us.begin();
  for (std::size_t i = 0; i < best.size(); ++i) {
    const std::size_t bytes = at->first;
    if (i > 0 && best[i] != best[i - 1])
      found.back().max_bytes = crossing(f, std::prev(at)->first, bytes, best[i - 1], best[i]);
    if (i == 0 || best[i] != best[i - 1]) found.push_back({best[i]});
    ++at;
  }
  return found;
}

bool in_rank_order(Collective c, tuning::Scope scope, const std::string& name) {
  tuning::Rule rule{c, scope, ""};
  tuning::set_algorithm(rule, name);
  return tuning::find_rule({&rule, 1}, {c, scope, 0, 1}, true) != nullptr;
}

tuning::Rule make_rule(const Measured& m, Collective c, tuning::Scope scope, const SizeRange& range,
                       std::size_t above) {
  tuning::Rule rule{c, scope, ""};
  tuning::set_algorithm(rule, range.name);
  rule.max_ranks = rule.min_ranks = m.ranks;
  rule.min_bytes = above;
  rule.max_bytes = range.max_bytes;
  rule.source = tuning::Source::file;
  return rule;
}

/// If some of the fastest algorithms do not sum in rank order, rules have both bounds, so that none applies
/// outside its own range.
void add_rules(const Measured& m, Collective c, tuning::Scope scope, std::vector<tuning::Rule>& rules) {
  const TimeTable f = time_table_of(m, c, scope);
  if (f.names.size() < 2) return;
  std::vector<std::string> ordered;
  for (const std::string& name : f.names)
    if (in_rank_order(c, scope, name)) ordered.push_back(name);
  const auto all = size_ranges(f, f.names);
  const bool one_order = std::all_of(all.begin(), all.end(),
                                     [&](const SizeRange& r) { return in_rank_order(c, scope, r.name); });
  std::size_t above = 0;
  for (const SizeRange& r : all) {
    rules.push_back(make_rule(m, c, scope, r, one_order ? 0 : above));
    above = r.max_bytes;
  }
  if (one_order || ordered.empty()) return;
  for (const SizeRange& r : size_ranges(f, ordered)) rules.push_back(make_rule(m, c, scope, r, 0));
}

/// Compares zero-copy with the best algorithm that copies.
void add_registered_rules(const Measured& m, Collective c, std::vector<tuning::Rule>& rules) {
  const TimeTable direct = time_table_of(m, c, tuning::Scope::intra_node_registered),
                  any = time_table_of(m, c, tuning::Scope::intra_node);
  TimeTable both;
  both.names = {"staged", "zero_copy"};
  for (const auto& [bytes, us] : direct.us) {
    double min_us = std::numeric_limits<double>::max();
    for (const auto& [name, other] : any.us.at(bytes)) min_us = std::min(min_us, other);
    both.us[bytes] = {{"staged", min_us}, {"zero_copy", us.at("zero_copy")}};
  }
  for (const SizeRange& r : size_ranges(both, both.names))
    rules.push_back(make_rule(m, c, tuning::Scope::intra_node_registered, r, 0));
}

}  // namespace

tuning::Table make_table(const Measured& m) {
  tuning::Table table;
  for (int i = 0; i < collective_count; ++i) {
    const Collective c{static_cast<std::uint8_t>(i)};
    add_rules(m, c, m.intra_node ? tuning::Scope::intra_node : tuning::Scope::inter_node, table.rules);
    if (m.intra_node) add_registered_rules(m, c, table.rules);
  }
  return table;
}

std::string header(const Measured& m, const Options& o) {
  char host[256] = {}, date[32] = {};
  ::gethostname(host, sizeof host - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &utc));
  return concat("# Tuning table of ringzero ", RZ_VERSION, ", measured by tune\n# host ", host, ", ",
                read_topology().processor, "\n# ", m.ranks, " ranks, ", m.backend, "\n# ", date, "; ",
                human_bytes(o.min_bytes), " to ", human_bytes(o.max_bytes), ", medians of ", o.rounds,
                " rounds\n# The first line that matches a call applies.\n");
}

}  // namespace rz::tune
