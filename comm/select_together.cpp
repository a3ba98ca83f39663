#include "comm/select_together.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/rounding.h"
#include "comm/transports/meeting.h"

namespace rz {

namespace {

constexpr std::size_t KiB = 1024;
constexpr std::size_t line = 64;
// Pieces of a part, if they are at least, and at most, of so many bytes. Fewer in two phases, where folding
// and gathering overlap anyhow, and on a crowded host, where each is a change of processes. Large ones were
// measured to be faster, most likely since what a peer reads has left the writer's own cache by then.
constexpr std::size_t pipelined = 4, pipelined_in_two_phases = 2, pipelined_if_crowded = 2;
constexpr std::size_t least_piece = 4 * KiB, most_piece = 128 * KiB, most_piece_if_crowded = 64 * KiB;

using enum Collective;
using enum Where;

// Where memory lies costs a letter to ask. Of what one rank sends, or gets, no rank waits for all others
// anyhow.
constexpr TuningRule table[] = {
    {.collective = all_reduce, .where = together, .algorithm = "one_shot", .size = 2, .bytes = 64 * KiB},
    {.collective = all_reduce, .where = together, .algorithm = "one_shot", .bytes = 32 * KiB},
    {.collective = all_reduce, .where = together, .algorithm = "two_shot"},
    {.collective = reduce_scatter, .where = together, .algorithm = "letters"},
    {.collective = all_gather, .where = together, .algorithm = "letters"},
    {.collective = broadcast, .where = together, .algorithm = "letters"},
    {.collective = reduce, .where = together, .algorithm = "letters"},
    {.collective = gather, .where = together, .algorithm = "letters"},
    {.collective = scatter, .where = together, .algorithm = "letters"},
    {.collective = all_to_all, .where = together, .algorithm = "letters"},
    {.collective = all_to_all_v, .where = together, .algorithm = "letters"},
    {.collective = barrier, .where = together, .algorithm = "letters"},

    {.collective = all_reduce, .where = reachable, .algorithm = "copied", .bytes = 2 * KiB - 1},
    {.collective = all_reduce, .where = reachable, .algorithm = "direct"},
    {.collective = reduce_scatter, .where = reachable, .algorithm = "copied", .bytes = 2 * KiB - 1},
    {.collective = reduce_scatter, .where = reachable, .algorithm = "direct"},
    {.collective = all_gather, .where = reachable, .algorithm = "copied", .bytes = 8 * KiB - 1},
    {.collective = all_gather, .where = reachable, .algorithm = "direct"},
    {.collective = broadcast, .where = reachable, .algorithm = "copied", .bytes = 16 * KiB - 1},
    {.collective = broadcast, .where = reachable, .algorithm = "direct"},
    {.collective = reduce, .where = reachable, .algorithm = "copied", .bytes = 16 * KiB - 1},
    {.collective = reduce, .where = reachable, .algorithm = "direct"},
    {.collective = gather, .where = reachable, .algorithm = "copied", .bytes = 64 * KiB - 1},
    {.collective = gather, .where = reachable, .algorithm = "direct"},
    {.collective = scatter, .where = reachable, .algorithm = "copied", .bytes = 16 * KiB - 1},
    {.collective = scatter, .where = reachable, .algorithm = "direct"},
    {.collective = all_to_all, .where = reachable, .algorithm = "copied", .bytes = 2 * KiB - 1},
    {.collective = all_to_all, .where = reachable, .algorithm = "direct"},
    {.collective = all_to_all_v, .where = reachable, .algorithm = "copied"},
    {.collective = barrier, .where = reachable, .algorithm = "copied"},

    {.collective = all_gather, .where = readable, .algorithm = "by_time", .bytes_above = 64 * KiB - 1},
    {.collective = broadcast, .where = readable, .algorithm = "by_time", .bytes_above = 64 * KiB - 1},
    {.collective = gather, .where = readable, .algorithm = "by_time", .bytes_above = 64 * KiB - 1},
    {.collective = scatter, .where = readable, .algorithm = "by_time", .bytes_above = 64 * KiB - 1},
    {.collective = all_to_all, .where = readable, .algorithm = "by_time", .bytes_above = 64 * KiB - 1},
};

// What a rank that explains a call does not know: whether all may read, and what the last calls took.
constexpr const char* by_time_words =
    "; single_copy instead while all ranks may read each other's memory and that takes less time";

/// Fills the ways of one group.
class Resolver {
 public:
  Resolver(int size, const std::vector<TuningRule>& tuned, const std::string& name, bool deterministic)
      : size_(size), name_(name), deterministic_(deterministic), rules_(tuned) {
    rules_.insert(rules_.end(), std::begin(table), std::end(table));
  }

