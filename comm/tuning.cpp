#include "comm/tuning.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "comm/core/error.h"

namespace rz {

namespace {

struct PlaceName {
  Where where;
  const char* name;
  const char* words;
};
constexpr PlaceName places[] = {
    {Where::together, "one_host", "on one host"},
    {Where::reachable, "reachable", "on one host, of memory that all ranks reach"},
    {Where::readable, "readable", "on one host, of memory that all ranks may read"},
    {Where::one_host, "streams", "over streams of one host"},
    {Where::network, "network", "between hosts"},
    {Where::shared_hosts, "shared_hosts", "between hosts of several ranks"},
    {Where::anywhere, "anywhere", "over streams"}};

const PlaceName& place(Where where) {
  return *std::find_if(std::begin(places), std::end(places), [&](const auto& p) { return p.where == where; });
}

/// What ranks that meet do themselves, instead of running a schedule.
std::vector<const char*> ways(Collective c, Where where) {
  const bool may_be_direct = c != Collective::all_to_all_v && c != Collective::barrier;
  if (where == Where::reachable && may_be_direct) return {"direct", "copied"};
  const bool only_moves = may_be_direct && !traits(c).reduces;
  if (where == Where::readable && only_moves) return {"by_time", "single_copy", "copied"};
  if (where == Where::reachable || where == Where::readable) return {"copied"};
  if (where != Where::together) return {};
  if (c == Collective::all_reduce) return {"one_shot", "two_shot"};
  return {"letters"};
}

constexpr std::string_view over_streams = "streams:";

/// Whether ranks that meet mean something else by it than a schedule.
bool is_a_way(Collective c, std::string_view name) {
  const auto holds = [&](const std::vector<const char*>& names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
  };
  return holds(ways(c, Where::together)) || (name == "direct" && holds(ways(c, Where::reachable))) ||
         (name == "single_copy" && holds(ways(c, Where::readable)));
}

const Algorithm* schedule(Collective c, std::string_view name) {
  for (const Algorithm& a : algorithms())
    if (a.collective == c && name == a.name) return &a;
  return nullptr;
}

bool sums_in_rank_order(const TuningRule& r) {
  const bool by_schedule = r.streams || !is_of_those_who_meet(r.where);
  if (!by_schedule || !traits(r.collective).reduces) return true;
  return find_algorithm(r.collective, r.algorithm).rank_order;
}

bool covers(Where rule, Where call) {
  if (rule == Where::anywhere) return !is_of_those_who_meet(call);
  return rule == call || (rule == Where::network && call == Where::shared_hosts);
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
      choices += str(choices.empty() ? "" : ", ", name(Collective(c)));
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

/// Reads the lines of one table.
class Parser {
 public:
  explicit Parser(const std::string& name) { tuning_.name = name; }

  void line(std::string_view text) {
    ++line_;
    std::istringstream in{std::string(text.substr(0, text.find('#')))};
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.empty()) return;
    words[0] == "link" ? link(words) : rule(words);
  }
  Tuning result() && { return std::move(tuning_); }

 private:
  template <class... T>
  void that(bool ok, const T&... parts) const {
    if (!ok) fail(Errc::config, "the tuning table ", tuning_.name, ", line ", line_, ": ", parts...);
  }

  void rule(const std::vector<std::string>& words) {
    TuningRule r{collective(words[0]), Where::anywhere, "", any_size};
    that(words.size() >= 3, "'", words[0],
         "' needs a place and an algorithm, as in: all_reduce one_host bytes<=64K one_shot");
    r.where = where(words[1]);
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
           "' for the place '", words[1], "'; choose one of ", algorithm_choices(r.collective, r.where));
    }
    that(named, "no algorithm; choose one of ", algorithm_choices(r.collective, r.where));
    tuning_.rules.push_back(r);
  }

  Collective collective(const std::string& word) const {
    const auto found = find_collective(word);
    that(found && !algorithm_choices(*found, Where::network).empty(), "'", word,
         "' is no collective that takes algorithms; choose one of ", collective_choices(), ", or link");
    return *found;
  }

