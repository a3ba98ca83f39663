#include "comm/tuning/tuning.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"

namespace rz::tuning {

namespace {

struct ScopeName {
  Scope scope;
  const char* name;
  const char* words;
};
constexpr ScopeName scope_names[] = {
    {Scope::intra_node, "intra_node", "intra-node"},
    {Scope::intra_node_registered, "intra_node_registered", "intra-node, memory that all ranks map"},
    {Scope::intra_node_cma, "intra_node_cma", "intra-node, memory that all ranks may read"},
    {Scope::intra_node_schedule, "intra_node_schedule", "intra-node schedules"},
    {Scope::inter_node, "inter_node", "inter-node"},
    {Scope::multi_rank_nodes, "multi_rank_nodes", "inter-node, several ranks per node"},
    {Scope::any, "any", "schedules"}};

const ScopeName& scope_name(Scope scope) {
  return *std::find_if(std::begin(scope_names), std::end(scope_names),
                       [&](const auto& p) { return p.scope == scope; });
}

/// Algorithms of the intra-node engine in a scope; schedules are not among them.
std::vector<const char*> algorithm_names(Collective c, Scope scope) {
  const bool may_be_direct = c != Collective::all_to_all_v && c != Collective::barrier;
  if (scope == Scope::intra_node_registered && may_be_direct) return {"zero_copy", "staged"};
  const bool only_moves = may_be_direct && !traits(c).reduces;
  if (scope == Scope::intra_node_cma && only_moves) return {"adaptive", "single_copy", "staged"};
  if (scope == Scope::intra_node_registered || scope == Scope::intra_node_cma) return {"staged"};
  if (scope != Scope::intra_node) return {};
  if (c == Collective::all_reduce) return {"one_shot", "two_shot"};
  return {"staged"};
}

constexpr std::string_view schedule_override = "schedule:";

/// True if the intra-node engine has an algorithm of that name; a schedule then needs the prefix "schedule:".
bool is_algorithm_name(Collective c, std::string_view name) {
  const auto holds = [&](const std::vector<const char*>& names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
  };
  return holds(algorithm_names(c, Scope::intra_node)) ||
         (name == "zero_copy" && holds(algorithm_names(c, Scope::intra_node_registered))) ||
         (name == "single_copy" && holds(algorithm_names(c, Scope::intra_node_cma)));
}

const schedule::Algorithm* schedule(Collective c, std::string_view name) {
  for (const schedule::Algorithm& a : schedule::algorithms())
    if (a.collective == c && name == a.name) return &a;
  return nullptr;
}

bool reduces_in(const Rule& r, ReductionOrder order) {
  const bool by_schedule = r.is_schedule || !is_intra_node(r.scope);
  if (!by_schedule || !traits(r.collective).reduces) return true;
  return schedule::find_algorithm(r.collective, r.algorithm).reduces_in(order);
}

bool covers(Scope rule, Scope call) {
  if (rule == Scope::any) return !is_intra_node(call);
  return rule == call || (rule == Scope::inter_node && call == Scope::multi_rank_nodes);
}

std::optional<Collective> find_collective(std::string_view word) {
  for (int c = 0; c < collective_count; ++c)
    if (word == name(Collective(c))) return Collective(c);
  return std::nullopt;
}

std::string collective_choices() {
  std::string choices;
  for (int c = 0; c < collective_count; ++c)
    if (Collective(c) != Collective::send && Collective(c) != Collective::recv)
      choices += concat(choices.empty() ? "" : ", ", name(Collective(c)));
  return choices;
}

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || stop != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::string_view> after(std::string_view word, std::string_view prefix) {
  if (!word.starts_with(prefix)) return std::nullopt;
  return word.substr(prefix.size());
}

/// Parses the lines of one table.
class Parser {
 public:
  explicit Parser(const std::string& name) { tuning_.name = name; }

  void line(std::string_view text) {
    ++line_;
    std::istringstream in{std::string(text.substr(0, text.find('#')))};
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.empty()) return;
    rule(words);
  }
  Table result() && { return std::move(tuning_); }

 private:
  template <class... T>
  void that(bool ok, const T&... parts) const {
    if (!ok) fail(Errc::config, "the tuning table ", tuning_.name, ", line ", line_, ": ", parts...);
  }

