#include "comm/backends/nccl/call_progress.h"

#include <algorithm>
#include <charconv>
#include <map>

namespace rz::nccl {

std::string describe(const CollectiveCall& op) {
  std::string text = name(op.kind);
  if (traits(op.kind).reduces) text += concat(' ', name(op.op));
  // Only arguments that all ranks share: the root's second buffer and all_to_all_v's counts differ.
  const CollectiveTraits& t = traits(op.kind);
  const bool at_output = t.out == Extent::shard && !t.out_at_root;
  if (op.kind != Collective::all_to_all_v && op.kind != Collective::barrier)
    text += concat(" of ", at_output ? op.out.count : op.in.count, ' ', name(op.out.dtype));
  if (t.rooted()) text += concat(", root ", op.root);
  return text;
}

void CallProgress::add(std::string call) {
  ++called;
  descriptions.push_back(std::move(call));
  if (descriptions.size() > max_descriptions) descriptions.pop_front();
}

const std::string* CallProgress::description_of(std::uint64_t number) const {
  if (number >= called || called - number > descriptions.size()) return nullptr;
  return &descriptions[descriptions.size() - static_cast<std::size_t>(called - number)];
}

std::string CallProgress::serialize() const {
  std::string text = concat(called, ' ', issued, ' ', started, ' ', waited_streams, '\n');
  for (const auto* list : {&sent, &received}) {
    for (const std::uint64_t n : *list) text += concat(n, ' ');
    text += '\n';
  }
  for (const std::string& w : descriptions) text += concat(w, '\n');
  return text;
}

namespace {

std::optional<std::vector<std::uint64_t>> parse_numbers(std::string_view line) {
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

std::optional<CallProgress> CallProgress::parse(const std::string& text) {
  std::vector<std::string_view> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(std::string_view(text).substr(at, end - at));
    at = end + 1;
  }
  if (lines.size() < 3) return std::nullopt;
  const auto counts = parse_numbers(lines[0]), sent = parse_numbers(lines[1]),
             received = parse_numbers(lines[2]);
  if (!counts || counts->size() != 4 || !sent || !received) return std::nullopt;
  CallProgress s{.called = (*counts)[0],
                 .issued = (*counts)[1],
                 .started = (*counts)[2],
                 .waited_streams = (*counts)[3],
                 .sent = *sent,
                 .received = *received};
  for (std::size_t i = 3; i < lines.size(); ++i) s.descriptions.emplace_back(lines[i]);
  return s;
}

namespace {

using AllProgress = std::span<const std::optional<CallProgress>>;

/// The first rank whose call of this number differs from the majority's.
std::optional<Failure> find_mismatch(std::uint64_t number, AllProgress all) {
  const auto call = [&](std::size_t r) { return all[r] ? all[r]->description_of(number) : nullptr; };
  std::map<std::string, int> votes;
  for (std::size_t r = 0; r < all.size(); ++r)
    if (call(r)) ++votes[*call(r)];
  if (votes.size() < 2) return std::nullopt;
  std::size_t majority = 0;
  while (!call(majority)) ++majority;
  for (std::size_t r = majority; r < all.size(); ++r)
    if (call(r) && votes[*call(r)] > votes[*call(majority)]) majority = r;
  std::size_t deviating = 0;
  while (!call(deviating) || *call(deviating) == *call(majority)) ++deviating;
  return Failure{static_cast<int>(deviating), Errc::mismatch,
                 concat("call ", number, " of the group's collectives is '", *call(deviating), "' on rank ",
                        deviating, ", but '", *call(majority), "' on rank ", majority)};
}

/// How far a rank is from having done its part; the rank with the highest stage is the culprit.
enum class LagStage { done, queued, within_call, not_called, unresponsive };

struct Lag {
  LagStage stage = LagStage::done;
  std::string reason;  ///< empty: the rank blocks nothing
};

/// Lag of rank r in the collective.
Lag lag_of(std::size_t r, std::uint64_t number, const std::optional<CallProgress>& s, bool some_issued) {
  if (!s) return {LagStage::unresponsive, concat("rank ", r, " sends no reply")};
  if (s->called <= number)
    return {
        LagStage::not_called,
        concat("rank ", r, " has not called it", s->descriptions.empty() ? "" : ", its last was '",
               s->descriptions.empty() ? "" : s->descriptions.back(), s->descriptions.empty() ? "" : "'")};
  if (s->issued <= number) {
    if (!some_issued) return {};  // not enqueued on any rank: this one does not block the others
    return {LagStage::within_call, concat("rank ", r, " called it, but is still within NCCL's own call")};
  }
  if (s->started <= number)
    return {LagStage::queued, concat("rank ", r, " called it, but its device still has work before it")};
  return {};
}

/// Lag of the peer of a message.
Lag lag_of(int rank, const PendingWait::Message& m, const std::optional<CallProgress>& peer) {
  if (!peer) return {LagStage::unresponsive, concat("rank ", m.peer, " sends no reply")};
  const auto& counts = m.is_send ? peer->received : peer->sent;
  const auto own = static_cast<std::size_t>(rank);
  if (own < counts.size() && counts[own] > m.number) return {};
  return {LagStage::not_called,
          concat("rank ", m.peer, " has not called the ", m.is_send ? "recv" : "send", " for message ",
                 m.number, m.is_send ? " from" : " to", " rank ", rank)};
}

/// Lag of rank r in the graph that may run in the stream of that number.
Lag lag_of_stream(std::size_t r, std::uint64_t number, const std::optional<CallProgress>& s) {
  if (!s) return {LagStage::unresponsive, concat("rank ", r, " sends no reply")};
  if (s->waited_streams > number) return {};
  return {LagStage::not_called, concat("rank ", r, " has waited for its stream ", s->waited_streams,
                                       " times, not ", number + 1, ", so it may not have run its graph")};
}

}  // namespace

Failure find_culprit(int rank, const PendingWait& pending, AllProgress all, Errc code) {
  Failure failure{-1, code, ""};
  LagStage furthest = LagStage::done;
  const auto add = [&](int culprit, const Lag& found) {
    if (found.stage > furthest) {
      furthest = found.stage;
      failure.culprit = culprit;
    }
    if (!found.reason.empty()) failure.reason += concat(failure.reason.empty() ? "" : "; ", found.reason);
  };
  if (pending.collective) {
    if (auto mismatch = find_mismatch(*pending.collective, all)) return *mismatch;
    const bool some_issued =
        std::any_of(all.begin(), all.end(), [&](auto& s) { return s && s->issued > *pending.collective; });
    for (std::size_t r = 0; r < all.size(); ++r)
      add(static_cast<int>(r), lag_of(r, *pending.collective, all[r], some_issued));
  }
  for (const auto& m : pending.messages) add(m.peer, lag_of(rank, m, all[static_cast<std::size_t>(m.peer)]));
  for (std::size_t r = 0; pending.stream && r < all.size(); ++r)
    add(static_cast<int>(r), lag_of_stream(r, *pending.stream, all[r]));
  if (failure.culprit < 0)
    failure.reason =
        "no rank is late, so a GPU or the network between them hangs (NCCL_DEBUG=INFO prints "
        "what NCCL uses)";
  return failure;
}

}  // namespace rz::nccl