  Where where(const std::string& word) const {
    std::string choices;
    for (const PlaceName& p : places) {
      if (word == p.name) return p.where;
      choices += str(choices.empty() ? "" : ", ", p.name);
    }
    that(false, "'", word, "' is no place; choose one of ", choices);
    return {};
  }

  void set(TuningRule& r, const std::string& word) const {
    const auto size = [&](std::string_view text) {
      const auto bytes = bytes_from(text);
      that(bytes.has_value(), "'", text, "' in '", word, "' is no size; write bytes, or as many K, M or G");
      return *bytes;
    };
    const auto ranks = [&](std::string_view text) {
      const auto n = number<int>(text);
      that(n && *n >= 1, "'", text, "' in '", word, "' is no number of ranks");
      return *n;
    };
    if (const auto b = after(word, "bytes<=")) {
      r.bytes = size(*b);
    } else if (const auto l = after(word, "bytes>")) {
      r.bytes_above = size(*l);
    } else if (const auto t = after(word, "traffic<=")) {
      r.traffic = size(*t);
    } else if (const auto c = after(word, "chunk=")) {
      r.chunk = size(*c);
      that(r.chunk >= 64 && r.chunk % 64 == 0, "'", word, "' is no multiple of 64");
    } else if (const auto most = after(word, "ranks<=")) {
      r.size = ranks(*most);
    } else if (const auto least = after(word, "ranks>=")) {
      r.least_size = ranks(*least);
    } else if (const auto n = after(word, "ranks=")) {
      r.size = r.least_size = ranks(*n);
    } else {
      that(false, "'", word, "' is no condition; there are ranks=N, ranks<=N, ranks>=N, bytes<=B, bytes>B, ",
           "traffic<=B and chunk=B");
    }
  }

  void link(const std::vector<std::string>& words) {
    const bool known = words.size() == 5 && (words[1] == "shm" || words[1] == "tcp");
    that(known, "a link is written so: link shm|tcp alpha=US beta=US gamma=US");
    LinkCost cost;
    constexpr const char* prefixes[] = {"alpha=", "beta=", "gamma="};
    double* const values[] = {&cost.alpha, &cost.beta, &cost.gamma};
    for (std::size_t i = 0; i < 3; ++i) {
      const auto text = after(words[i + 2], prefixes[i]);
      const auto value = text ? number<double>(*text) : std::nullopt;
      that(value && *value >= 0 && *value < 1e9, "'", words[i + 2], "' is not ", prefixes[i],
           "US, a number of microseconds from 0 on");
      *values[i] = *value;
    }
    (words[1] == "shm" ? tuning_.shm : tuning_.tcp) = cost;
  }

  Tuning tuning_;
  int line_ = 0;
};

std::string conditions(const TuningRule& r) {
  std::string text;
  if (r.least_size == r.size) {
    text += str(" ranks=", r.size);
  } else {
    if (r.least_size > 1) text += str(" ranks>=", r.least_size);
    if (r.size != any_size) text += str(" ranks<=", r.size);
  }
  if (r.bytes_above > 0) text += " bytes>" + exact_bytes(r.bytes_above);
  if (r.bytes != any_bytes) text += " bytes<=" + exact_bytes(r.bytes);
  if (r.traffic != any_bytes) text += " traffic<=" + exact_bytes(r.traffic);
  return text;
}

std::string link_line(const char* name, const std::optional<LinkCost>& link) {
  if (!link) return "";
  return str("link ", name, " alpha=", link->alpha, " beta=", link->beta, " gamma=", link->gamma, "\n");
}

}  // namespace

std::string in_words(const TuningRule& r) {
  std::string text = str(name(r.collective), " ", place(r.where).words);
  if (r.bytes_above > 0) text += str(", above ", human_bytes(r.bytes_above));
  if (r.bytes != any_bytes) text += str(", up to ", human_bytes(r.bytes));
  if (r.traffic != any_bytes) text += str(", up to ", human_bytes(r.traffic), " of all ranks");
  if (r.least_size == r.size)
    text += str(", ", r.size, r.size == 1 ? " rank" : " ranks");
  else if (r.size != any_size)
    text += str(", up to ", r.size, " ranks");
  else if (r.least_size > 1)
    text += str(", from ", r.least_size, " ranks");
  return text;
}