  /// By size, each up to a limit that some line has.
  std::vector<TogetherWay> ways(Collective c) const {
    std::vector<TogetherWay> found;
    for (const std::size_t bytes : limits(c)) {
      TogetherWay way = resolve(c, bytes);
      if (!found.empty() && found.back().same_as(way))
        found.back().bytes = bytes;
      else
        found.push_back(std::move(way));
    }
    return found;
  }

  std::vector<TogetherWay> forced(Collective c, const std::string& algorithm) const {
    const std::string why = str("forced: ", name(c), "=", algorithm);
    const bool direct = algorithm == "direct";
    if (direct || algorithm == "single_copy") {
      auto found = ways(c);
      for (TogetherWay& way : found) {
        way.insists = true;
        way.why += str("; ", algorithm, " is forced, but not all of the memory can be ",
                       direct ? "reached" : "read");
        if (direct)
          way.asks = true, way.why_direct = why;
        else
          way.once = Once::always, way.why_once = why;
      }
      return found;
    }
    TuningRule rule{c, together, ""};
    set_algorithm(rule, algorithm);
    TogetherWay way;
    use(rule, way);
    way.why = why;
    return {way};
  }

 private:
  std::vector<std::size_t> limits(Collective c) const {
    std::vector<std::size_t> all{any_bytes};
    for (const TuningRule& r : rules_) {
      if (r.collective != c || !is_of_those_who_meet(r.where)) continue;
      all.push_back(r.bytes);
      if (r.bytes_above > 0) all.push_back(r.bytes_above);
      if (r.traffic != any_bytes) all.push_back(r.traffic / static_cast<std::size_t>(size_));
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

  TogetherWay resolve(Collective c, std::size_t bytes) const {
    TogetherWay way{.bytes = bytes};
    const TuningRule* const any = find_rule(rules_, {c, together, bytes, size_}, deterministic_);
    const TuningRule* const reached = find_rule(rules_, {c, reachable, bytes, size_}, deterministic_);
    if (any) use(*any, way);  // of send and recv there is none
    const TuningRule* const read = find_rule(rules_, {c, readable, bytes, size_}, deterministic_);
    if (way.streams) return way;
    if (reached && std::string_view(reached->algorithm) == "direct") {
      way.asks = true;
      way.why_direct = says(*reached);
    }
    if (read) use_once(*read, way);
    return way;
  }

  void use_once(const TuningRule& rule, TogetherWay& way) const {
    const std::string_view algorithm = rule.algorithm;
    if (algorithm == "copied") return;
    way.once = algorithm == "by_time" ? Once::by_time : Once::always;
    way.why_once = says(rule);
  }

  void use(const TuningRule& rule, TogetherWay& way) const {
    const std::string_view algorithm = rule.algorithm;
    way.streams = rule.streams ? &find_algorithm(rule.collective, algorithm) : nullptr;
    way.two_shot = !rule.streams && algorithm == "two_shot";
    way.chunk = rule.chunk;
    way.why = says(rule);
  }

  std::string says(const TuningRule& rule) const { return words_of_source(rule, name_) + in_words(rule); }

  int size_;
  const std::string& name_;
  bool deterministic_;
  std::vector<TuningRule> rules_;
};

}  // namespace

bool TogetherWay::same_as(const TogetherWay& o) const {
  return streams == o.streams && two_shot == o.two_shot && asks == o.asks && insists == o.insists &&
         once == o.once && chunk == o.chunk && why == o.why && why_direct == o.why_direct &&
         why_once == o.why_once;
}

TogetherTable::TogetherTable(int size) : TogetherTable(size, {}, "", {}, true) {}

TogetherTable::TogetherTable(int size, const std::vector<TuningRule>& tuned, const std::string& name,
                             const ForcedAlgorithms& forced, bool deterministic) {
  const Resolver resolver(size, tuned, name, deterministic);
  for (int i = 0; i < collective_count; ++i) {
    const Collective c{static_cast<std::uint8_t>(i)};
    auto& ways = ways_[static_cast<std::size_t>(i)];
    ways = forced.of(c).empty() ? resolver.ways(c) : resolver.forced(c, forced.of(c));
    for (const TogetherWay& way : ways) may_stream_[static_cast<std::size_t>(i)] |= way.streams != nullptr;
  }
}

std::size_t part_together(std::size_t bytes, int size) {
  return ceil_div(ceil_div(bytes, static_cast<std::size_t>(size)), line) * line;
}

TogetherPlan plan_together(Collective kind, std::size_t common, int size, const TogetherWay& way,
                           const TogetherRoom& room) {
  TogetherPlan plan;
  plan.two_shot = kind == all_reduce && way.two_shot && common > 0;
  plan.split = plan.two_shot || traits(kind).sends_per_rank();
  plan.part = plan.two_shot ? part_together(common, size) : common;
  const std::size_t offered = plan.split ? plan.part * (static_cast<std::size_t>(size) - 1) : plan.part;
  const std::size_t letters = std::max<std::size_t>(ceil_div(offered, letter_bytes), 1);
  if (letters <= (traits(kind).rooted() ? 1 : most_letters) && !plan.two_shot && kind != all_to_all_v)
    plan.letters = static_cast<std::uint32_t>(letters);
  if (plan.letters)
    plan.pieces.piece = std::max<std::size_t>(plan.part, 1);
  else
    plan.pieces = cut_together(plan, size, way.chunk, room);
  return plan;
}

TogetherPieces cut_together(const TogetherPlan& plan, int size, std::size_t chunk, const TogetherRoom& room) {
  const std::size_t shares = plan.split ? static_cast<std::size_t>(size) - 1 : 1;
  // In two phases a rank writes two offers and two results before it needs to be read, and some of the ring's
  // end may be too short for an offer.
  const std::size_t in_flight = room.ring_bytes / (3 * shares + 2) / line * line;
  TogetherPieces cut;
  if (chunk) {
    cut.piece = std::min(chunk, in_flight);
  } else {
    const std::size_t wanted = (room.crowded ? most_piece_if_crowded : most_piece) / shares / line * line;
    const std::size_t most = std::min(wanted, in_flight);
    const std::size_t pieces = room.crowded    ? pipelined_if_crowded
                               : plan.two_shot ? pipelined_in_two_phases
                                               : pipelined;
    cut.piece = std::clamp(ceil_div(plan.part / pieces, line) * line, std::min(least_piece, most), most);
  }
  cut.piece = std::min(cut.piece, std::max(ceil_div(plan.part, line), std::size_t{1}) * line);
  cut.rounds = std::max<std::size_t>(ceil_div(plan.part, cut.piece), 1);
  return cut;
}

CallChoice explain_together(Collective kind, std::size_t bytes, int size, const TogetherWay& way,
                            const TogetherRoom& room, bool is_reachable) {
  if (is_reachable && way.asks) return {"direct", "shm", direct_piece, way.why_direct};
  if (way.once == Once::always) return {"single_copy", "shm", once_piece, way.why_once};
  const std::size_t common = bytes / (whole_bytes(kind, 1, size));
  const TogetherPlan plan = plan_together(kind, common, size, way, room);
  const char* const algorithm = plan.two_shot ? "two_shot" : kind == all_reduce ? "one_shot" : "letters";
  const std::size_t chunk = plan.letters ? 0 : std::min(plan.pieces.piece, std::max(plan.part, line));
  const std::string why = way.once == Once::by_time ? way.why + by_time_words : way.why;
  return {algorithm, "shm", kind == all_to_all_v ? 0 : chunk, why};
}

}  // namespace rz
