#include "sharding/strategy/pass_rules.h"

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>

#include "comm/core/error.h"
#include "sharding/parallel/rank_consistency.h"

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

std::int32_t short_hash(std::uint64_t hash) {
  return static_cast<std::int32_t>((hash ^ (hash >> 32)) & 0x7fffffff);
}

}  // namespace

PassRules::PassRules(const StrategyOptions& options, const PassState& state,
                     const ModelParameters& parameters, Communicator& communicator)
    : options_(options),
      state_(state),
      parameters_(parameters),
      communicator_(communicator),
      words_(fixed_words + parameters.members().size()),
      exchanged_(parameters.members().size()) {}

PassRules::~PassRules() {
  try {
    wait();
  } catch (const std::exception&) {  // the result is not needed any more
  }
}

void PassRules::set_scopes(std::uint64_t hash) { scopes_ = short_hash(hash); }
void PassRules::set_optimizer(std::uint64_t hash) { optimizer_ = short_hash(hash); }

// ---- the exchange

void PassRules::begin_exchange() {
  exchanged_.assign(state_.used().begin(), state_.used().end());
  words_[0] = values_written_;
  words_[1] = scopes_;
  words_[2] = -scopes_;
  words_[3] = find(exchanged_).kind != Finding::none;
  words_[4] = counted_;
  words_[5] = optimizer_;
  words_[6] = -optimizer_;
  std::ranges::copy(exchanged_, words_.begin() + fixed_words);
  if (communicator_.size() > 1)
    exchange_ = communicator_.all_reduce(Buffer(words_.data(), words_.size()), ReduceOp::max);
}

void PassRules::wait() { std::exchange(exchange_, {}).wait(); }

void PassRules::reuse_last() {
  require(std::ranges::equal(state_.used(), exchanged_), Errc::invalid_argument,
          "a pass that is captured in a graph reaches other parameters than the pass before; run an update "
          "that is not captured first");
}

void PassRules::exchange_before_replay() {
  std::array<std::int32_t, 2> words{optimizer_, -optimizer_};
  if (communicator_.size() > 1)
    communicator_.all_reduce(Buffer(words.data(), words.size()), ReduceOp::max).wait();
  words_[5] = words[0], words_[6] = words[1];
}

// ---- of all ranks

void PassRules::mark_values_checked() {
  values_written_ = false;
  words_[0] = 0;
}

// ---- the rules

PassRules::Finding PassRules::find(std::span<const std::uint8_t> used) const {
  if (state_.without_data()) return {};
  if (recorded_)
    if (const Finding found = difference(used); found.kind != Finding::none) return found;
  const bool all = options_.find_unused_parameters || std::ranges::find(used, 0) == used.end();
  return {all ? Finding::none : Finding::unused};
}

PassRules::Finding PassRules::difference(std::span<const std::uint8_t> used) const {
  for (std::size_t m = 0; m < used.size(); ++m)
    if (used[m] && !anywhere_[m]) return {Finding::added, static_cast<std::int32_t>(m)};
  if (static_used_.empty()) return {};
  for (std::size_t m = 0; m < used.size(); ++m)
    if (used[m] != static_used_[m])
      return {used[m] ? Finding::added : Finding::missing, static_cast<std::int32_t>(m)};
  const auto [now, then] = std::ranges::mismatch(state_.ready(), static_order_);
  if (now == state_.ready().end() && then == static_order_.end()) return {};
  const auto position = static_cast<std::int32_t>(now - state_.ready().begin());
  if (now == state_.ready().end()) return {Finding::missing, *then};
  if (then == static_order_.end()) return {Finding::added, *now};
  return {Finding::reordered, *now, *then, position};
}

void PassRules::fail() const {
  const Finding own = find(exchanged_);
  std::vector<std::int32_t> all(static_cast<std::size_t>(4 * communicator_.size()));
  const std::int32_t mine[] = {own.kind, own.member, own.expected, own.position};
  communicator_.all_gather(ConstBuffer(mine, 4), Buffer(all.data(), all.size())).wait();
  for (std::size_t r = 0; 4 * r < all.size(); ++r)
    if (all[4 * r] > Finding::unused)
      fail_static({all[4 * r], all[4 * r + 1], all[4 * r + 2], all[4 * r + 3]}, static_cast<int>(r));
  fail_unused();
}

void PassRules::fail_static(const Finding& found, int rank) const {
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

void PassRules::fail_unused() const {
  const std::size_t members = exchanged_.size();
  std::vector<std::uint8_t> mine = exchanged_;
  if (state_.without_data()) std::ranges::fill(mine, 1);
  std::vector<std::uint8_t> all(members * static_cast<std::size_t>(communicator_.size()));
  communicator_.all_gather(ConstBuffer(mine.data(), members), Buffer(all.data(), all.size())).wait();
  std::string list;
  std::size_t names = 0;
  int culprit = communicator_.size();
  for (std::size_t m = 0; m < members; ++m) {
    std::vector<int> ranks;
    for (int r = 0; r < communicator_.size(); ++r)
      if (!all[static_cast<std::size_t>(r) * members + m]) ranks.push_back(r);
    if (ranks.empty()) continue;
    culprit = std::min(culprit, ranks.front());
    if (++names <= max_names)
      list += concat(names > 1 ? "; " : "", parameters_.member(static_cast<int>(m)).name, " on ",
                     rank_list(ranks, communicator_.size()));
  }
  if (names > max_names) list += concat("; and ", names - max_names, " more");
  throw Error(Errc::invalid_argument,
              concat("no gradient reached ", list,
                     "; gradients are dropped; set find_unused_parameters = true "
                     "(DeepSpeed: ignore_unused_parameters), or requires_grad = false to freeze them"),
              culprit);
}

void PassRules::require_same_scopes(const ScopeTrace& trace) {
  const std::uint64_t since = std::exchange(compared_visits_, trace.visits());
  if (words_[1] == -words_[2]) return;  // the hashes of all ranks are equal
  std::vector<Fact> facts;
  for (const auto& visit : trace.last(trace.visits() - since))
    facts.push_back({concat("number ", facts.size()),
                     concat(visit.scope->name, visit.pass == Pass::forward ? " forward" : " backward")});
  require_same("the order of scopes", facts, "run the same scopes in the same order on every rank",
               communicator_);
}

void PassRules::end_update() {
  if (!options_.static_graph || recorded_) return;
  recorded_ = true;
  for (std::size_t m = 0; m < exchanged_.size(); ++m) anywhere_.push_back(is_used(static_cast<int>(m)));
  if (state_.without_data()) return;
  static_order_ = state_.ready();
  static_used_ = exchanged_;
}

}  // namespace rz
