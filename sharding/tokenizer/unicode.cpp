#include "sharding/tokenizer/unicode.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/core/text.h"

namespace rz {
namespace {

using Ranges = std::vector<CharacterRange>;

struct Row {
  std::string_view names, content;
  bool is_union;
};
constexpr Row rows[] = {
#define PROPERTY(names, runs) {names, runs, false},
#define UNION(names, parts) {names, parts, true},
#include "sharding/tokenizer/unicode.inc"
#undef PROPERTY
#undef UNION
};

Ranges ranges_of_runs(std::string_view runs) {
  Ranges ranges;
  char32_t next = 0;
  const char *at = runs.data(), *const end = at + runs.size();
  const auto number = [&] {
    std::uint32_t value = 0;
    at = std::from_chars(at, end, value, 16).ptr;
    if (at != end) ++at;
    return static_cast<char32_t>(value);
  };
  while (at != end) {
    const char32_t first = next + number(), last = first + number();
    ranges.push_back({first, last});
    next = last + 1;
  }
  return ranges;
}

Ranges merged(Ranges all) {
  std::ranges::sort(all, {}, &CharacterRange::first);
  Ranges ranges;
  for (const CharacterRange& range : all) {
    if (!ranges.empty() && range.first <= ranges.back().last + 1)
      ranges.back().last = std::max(ranges.back().last, range.last);
    else
      ranges.push_back(range);
  }
  return ranges;
}

using Table = std::map<std::string, Ranges, std::less<>>;

/// Rows of unions follow those of their parts.
Table make_table() {
  Table table;
  for (const Row& row : rows) {
    Ranges ranges;
    if (row.is_union) {
      for (const std::string& part : parts_of(row.content, ' '))
        ranges.insert(ranges.end(), table.at(part).begin(), table.at(part).end());
      ranges = merged(std::move(ranges));
    } else {
      ranges = ranges_of_runs(row.content);
    }
    for (const std::string& name : parts_of(row.names, ' ')) table[name] = ranges;
  }
  return table;
}

const Table& table() {
  static constinit Lazy<Table> made;
  return made.get(make_table);
}

}  // namespace

const Ranges* find_property(std::string_view name) {
  std::string spelled;
  for (const char c : name)
    if (c != ' ' && c != '-' && c != '_') spelled += c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
  const auto found = table().find(spelled);
  return found == table().end() ? nullptr : &found->second;
}

const Ranges& ranges_of(std::string_view name) {
  const auto found = table().find(name);
  require(found != table().end(), Errc::invalid_argument, "no property ", name);
  return found->second;
}

}  // namespace rz
