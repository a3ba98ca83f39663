#pragma once
/// How ranks that meet in shared memory perform a call (comm/intranode/engine.h): which way, by the tuning
/// table, and in which pieces, as pure functions of what is known on every rank.
///
/// Ways. Of all_reduce: "one_shot", everybody reads and folds everything; "two_shot", rank r folds part r. Of
/// the others: "letters", who needs something reads it out of letters and rings. Of all: "direct", in memory
/// that every rank reaches, where it lies. Or a schedule, over streams.

#include <array>
#include <string>
#include <vector>

#include "comm/explain.h"
#include "comm/tuning/overrides.h"
#include "comm/tuning/tuning.h"

namespace rz {

/// Whether memory that peers do not share is copied once, through the kernel: if that was the faster way of
/// the last calls like it (comm/intranode/single_copy_tuner.h).
enum class SingleCopyPolicy : std::uint8_t { never, adaptive, always };

/// What calls of a range of sizes take.
struct IntranodeAlgorithm {
  std::size_t max_bytes = any_bytes;    ///< of the whole buffer, at most
  const Algorithm* schedule = nullptr;  ///< this schedule
  bool two_shot = false;                ///< of all_reduce
  bool try_zero_copy = false;           ///< whether every rank reaches the memory: then direct
  SingleCopyPolicy single_copy = SingleCopyPolicy::never;  ///< if not
  bool forced = false;                                     ///< at every call, however often in vain
  std::size_t chunk = 0;                                   ///< bytes; 0: by plan_call()
  std::string reason, zero_copy_reason, single_copy_reason;

  bool same_algorithm(const IntranodeAlgorithm&) const;
};

/// The tables as they are for one group. Constant, so any thread may ask.
class IntranodeTuningTable {
 public:
  /// Of the built-in lines.
  explicit IntranodeTuningTable(int size);
  /// `tuned` come before the built-in lines, and `forced` before all.
  IntranodeTuningTable(int size, const std::vector<TuningRule>& tuned, const std::string& table,
                       const AlgorithmOverrides& forced, bool deterministic);

  /// `bytes` of the whole buffer.
  const IntranodeAlgorithm& find(Collective c, std::size_t bytes) const {
    const IntranodeAlgorithm* way = algorithms_[static_cast<std::size_t>(c)].data();
    while (bytes > way->max_bytes) ++way;
    return *way;
  }
  /// Whether some calls of it run schedules.
  bool has_schedule(Collective c) const { return has_schedule_[static_cast<std::size_t>(c)]; }

 private:
  std::array<std::vector<IntranodeAlgorithm>, collective_count> algorithms_;
  std::array<bool, collective_count> has_schedule_{};
};

/// That hold what ranks exchange: of more, the bytes of a ring are read faster. Whoever reads from a rank
/// that is ahead finds its bytes in the ring at once: then one letter.
inline constexpr std::size_t max_inline_slots = 2;

/// Where a rank puts what it offers.
struct StagingLimits {
  std::size_t staging_bytes = 0;
  bool oversubscribed = false;
};

/// A part, or what is left of it, in pieces.
struct Chunking {
  std::size_t chunk_bytes = 1, chunks = 1;
};

/// What a call of one size comes to. Bytes; a part is what a rank has for each peer, or folds.
struct CallPlan {
  bool two_shot = false;
  bool per_peer = false;           ///< a rank's peers read each its own part
  std::uint32_t inline_slots = 0;  ///< that hold what a rank offers; 0: its ring does
  std::size_t shard_bytes = 0;
  Chunking chunking;
};

/// `common`: bytes that every rank has in common (Layout::count_per_rank); of all_to_all_v 0.
CallPlan plan_call(Collective, std::size_t common, int size, const IntranodeAlgorithm&, const StagingLimits&);
/// Of the plan's part, which is not in letters.
Chunking chunk_shard(const CallPlan&, int size, std::size_t chunk, const StagingLimits&);
/// A rank's part of an all_reduce that is folded in parts.
std::size_t shard_bytes(std::size_t bytes, int size);

/// What a call of `bytes`, of the whole buffer, comes to, in words; `reachable`: every rank reaches its
/// memory.
AlgorithmChoice explain_intranode(Collective, std::size_t bytes, int size, const IntranodeAlgorithm&,
                                  const StagingLimits&, bool reachable);

/// Bytes of a direct call between two looks at the rest of the world.
inline constexpr std::size_t zero_copy_chunk = 128 << 10;
/// The same of one whose bytes the kernel copies, which takes its time to begin.
inline constexpr std::size_t single_copy_chunk = 1 << 20;

}  // namespace rz
