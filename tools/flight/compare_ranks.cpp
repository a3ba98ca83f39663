#include "tools/flight/compare_ranks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "comm/core/text.h"

namespace rz::flight_tool {

namespace {

using Calls = std::map<std::int64_t, Call>;

/// The calls that members of a group have recorded; null: there is no file of that rank.
using Members = std::vector<std::pair<int, const Calls*>>;

Members members_of(const GroupId& group, const std::map<int, Dump>& dumps) {
  static const Calls none;
  Members members;
  for (const int rank : group.second) {
    const auto dump = dumps.find(rank);
    if (dump == dumps.end()) {
      members.emplace_back(rank, nullptr);
      continue;
    }
    const auto calls = dump->second.groups.find(group);
    members.emplace_back(rank, calls == dump->second.groups.end() ? &none : &calls->second);
  }
  return members;
}

/// The first number at which ranks made different calls, from the first one that all of them still have on.
std::optional<std::int64_t> first_difference(const Members& members) {
  std::int64_t first = 0;
  for (const auto& [rank, calls] : members)
    if (calls && !calls->empty()) first = std::max(first, calls->begin()->first);
  std::map<std::int64_t, const std::string*> seen;
  std::optional<std::int64_t> found;
  for (const auto& [rank, calls] : members) {
    if (!calls) continue;
    for (auto at = calls->lower_bound(first); at != calls->end() && !(found && at->first >= *found); ++at) {
      const auto [before, is_new] = seen.emplace(at->first, &at->second.text);
      if (!is_new && *before->second != at->second.text) found = at->first;
    }
  }
  return found;
}

std::optional<std::int64_t> last_number(const Calls* calls) {
  if (!calls || calls->empty()) return {};
  return calls->rbegin()->first;
}

/// The call of most ranks if these are more than half of those that have made one of that number.
std::string majority_at(const Members& members, std::int64_t number) {
  std::map<std::string_view, int> votes;
  int all = 0;
  for (const auto& [rank, calls] : members)
    if (const auto at = calls ? calls->find(number) : Calls::const_iterator(); calls && at != calls->end())
      ++votes[at->second.text], ++all;
  for (const auto& [text, n] : votes)
    if (2 * n > all) return std::string(text);
  return {};
}

std::string at_line(const Call& c) { return c.line.empty() ? "" : " at " + c.line; }

/// What the rank did last, in any group.
std::string last_of(const Dump& dump) {
  const Call* last = nullptr;
  const GroupId* group = nullptr;
  for (const auto& [id, calls] : dump.groups)
    for (const auto& [number, call] : calls)
      if (!last || call.order > last->order) last = &call, group = &id;
  std::string text = last ? concat(last->state == "completed" ? "its last call was " : "it is in ",
                                   last->text, " of '", group->first, "'", at_line(*last))
                          : std::string("it has made no call");
  if (dump.update > 0) text += concat(", update ", dump.update);
  if (!dump.phase.empty()) text += ", " + dump.phase;
  return text;
}

class Comparison {
 public:
  Comparison(const GroupId& group, const std::map<int, Dump>& dumps)
      : dumps_(dumps), members_(members_of(group, dumps)), difference_(first_difference(members_)) {
    report_.name = group.first;
    for (const auto& [rank, calls] : members_)
      if (const auto n = last_number(calls); n && (!last_ || *n > *last_)) last_ = n;
    if (difference_) majority_ = majority_at(members_, *difference_);
  }

  GroupReport report() && {
    for (const auto& [rank, calls] : members_) calls ? add_rank(rank, *calls) : add_missing(rank);
    std::ranges::stable_sort(report_.places, std::greater(), [](const Place& p) { return p.ranks.size(); });
    return std::move(report_);
  }

 private:
  void add(int rank, Place place) {
    for (Place& p : report_.places)
      if (p.call == place.call && p.state == place.state && p.line == place.line &&
          p.verdict == place.verdict)
        return p.ranks.push_back(rank);
    place.ranks = {rank};
    report_.places.push_back(std::move(place));
  }
  void find(int rank, const std::string& what) { report_.findings.push_back(concat("rank ", rank, what)); }

  void add_missing(int rank) {
    add(rank, {.call = "?", .verdict = "no file"});
    find(rank,
         concat(" of '", report_.name, "' has no file: it was killed, or did not learn of the failure"));
  }

  void add_rank(int rank, const Calls& calls) {
    const auto number = difference_ ? difference_ : last_;
    const auto at = number ? calls.find(*number) : calls.end();
    if (!number) return add(rank, {.call = "no call"});
    if (at == calls.end() && !is_behind(calls, *number)) return add(rank, {.call = "?"});
    if (at == calls.end()) return add_late(rank, calls, *number);
    const Call& c = at->second;
    const bool differs = difference_ && c.text != majority_;
    add(rank, {{}, c.text, c.state, c.line, differs ? "differs" : ""});
    if (differs)
      find(rank, concat(" differs in '", report_.name, "': ", c.text, at_line(c),
                        majority_.empty() ? "; no call is that of most ranks" : "; most call " + majority_));
  }

  /// Otherwise the call is one that the file no longer has.
  static bool is_behind(const Calls& calls, std::int64_t number) {
    return calls.empty() || calls.rbegin()->first < number;
  }

  void add_late(int rank, const Calls& calls, std::int64_t number) {
    if (calls.empty())
      add(rank, {.call = "no call", .verdict = "late"});
    else
      add(rank, {{},
                 calls.rbegin()->second.text,
                 calls.rbegin()->second.state,
                 calls.rbegin()->second.line,
                 "late"});
    find(rank, concat(" is late in '", report_.name, "': it has not called #", number, "; ",
                      last_of(dumps_.at(rank))));
  }

  const std::map<int, Dump>& dumps_;
  const Members members_;
  const std::optional<std::int64_t> difference_;
  std::optional<std::int64_t> last_;
  std::string majority_;
  GroupReport report_;
};

}  // namespace

std::vector<GroupReport> compare_ranks(const std::map<int, Dump>& dumps) {
  std::set<GroupId> groups;
  for (const auto& [rank, dump] : dumps)
    for (const auto& [id, calls] : dump.groups) groups.insert(id);
  std::vector<GroupReport> reports;
  for (const GroupId& id : groups) reports.push_back(Comparison(id, dumps).report());
  return reports;
}

std::string list_of(const std::vector<int>& ranks) {
  std::vector<int> sorted = ranks;
  std::ranges::sort(sorted);
  std::string text;
  for (std::size_t i = 0, end = 0; i < sorted.size(); i = end) {
    for (end = i + 1; end < sorted.size() && sorted[end] == sorted[end - 1] + 1;) ++end;
    text += concat(text.empty() ? "" : ", ", sorted[i], end == i + 1 ? "" : concat("-", sorted[end - 1]));
  }
  return text;
}

}  // namespace rz::flight_tool
