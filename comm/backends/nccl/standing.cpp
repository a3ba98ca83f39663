#include "comm/backends/nccl/standing.h"

#include <algorithm>
#include <charconv>
#include <map>

namespace rz::nccl {

std::string describe(const Operation& op) {
  std::string text = name(op.kind);
  if (traits(op.kind).reduces) text += str(' ', name(op.op));
  // Only what every rank passes: the root's other buffer, and all_to_all_v's counts, differ.
  const CollectiveTraits& t = traits(op.kind);
  const bool at_output = t.out == Extent::shard && !t.out_at_root;
  if (op.kind != Collective::all_to_all_v && op.kind != Collective::barrier)
    text += str(" of ", at_output ? op.out.count : op.in.count, ' ', name(op.out.dtype));
  if (t.rooted()) text += str(", root ", op.root);
  return text;
}

void Standing::add(std::string call) {
  ++called;
  words.push_back(std::move(call));
  if (words.size() > most_words) words.pop_front();
}

const std::string* Standing::call(std::uint64_t number) const {
  if (number >= called || called - number > words.size()) return nullptr;
  return &words[words.size() - static_cast<std::size_t>(called - number)];
}

std::string Standing::text() const {
  std::string text = str(called, ' ', issued, ' ', begun, ' ', streams, '\n');
  for (const auto* list : {&sent, &received}) {
    for (const std::uint64_t n : *list) text += str(n, ' ');
    text += '\n';
  }
  for (const std::string& w : words) text += str(w, '\n');
  return text;
}

namespace {

std::optional<std::vector<std::uint64_t>> numbers(std::string_view line) {
  std::vector<std::uint64_t> all;
  const char *at = line.data(), *end = at + line.size();
  while (at != end) {
    if (*at == ' ') {
      ++at;
      continue;
    }
    std::uint64_t n = 0;
    const auto [stop, error] = std::from_chars(at, end, n);
    if (error != std::errc{}) return std::nullopt;
    all.push_back(n);
    at = stop;
  }
  return all;
}

}  // namespace

std::optional<Standing> Standing::of(const std::string& text) {
  std::vector<std::string_view> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(std::string_view(text).substr(at, end - at));
    at = end + 1;
  }
  if (lines.size() < 3) return std::nullopt;
  const auto counts = numbers(lines[0]), sent = numbers(lines[1]), received = numbers(lines[2]);
  if (!counts || counts->size() != 4 || !sent || !received) return std::nullopt;
  Standing s{.called = (*counts)[0],
             .issued = (*counts)[1],
             .begun = (*counts)[2],
             .streams = (*counts)[3],
             .sent = *sent,
             .received = *received};
  for (std::size_t i = 3; i < lines.size(); ++i) s.words.emplace_back(lines[i]);
  return s;
}

namespace {

using Standings = std::span<const std::optional<Standing>>;

/// The first rank whose call of this number is not what most ranks called.
std::optional<Failure> find_mismatch(std::uint64_t number, Standings all) {
  const auto call = [&](std::size_t r) { return all[r] ? all[r]->call(number) : nullptr; };
  std::map<std::string, int> votes;
  for (std::size_t r = 0; r < all.size(); ++r)
    if (call(r)) ++votes[*call(r)];
  if (votes.size() < 2) return std::nullopt;
  std::size_t usual = 0;
  while (!call(usual)) ++usual;
  for (std::size_t r = usual; r < all.size(); ++r)
    if (call(r) && votes[*call(r)] > votes[*call(usual)]) usual = r;
  std::size_t other = 0;
  while (!call(other) || *call(other) == *call(usual)) ++other;
  return Failure{static_cast<int>(other), Errc::mismatch,
                 str("call ", number, " of the group's collectives is '", *call(other), "' on rank ", other,
                     ", but '", *call(usual), "' on rank ", usual)};
}

/// How far a rank is from having done its part; who is furthest is the culprit.
enum class Stage { done, queued, within_call, not_called, silent };

struct Lag {
  Stage stage = Stage::done;
  std::string reason;  ///< empty: nobody waits for it
};

/// Why rank r keeps the collective waiting.
Lag lag(std::size_t r, std::uint64_t number, const std::optional<Standing>& s, bool some_issued) {
  if (!s) return {Stage::silent, str("rank ", r, " does not answer")};
  if (s->called <= number)
    return {Stage::not_called,
            str("rank ", r, " has not called it", s->words.empty() ? "" : ", its last was '",
                s->words.empty() ? "" : s->words.back(), s->words.empty() ? "" : "'")};
  if (s->issued <= number) {
    if (!some_issued) return {};  // so it is on all ranks: none waits for this one
    return {Stage::within_call, str("rank ", r, " called it, but is still within NCCL's own call")};
  }
  if (s->begun <= number)
    return {Stage::queued, str("rank ", r, " called it, but its device still has work before it")};
  return {};
}

/// Why a message waits.
Lag lag(int rank, const Waiting::Message& m, const std::optional<Standing>& peer) {
  if (!peer) return {Stage::silent, str("rank ", m.peer, " does not answer")};
  const auto& counts = m.is_send ? peer->received : peer->sent;
  const auto own = static_cast<std::size_t>(rank);
  if (own < counts.size() && counts[own] > m.number) return {};
  return {Stage::not_called, str("rank ", m.peer, " has not called the ", m.is_send ? "recv" : "send",
                                 " for message ", m.number, m.is_send ? " from" : " to", " rank ", rank)};
}

/// Why the graph may wait that runs in this rank's stream of that number.
Lag lag_of_stream(std::size_t r, std::uint64_t number, const std::optional<Standing>& s) {
  if (!s) return {Stage::silent, str("rank ", r, " does not answer")};
  if (s->streams > number) return {};
  return {Stage::not_called, str("rank ", r, " has waited for its stream ", s->streams, " times, not ",
                                 number + 1, ", so it may not have run its graph")};
}

}  // namespace

Failure blame(int rank, const Waiting& waiting, Standings all, Errc code) {
  Failure failure{-1, code, ""};
  Stage furthest = Stage::done;
  const auto add = [&](int culprit, const Lag& found) {
    if (found.stage > furthest) {
      furthest = found.stage;
      failure.culprit = culprit;
    }
    if (!found.reason.empty()) failure.reason += str(failure.reason.empty() ? "" : "; ", found.reason);
  };
  if (waiting.collective) {
    if (auto mismatch = find_mismatch(*waiting.collective, all)) return *mismatch;
    const bool some_issued =
        std::any_of(all.begin(), all.end(), [&](auto& s) { return s && s->issued > *waiting.collective; });
    for (std::size_t r = 0; r < all.size(); ++r)
      add(static_cast<int>(r), lag(r, *waiting.collective, all[r], some_issued));
  }
  for (const auto& m : waiting.messages) add(m.peer, lag(rank, m, all[static_cast<std::size_t>(m.peer)]));
  for (std::size_t r = 0; waiting.stream && r < all.size(); ++r)
    add(static_cast<int>(r), lag_of_stream(r, *waiting.stream, all[r]));
  if (failure.culprit < 0)
    failure.reason =
        "all ranks are there, so a GPU or the network between them hangs (NCCL_DEBUG=INFO says "
        "what NCCL uses)";
  return failure;
}

}  // namespace rz::nccl
