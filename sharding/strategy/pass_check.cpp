#include "sharding/strategy/pass_check.h"

#include <algorithm>
#include <string>

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t max_names = 8;

/// "rank 1", "ranks 0 and 2", "every rank"
std::string rank_list(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) == size) return "every rank";
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    out += concat(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return out;
}

}  // namespace

PassCheck::PassCheck(const PassRules& rules, const ModelParameters& parameters)
    : rules_(rules), parameters_(parameters) {
  order_.reserve(parameters.members().size());
}

void PassCheck::begin_pass() {
  order_.clear();
  without_data_ = false;
}

bool PassCheck::is_broken(std::span<const std::uint8_t> used) const {
  return find(used).kind != Finding::none;
}

PassCheck::Finding PassCheck::find(std::span<const std::uint8_t> used) const {
  if (without_data_) return {};
  if (recorded_)
    if (const Finding found = difference(used); found.kind != Finding::none) return found;
  const bool all = rules_.find_unused_parameters || std::ranges::find(used, 0) == used.end();
  return {all ? Finding::none : Finding::unused};
}

PassCheck::Finding PassCheck::difference(std::span<const std::uint8_t> used) const {
  for (std::size_t m = 0; m < used.size(); ++m)
    if (used[m] && !anywhere_[m]) return {Finding::added, static_cast<std::int32_t>(m)};
  if (static_used_.empty()) return {};
  for (std::size_t m = 0; m < used.size(); ++m)
    if (used[m] != static_used_[m])
      return {used[m] ? Finding::added : Finding::missing, static_cast<std::int32_t>(m)};
  const auto [now, then] = std::ranges::mismatch(order_, static_order_);
  if (now == order_.end() && then == static_order_.end()) return {};
  const auto position = static_cast<std::int32_t>(now - order_.begin());
  if (now == order_.end()) return {Finding::missing, *then};
  if (then == static_order_.end()) return {Finding::added, *now};
  return {Finding::reordered, *now, *then, position};
}

void PassCheck::fail(std::span<const std::uint8_t> used, Communicator& communicator) const {
  const Finding own = find(used);
  std::vector<std::int32_t> all(static_cast<std::size_t>(4 * communicator.size()));
  const std::int32_t mine[] = {own.kind, own.member, own.expected, own.position};
  communicator.all_gather(ConstBuffer(mine, 4), Buffer(all.data(), all.size())).wait();
  for (std::size_t r = 0; 4 * r < all.size(); ++r)
    if (all[4 * r] > Finding::unused)
      fail_static({all[4 * r], all[4 * r + 1], all[4 * r + 2], all[4 * r + 3]}, static_cast<int>(r));
  fail_unused(used, communicator);
}

void PassCheck::fail_static(const Finding& found, int rank) const {
  const std::string& name = parameters_.member(found.member).name;
  const std::string what =
      found.kind == Finding::reordered
          ? concat("the gradient of ", name, " became ready as number ", found.position, " on rank ", rank,
                   ", that of ", parameters_.member(found.expected).name, " in the first update")
      : found.kind == Finding::added
          ? concat("rank ", rank, " computed a gradient of ", name, ", but none in the first update")
          : concat("rank ", rank, " computed no gradient of ", name, ", but one in the first update");
  throw Error(
      Errc::mismatch,
      concat("static_graph: ", what, "; gradients are dropped; keep the graph, or set static_graph = false"),
      rank);
}

void PassCheck::fail_unused(std::span<const std::uint8_t> used, Communicator& communicator) const {
  const std::size_t members = used.size();
  std::vector<std::uint8_t> mine(used.begin(), used.end());
  if (without_data_) std::ranges::fill(mine, 1);
  std::vector<std::uint8_t> all(members * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(ConstBuffer(mine.data(), members), Buffer(all.data(), all.size())).wait();
  std::string list;
  std::size_t names = 0;
  int culprit = communicator.size();
  for (std::size_t m = 0; m < members; ++m) {
    std::vector<int> ranks;
    for (int r = 0; r < communicator.size(); ++r)
      if (!all[static_cast<std::size_t>(r) * members + m]) ranks.push_back(r);
    if (ranks.empty()) continue;
    culprit = std::min(culprit, ranks.front());
    if (++names <= max_names)
      list += concat(names > 1 ? "; " : "", parameters_.member(static_cast<int>(m)).name, " on ",
                     rank_list(ranks, communicator.size()));
  }
  if (names > max_names) list += concat("; and ", names - max_names, " more");
  throw Error(Errc::invalid_argument,
              concat("no gradient reached ", list,
                     "; gradients are dropped; set find_unused_parameters = true "
                     "(DeepSpeed: ignore_unused_parameters), or requires_grad = false to freeze them"),
              culprit);
}

void PassCheck::record(std::span<const std::uint8_t> used, std::span<const std::uint8_t> anywhere) {
  recorded_ = true;
  anywhere_.assign(anywhere.begin(), anywhere.end());
  if (without_data_) return;
  static_order_ = order_;
  static_used_.assign(used.begin(), used.end());
}

}  // namespace rz
