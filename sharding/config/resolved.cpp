// The resolved configuration as JSON and as a table.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/config/ds_config.h"

namespace rz {

std::string resolved_json(const DsConfig& config) {
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const ResolvedSetting& s : config.settings) {
    if (!s.shown) continue;
    nlohmann::ordered_json* node = &all;
    std::string_view rest = s.path;
    for (auto dot = rest.find('.'); dot != rest.npos; dot = rest.find('.')) {
      node = &(*node)[std::string(rest.substr(0, dot))];
      rest.remove_prefix(dot + 1);
    }
    (*node)[std::string(rest)] = nlohmann::ordered_json::parse(s.value);
  }
  return all.dump(2) + "\n";
}

std::string resolved_table(const DsConfig& config) {
  std::size_t path_width = 0, value_width = 0;
  constexpr std::size_t max_value_width = 24;
  for (const ResolvedSetting& s : config.settings) {
    if (!s.shown) continue;
    path_width = std::max(path_width, s.path.size());
    value_width = std::max(value_width, std::min(max_value_width, s.value.size()));
  }
  const auto padded = [](const std::string& text, std::size_t width) {
    return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
  };
  std::string table = concat("configuration: ", config.file, "\n");
  for (const ResolvedSetting& s : config.settings)
    if (s.shown)
      table +=
          concat("  ", padded(s.path, path_width), "  ", padded(s.value, value_width), "  ", s.origin, "\n");
  return table;
}

}  // namespace rz
