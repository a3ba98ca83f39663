#pragma once
/// How ranks that meet in shared memory perform a call (comm/backends/together.h): which way, by the tuning
/// table, and in which pieces, as pure functions of what is known on every rank.
///
/// Ways. Of all_reduce: "one_shot", everybody reads and folds everything; "two_shot", rank r folds part r. Of
/// the others: "letters", who needs something reads it out of letters and rings. Of all: "direct", in memory
/// that every rank reaches, where it lies. Or a schedule, over streams.

#include <array>
#include <string>
#include <vector>

#include "comm/choice.h"
#include "comm/forced.h"
#include "comm/tuning.h"

namespace rz {

/// Whether memory that peers do not share is copied once, through the kernel: if that was the faster way of
/// the last calls like it (comm/backends/way_by_time.h).
enum class Once : std::uint8_t { never, by_time, always };

/// What calls of a range of sizes take.
struct TogetherWay {
  std::size_t bytes = any_bytes;       ///< of the whole buffer, at most
  const Algorithm* streams = nullptr;  ///< this schedule
  bool two_shot = false;               ///< of all_reduce
  bool asks = false;                   ///< whether every rank reaches the memory: then direct
  Once once = Once::never;             ///< if not
  bool insists = false;                ///< at every call, however often in vain
  std::size_t chunk = 0;               ///< bytes; 0: by plan_together()
  std::string why, why_direct, why_once;

  bool same_as(const TogetherWay&) const;
};

/// The tables as they are for one group. Constant, so any thread may ask.
class TogetherTable {
 public:
  /// Of the built-in lines.
  explicit TogetherTable(int size);
  /// `tuned` come before the built-in lines, and `forced` before all.
  TogetherTable(int size, const std::vector<TuningRule>& tuned, const std::string& table,
                const ForcedAlgorithms& forced, bool deterministic);

  /// `bytes` of the whole buffer.
  const TogetherWay& of(Collective c, std::size_t bytes) const {
    const TogetherWay* way = ways_[static_cast<std::size_t>(c)].data();
    while (bytes > way->bytes) ++way;
    return *way;
  }
  /// Whether some calls of it run schedules.
  bool may_stream(Collective c) const { return may_stream_[static_cast<std::size_t>(c)]; }

 private:
  std::array<std::vector<TogetherWay>, collective_count> ways_;
  std::array<bool, collective_count> may_stream_{};
};

/// That hold what ranks exchange: of more, the bytes of a ring are read faster. Whoever reads from a rank
/// that is ahead finds its bytes in the ring at once: then one letter.
inline constexpr std::size_t most_letters = 2;

/// Where a rank puts what it offers.
struct TogetherRoom {
  std::size_t ring_bytes = 0;
  bool crowded = false;
};

/// A part, or what is left of it, in pieces.
struct TogetherPieces {
  std::size_t piece = 1, rounds = 1;
};

/// What a call of one size comes to. Bytes; a part is what a rank has for each peer, or folds.
struct TogetherPlan {
  bool two_shot = false;
  bool split = false;         ///< a rank's peers read each its own part
  std::uint32_t letters = 0;  ///< that hold what a rank offers; 0: its ring does
  std::size_t part = 0;
  TogetherPieces pieces;
};

/// `common`: bytes that every rank has in common (Layout::common_count); of all_to_all_v 0.
TogetherPlan plan_together(Collective, std::size_t common, int size, const TogetherWay&, const TogetherRoom&);
/// Of the plan's part, which is not in letters.
TogetherPieces cut_together(const TogetherPlan&, int size, std::size_t chunk, const TogetherRoom&);
/// A rank's part of an all_reduce that is folded in parts.
std::size_t part_together(std::size_t bytes, int size);

/// What a call of `bytes`, of the whole buffer, comes to, in words; `reachable`: every rank reaches its
/// memory.
CallChoice explain_together(Collective, std::size_t bytes, int size, const TogetherWay&, const TogetherRoom&,
                            bool reachable);

/// Bytes of a direct call between two looks at the rest of the world.
inline constexpr std::size_t direct_piece = 128 << 10;
/// The same of one whose bytes the kernel copies, which takes its time to begin.
inline constexpr std::size_t once_piece = 1 << 20;

}  // namespace rz
