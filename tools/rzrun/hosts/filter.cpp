#include <algorithm>
#include <set>

#include "comm/core/error.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::hosts {
namespace {

std::string names_of(const std::vector<Host>& all) {
  std::string names;
  for (const Host& h : all) {
    names += (names.empty() ? "" : ", ") + h.name;
    if (names.size() > 200) return names + "…";
  }
  return names;
}

std::string range_of(const Host& h) {
  const bool whole = h.slots.back() - h.slots.front() + 1 == static_cast<int>(h.slots.size());
  return whole ? concat(h.slots.front(), " to ", h.slots.back()) : concat(h.slots.size(), " slots");
}

/// The slots that one "NAME[:SLOT,…]" chooses, added to those of its host.
void choose(const std::vector<Host>& all, std::string_view word, const std::string& flag,
            std::vector<std::set<int>>& chosen) {
  require(!word.empty(), Errc::config, flag, ": a host is missing beside '@'; write NAME[:SLOT,SLOT…]@NAME…");
  const auto colon = word.find(':');
  const std::string_view name = word.substr(0, colon);
  require(std::ranges::count(word, ':') <= 1, Errc::config, flag, ": ", quoted(word),
          " has two colons; write NAME:SLOT,SLOT…, and '@' between hosts");
  const auto host = std::ranges::find(all, name, &Host::name);
  require(host != all.end(), Errc::config, flag, ": host ", quoted(name),
          " is not known; there are: ", names_of(all));
  auto& slots = chosen[static_cast<std::size_t>(host - all.begin())];
  if (colon == std::string_view::npos) return slots.insert(host->slots.begin(), host->slots.end());
  for (const std::string& digits : parts_of(word.substr(colon + 1), ',')) {
    const auto slot = parse_number<int>(digits);
    require(slot && *slot >= 0, Errc::config, flag, ": ", quoted(digits), " in ", quoted(word),
            " is no number of a slot");
    require(std::ranges::binary_search(host->slots, *slot), Errc::config, flag, ": host '", name,
            "' has no slot ", *slot, "; it has ", range_of(*host));
    slots.insert(*slot);
  }
}

std::vector<std::set<int>> chosen_by(const std::vector<Host>& all, std::string_view filter,
                                     const std::string& flag) {
  require(!filter.empty(), Errc::config, flag, " is empty; write NAME[:SLOT,SLOT…][@NAME…]");
  std::vector<std::set<int>> chosen(all.size());
  for (const std::string& word : parts_of(filter, '@')) choose(all, word, flag, chosen);
  return chosen;
}

}  // namespace

std::vector<Host> include(const std::vector<Host>& all, std::string_view filter) {
  const auto chosen = chosen_by(all, filter, "--include");
  std::vector<Host> rest;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!chosen[i].empty())
      rest.push_back({all[i].name,
                      {chosen[i].begin(), chosen[i].end()},
                      all[i].filtered || chosen[i].size() < all[i].slots.size()});
  return rest;
}

std::vector<Host> exclude(const std::vector<Host>& all, std::string_view filter) {
  const auto chosen = chosen_by(all, filter, "--exclude");
  std::vector<Host> rest;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Host h = all[i];
    std::erase_if(h.slots, [&](int slot) { return chosen[i].contains(slot); });
    h.filtered = h.filtered || !chosen[i].empty();
    if (!h.slots.empty()) rest.push_back(std::move(h));
  }
  require(!rest.empty(), Errc::config, "--exclude ", quoted(filter), " leaves no host");
  return rest;
}

std::vector<Host> first_nodes(std::vector<Host> all, int nodes) {
  require(nodes >= 1 && static_cast<std::size_t>(nodes) <= all.size(), Errc::config, "--num_nodes ", nodes,
          ": there ", all.size() == 1 ? "is 1 host" : concat("are ", all.size(), " hosts"));
  all.resize(static_cast<std::size_t>(nodes));
  return all;
}

std::vector<Host> first_slots(std::vector<Host> all, int slots) {
  for (Host& h : all) {
    require(slots >= 1 && static_cast<std::size_t>(slots) <= h.slots.size(), Errc::config, "--num_gpus ",
            slots, ": host '", h.name, "' has ", h.slots.size(), h.slots.size() == 1 ? " slot" : " slots");
    h.filtered = h.filtered || static_cast<std::size_t>(slots) < h.slots.size();
    h.slots.resize(static_cast<std::size_t>(slots));
  }
  return all;
}

}  // namespace rz::hosts