std::string words_of_source(const TuningRule& r, const std::string& table) {
  switch (r.source) {
    case Source::built_in:
      return "built-in table: ";
    case Source::file:
      return str("tuning table ", table, ": ");
    case Source::neighbours:
      return str("between measured groups of ", table, ": ");
    case Source::model:
      return str("cost model of ", table, ": ");
  }
  return "";
}

std::string Tuning::text() const {
  std::string text = link_line("shm", shm) + link_line("tcp", tcp);
  for (const TuningRule& r : rules)
    text += str(rz::name(r.collective), " ", place(r.where).name, conditions(r), " ",
                r.streams ? over_streams : "", r.algorithm, r.chunk ? " chunk=" + exact_bytes(r.chunk) : "",
                "\n");
  return text;
}

Tuning parse_tuning(std::string_view text, const std::string& name) {
  Parser parser(name);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    parser.line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return std::move(parser).result();
}

Tuning read_tuning(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  require(in.good(), Errc::config, "the tuning table '", path,
          "' cannot be read; RZ_TUNING or CommOptions::tuning names it, and tune writes one");
  return parse_tuning(text.str(), path);
}

bool matches(const TuningRule& r, const RuleQuery& q) {
  if (r.collective != q.collective || !covers(r.where, q.where)) return false;
  if (r.traffic != any_bytes && q.bytes > r.traffic / static_cast<std::size_t>(q.size)) return false;
  if (r.bytes_above != 0 && q.bytes <= r.bytes_above) return false;
  return q.size >= r.least_size && q.size <= r.size && q.bytes <= r.bytes;
}

const TuningRule* find_rule(std::span<const TuningRule> rules, const RuleQuery& q, bool deterministic) {
  for (const TuningRule& r : rules)
    if (matches(r, q) && (!deterministic || sums_in_rank_order(r))) return &r;
  return nullptr;
}

std::string algorithm_choices(Collective c, Where where) {
  std::string choices;
  const auto add = [&](const auto&... parts) { choices += str(choices.empty() ? "" : ", ", parts...); };
  for (const char* way : ways(c, where)) add(way);
  if (where == Where::reachable || where == Where::readable) return choices;
  for (const Algorithm& a : algorithms())
    if (a.collective == c) add(where == Where::together && is_a_way(c, a.name) ? over_streams : "", a.name);
  return choices;
}

bool set_algorithm(TuningRule& r, std::string_view name) {
  for (const char* way : ways(r.collective, r.where))
    if (name == way) {
      r.algorithm = way;
      return true;
    }
  if (r.where == Where::reachable || r.where == Where::readable) return false;
  if (r.where == Where::together && is_a_way(r.collective, name)) return false;
  const auto qualified = after(name, over_streams);
  const Algorithm* const found = schedule(r.collective, qualified.value_or(name));
  if (!found) return false;
  r.algorithm = found->name;
  r.streams = r.where == Where::together;
  return true;
}

std::string exact_bytes(std::size_t bytes) {
  constexpr const char* units[] = {"", "K", "M", "G"};
  int unit = 0;
  while (bytes > 0 && bytes % 1024 == 0 && unit < 3) bytes /= 1024, ++unit;
  return str(bytes, units[unit]);
}

std::optional<std::size_t> bytes_from(std::string_view text) {
  const std::size_t unit = text.empty() ? std::string_view::npos : std::string_view("KMG").find(text.back());
  if (unit != std::string_view::npos) text.remove_suffix(1);
  const int shift = unit == std::string_view::npos ? 0 : 10 * (static_cast<int>(unit) + 1);
  const auto value = number<std::size_t>(text);
  if (!value || (*value << shift) >> shift != *value) return std::nullopt;
  return *value << shift;
}

Collective collective_from_name(std::string_view word) {
  const auto found = find_collective(word);
  require(found.has_value(), Errc::config, "'", word, "' is no collective; choose one of ",
          collective_choices());
  return *found;
}

}  // namespace rz
