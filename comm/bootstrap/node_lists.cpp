#include "comm/bootstrap/node_lists.h"

#include <algorithm>
#include <optional>

#include "comm/core/error.h"

namespace rz::hosts {
namespace {

/// Expands one entry of a list, such as "rack[1-2]node[07-09,12]", from left to right.
class Entry {
 public:
  Entry(std::string_view text, const std::string& where, std::vector<std::string>& names)
      : text_(text), where_(where), names_(names) {}

  void expand() { expand(text_, ""); }

 private:
  template <class... T>
  [[noreturn]] void refuse(const T&... why) const {
    rz::fail(Errc::config, where_, ": ", quoted(text_), ": ", why...);
  }

  void expand(std::string_view rest, const std::string& prefix) {
    if (prefix.size() > 253) refuse("a name has up to 253 characters");  // which bounds the recursion
    const auto open = rest.find_first_of("[]");
    if (open == std::string_view::npos) return add(prefix + std::string(rest));
    const auto close = rest.find(']');
    if (rest[open] == ']' || close == std::string_view::npos) refuse("a bracket has no other one");
    const std::string_view ranges = rest.substr(open + 1, close - open - 1);
    for (const std::string& range : parts_of(ranges, ','))
      expand_range(range, prefix + std::string(rest.substr(0, open)), rest.substr(close + 1));
  }

  /// "07" or "07-12"; numbers keep the width of the first.
  void expand_range(std::string_view range, const std::string& prefix, std::string_view rest) {
    const auto dash = range.find('-');
    const std::string_view low = range.substr(0, dash),
                           high = dash == std::string_view::npos ? low : range.substr(dash + 1);
    const auto first = number(low), last = number(high);
    if (!first || !last) refuse(quoted(range), " is no number and no range");
    if (*last < *first) refuse("the range ", quoted(range), " goes down");
    if (*last - *first >= max_nodes)
      refuse("the range ", quoted(range), " has more than ", max_nodes, " nodes");
    for (long n = *first; n <= *last; ++n) {
      std::string digits = concat(n);
      if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
      expand(rest, prefix + digits);
    }
  }

  static std::optional<long> number(std::string_view digits) {
    const bool plain = !digits.empty() && digits.size() <= 18 && digits.front() != '-';
    return plain ? parse_number<long>(digits) : std::nullopt;
  }

  void add(const std::string& name) {
    if (const std::string why = why_no_host_name(name); !why.empty()) refuse(why);
    if (names_.size() >= max_nodes) refuse("more than ", max_nodes, " nodes");
    names_.push_back(name);
  }

  std::string_view text_;
  const std::string& where_;
  std::vector<std::string>& names_;
};

}  // namespace

std::string why_no_host_name(std::string_view word) {
  if (word.empty()) return "the name is empty";
  if (word.front() == '-') return "a name does not begin with '-'";
  if (word.size() > 253) return "a name has up to 253 characters";
  const auto known = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  };
  if (!std::ranges::all_of(word, known)) return "a name has alphanumeric characters, '.', '-' and '_' only";
  return "";
}

std::string quoted(std::string_view word) {
  std::string text(word.substr(0, 200));
  std::ranges::replace_if(
      text, [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; }, '?');
  return concat("'", text, word.size() > 200 ? "…'" : "'");
}

std::vector<std::string> parse_slurm_nodes(std::string_view list, const std::string& where) {
  require(!list.empty(), Errc::config, where, " is empty; it must name a node");
  std::vector<std::string> names;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= list.size(); ++i) {
    if (i < list.size() && list[i] == '[') ++depth;
    if (i < list.size() && list[i] == ']') --depth;
    if (i < list.size() && (list[i] != ',' || depth > 0)) continue;
    Entry(list.substr(begin, i - begin), where, names).expand();
    begin = i + 1;
  }
  auto sorted = names;
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
    fail(Errc::config, where, ": node '", *twice, "' is there twice");
  return names;
}

std::vector<int> parse_slurm_counts(std::string_view list, const std::string& where) {
  std::vector<int> counts;
  for (const std::string& entry : parts_of(list, ',')) {
    const std::string_view text = entry;
    const auto open = text.find("(x");
    const auto count = parse_number<int>(text.substr(0, open));
    std::optional<int> times = 1;
    if (open != std::string_view::npos)
      times = text.ends_with(')') ? parse_number<int>(text.substr(open + 2, text.size() - open - 3))
                                  : std::nullopt;
    require(count && times && *count >= 1 && *count <= max_slots && *times >= 1, Errc::config, where, ": ",
            quoted(list), ": ", quoted(text), " is no number of tasks, such as 2 or 2(x3)");
    require(static_cast<std::size_t>(*times) <= max_nodes - counts.size(), Errc::config, where,
            ": more than ", max_nodes, " nodes");
    counts.insert(counts.end(), static_cast<std::size_t>(*times), *count);
  }
  return counts;
}

}  // namespace rz::hosts