  void rule(const std::vector<std::string>& words) {
    Rule r{collective(words[0]), Scope::any, "", any_size};
    that(words.size() >= 3, "'", words[0],
         "' needs a scope and an algorithm, as in: all_reduce intra_node bytes<=64K one_shot");
    r.scope = scope(words[1]);
    r.source = Source::file;
    bool named = false;
    for (std::size_t i = 2; i < words.size(); ++i) {
      const bool condition = words[i].find_first_of("=<>") != std::string::npos;
      if (condition) {
        set(r, words[i]);
        continue;
      }
      that(!named, "'", words[i], "' is one algorithm too many");
      named = true;
      that(set_algorithm(r, words[i]), name(r.collective), " has no algorithm '", words[i],
           "' for the scope '", words[1], "'; choose one of ", algorithm_choices(r.collective, r.scope));
    }
    that(named, "no algorithm; choose one of ", algorithm_choices(r.collective, r.scope));
    const bool is_schedule = r.is_schedule || !is_intra_node(r.scope);
    that(!r.chunk || !is_schedule, "chunk=B is of the intra-node engine; a schedule takes slice=B");
    that(!r.slice || is_schedule, "slice=B is of a schedule; the intra-node engine takes chunk=B");
    tuning_.rules.push_back(r);
  }

  Collective collective(const std::string& word) const {
    const auto found = find_collective(word);
    that(found && !algorithm_choices(*found, Scope::inter_node).empty(), "'", word,
         "' is no collective that takes algorithms; choose one of ", collective_choices());
    return *found;
  }

  Scope scope(const std::string& word) const {
    std::string choices;
    for (const ScopeName& p : scope_names) {
      if (word == p.name) return p.scope;
      choices += concat(choices.empty() ? "" : ", ", p.name);
    }
    that(false, "'", word, "' is no scope; choose one of ", choices);
    return {};
  }

  void set(Rule& r, const std::string& word) const {
    const auto size = [&](std::string_view text) {
      const auto bytes = parse_byte_size(text);
      that(bytes.has_value(), "'", text, "' in '", word, "' is no size; write bytes, or as many K, M or G");
      return *bytes;
    };
    const auto pipelined_size = [&](std::string_view text) {
      const std::size_t bytes = size(text);
      that(bytes >= 64 && bytes % 64 == 0, "'", word, "' is no multiple of 64");
      return bytes;
    };
    const auto ranks = [&](std::string_view text) {
      const auto n = number<int>(text);
      that(n && *n >= 1, "'", text, "' in '", word, "' is no number of ranks");
      return *n;
    };
    if (const auto b = after(word, "bytes<=")) {
      r.max_bytes = size(*b);
    } else if (const auto l = after(word, "bytes>")) {
      r.min_bytes = size(*l);
    } else if (const auto t = after(word, "traffic<=")) {
      r.max_traffic = size(*t);
    } else if (const auto c = after(word, "chunk=")) {
      r.chunk = pipelined_size(*c);
    } else if (const auto s = after(word, "slice=")) {
      r.slice = pipelined_size(*s);
    } else if (const auto max_text = after(word, "ranks<=")) {
      r.max_ranks = ranks(*max_text);
    } else if (const auto min_text = after(word, "ranks>=")) {
      r.min_ranks = ranks(*min_text);
    } else if (const auto n = after(word, "ranks=")) {
      r.max_ranks = r.min_ranks = ranks(*n);
    } else {
      that(false, "'", word, "' is no condition; there are ranks=N, ranks<=N, ranks>=N, bytes<=B, bytes>B, ",
           "traffic<=B, chunk=B and slice=B");
    }
  }

  Table tuning_;
  int line_ = 0;
};

std::string conditions(const Rule& r) {
  std::string text;
  if (r.min_ranks == r.max_ranks) {
    text += concat(" ranks=", r.max_ranks);
  } else {
    if (r.min_ranks > 1) text += concat(" ranks>=", r.min_ranks);
    if (r.max_ranks != any_size) text += concat(" ranks<=", r.max_ranks);
  }
  if (r.min_bytes > 0) text += " bytes>" + exact_byte_size(r.min_bytes);
  if (r.max_bytes != any_bytes) text += " bytes<=" + exact_byte_size(r.max_bytes);
  if (r.max_traffic != any_bytes) text += " traffic<=" + exact_byte_size(r.max_traffic);
  return text;
}

}  // namespace

std::string to_string(const Rule& r) {
  std::string text = concat(name(r.collective), " ", scope_name(r.scope).words);
  if (r.min_bytes > 0) text += concat(", above ", human_bytes(r.min_bytes));
  if (r.max_bytes != any_bytes) text += concat(", up to ", human_bytes(r.max_bytes));
  if (r.max_traffic != any_bytes) text += concat(", up to ", human_bytes(r.max_traffic), " of all ranks");
  if (r.min_ranks == r.max_ranks)
    text += concat(", ", r.max_ranks, r.max_ranks == 1 ? " rank" : " ranks");
  else if (r.max_ranks != any_size)
    text += concat(", up to ", r.max_ranks, " ranks");
  else if (r.min_ranks > 1)
    text += concat(", from ", r.min_ranks, " ranks");
  return text;
}

std::string source_prefix(const Rule& r, const std::string& table) {
  switch (r.source) {
    case Source::built_in:
      return "built-in table: ";
    case Source::file:
      return concat("tuning table ", table, ": ");
    case Source::other_size:
      return concat("tuning table ", table, ", measured with another number of ranks: ");
  }
  return "";
}

std::string Table::text() const {
  std::string text;
  for (const Rule& r : rules)
    text += concat(rz::name(r.collective), " ", scope_name(r.scope).name, conditions(r), " ",
                   r.is_schedule ? schedule_override : "", r.algorithm,
                   r.chunk ? " chunk=" + exact_byte_size(r.chunk) : "",
                   r.slice ? " slice=" + exact_byte_size(r.slice) : "", "\n");
  return text;
}

Table parse_tuning(std::string_view text, const std::string& name) {
  Parser parser(name);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    parser.line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return std::move(parser).result();
}

Table read_tuning(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  std::error_code ignored;
  const bool is_file = in.good() && !std::filesystem::is_directory(path, ignored);
  require(
      is_file, Errc::config, "the tuning table '", path,
      "' cannot be read, or is a directory; RZ_TUNING or CommOptions::tuning names it, and tune writes one");
  return parse_tuning(text.str(), path);
}

bool matches(const Rule& r, const RuleQuery& q) {
  if (r.collective != q.collective || !covers(r.scope, q.scope)) return false;
  if (r.max_traffic != any_bytes && q.bytes > r.max_traffic / static_cast<std::size_t>(q.size)) return false;
  if (r.min_bytes != 0 && q.bytes <= r.min_bytes) return false;
  return q.size >= r.min_ranks && q.size <= r.max_ranks && q.bytes <= r.max_bytes;
}

const Rule* find_rule(std::span<const Rule> rules, const RuleQuery& q, bool deterministic,
                      ReductionOrder order) {
  for (const Rule& r : rules)
    if (matches(r, q) && (!deterministic || reduces_in(r, order))) return &r;
  return nullptr;
}

std::string algorithm_choices(Collective c, Scope scope) {
  std::string choices;
  const auto add = [&](const auto&... parts) { choices += concat(choices.empty() ? "" : ", ", parts...); };
  for (const char* algorithm : algorithm_names(c, scope)) add(algorithm);
  if (scope == Scope::intra_node_registered || scope == Scope::intra_node_cma) return choices;
  for (const schedule::Algorithm& a : schedule::algorithms())
    if (a.collective == c)
      add(scope == Scope::intra_node && is_algorithm_name(c, a.name) ? schedule_override : "", a.name);
  return choices;
}

bool set_algorithm(Rule& r, std::string_view name) {
  for (const char* algorithm : algorithm_names(r.collective, r.scope))
    if (name == algorithm) {
      r.algorithm = algorithm;
      return true;
    }
  if (r.scope == Scope::intra_node_registered || r.scope == Scope::intra_node_cma) return false;
  if (r.scope == Scope::intra_node && is_algorithm_name(r.collective, name)) return false;
  const auto qualified = after(name, schedule_override);
  const schedule::Algorithm* const found = schedule(r.collective, qualified.value_or(name));
  if (!found) return false;
  r.algorithm = found->name;
  r.is_schedule = r.scope == Scope::intra_node;
  return true;
}

Collective collective_from_name(std::string_view word) {
  const auto found = find_collective(word);
  require(found.has_value(), Errc::config, "'", word, "' is no collective; choose one of ",
          collective_choices());
  return *found;
}

// ---- other group sizes

namespace {

bool is_measured(const Rule& r) { return r.min_ranks == r.max_ranks; }

/// The number of ranks whose rules serve `size` too; 0: none, or the table has rules for `size`.
int nearest_size(const std::vector<Rule>& rules, Collective c, Scope scope, int size) {
  int larger = any_size, smaller = 0;
  for (const Rule& r : rules) {
    if (r.collective != c || r.scope != scope) continue;
    if (r.min_ranks <= size && size <= r.max_ranks) return 0;
    if (!is_measured(r)) continue;
    if (r.max_ranks > size) larger = std::min(larger, r.max_ranks);
    if (r.max_ranks < size) smaller = std::max(smaller, r.max_ranks);
  }
  if (larger != any_size) return larger;
  // Among two ranks the algorithms differ less than among more.
  return smaller > 2 && size <= 2 * smaller ? smaller : 0;
}

}  // namespace

std::vector<Rule> rules_for(const Table& tuning, int size) {
  std::vector<Rule> rules = tuning.rules;
  for (const Rule& r : tuning.rules) {
    if (!is_measured(r) || nearest_size(tuning.rules, r.collective, r.scope, size) != r.max_ranks) continue;
    Rule copy = r;
    copy.min_ranks = copy.max_ranks = size;
    copy.source = Source::other_size;
    rules.push_back(copy);
  }
  return rules;
}

}  // namespace rz::tuning
