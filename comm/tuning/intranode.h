#pragma once
/// Algorithm selection and chunking of the intra-node engine (comm/intranode/engine.h), as pure functions of
/// values that are the same on every rank.
///
/// Names in tuning tables: all_reduce has "one_shot" (every rank reduces everything) and "two_shot" (rank r
/// reduces shard r); the other collectives have "staged" (receivers read slots and staging rings). All but
/// all_to_all_v and barrier have "zero_copy" (registered buffers in place), data movement also "single_copy"
/// (CMA). A rule may name a schedule instead, which the executor runs over the transport.

#include <array>
#include <string>
#include <vector>

#include "comm/explain.h"
#include "comm/tuning/overrides.h"
#include "comm/tuning/tuning.h"

namespace rz {

/// Whether unregistered memory is copied by CMA. `adaptive`: if that was faster in the last samples of the
/// call shape (comm/intranode/single_copy_tuner.h).
enum class SingleCopyPolicy : std::uint8_t { never, adaptive, always };

/// Table entry: the algorithm of all calls of one collective in a range of sizes.
struct IntranodeAlgorithm {
  std::size_t max_bytes = any_bytes;    ///< message size limit, inclusive: bytes of the whole buffer
  const Algorithm* schedule = nullptr;  ///< run this schedule instead of the intra-node engine
  bool two_shot = false;                ///< all_reduce only
  bool try_zero_copy = false;           ///< zero_copy if all ranks have mapped the buffers
  SingleCopyPolicy single_copy = SingleCopyPolicy::never;  ///< otherwise
  bool forced = false;    ///< exchange handles at every call, without backoff
  std::size_t chunk = 0;  ///< bytes; 0: chosen by plan_call()
  std::size_t slice = 0;  ///< of `schedule`: bytes; 0: default_slice_bytes
  std::string reason, zero_copy_reason, single_copy_reason;

  bool same_algorithm(const IntranodeAlgorithm&) const;
};

/// The tuning table resolved for one group size. Immutable, so thread safe.
class IntranodeTuningTable {
 public:
  /// The built-in rules only.
  explicit IntranodeTuningTable(int size);
  /// Rules in order of precedence: `forced`, `tuned` (of the file named `table`), built-in. Errc::config for
  /// a forced name that the collective does not have.
  IntranodeTuningTable(int size, const std::vector<TuningRule>& tuned, const std::string& table,
                       const AlgorithmOverrides& forced, bool deterministic);

  /// The entry for a message of `bytes`, of the whole buffer.
  const IntranodeAlgorithm& find(Collective c, std::size_t bytes) const {
    const IntranodeAlgorithm* entry = algorithms_[static_cast<std::size_t>(c)].data();
    while (bytes > entry->max_bytes) ++entry;
    return *entry;
  }
  /// True if any entry of the collective is a schedule.
  bool has_schedule(Collective c) const { return has_schedule_[static_cast<std::size_t>(c)]; }

 private:
  std::array<std::vector<IntranodeAlgorithm>, collective_count> algorithms_;
  std::array<bool, collective_count> has_schedule_{};
};

/// Payloads up to 2 slots (112 B) are sent inline; beyond that the staging ring is faster. Rooted collectives
/// use at most one slot, since receivers usually find the root's ring bytes already complete.
inline constexpr std::size_t max_inline_slots = 2;

/// The staging ring as chunk sizes see it.
struct StagingLimits {
  std::size_t staging_bytes = 0;  ///< that calls are chunked for
  bool oversubscribed = false;
};

/// Division of a shard into chunks; the last one may be shorter.
struct Chunking {
  std::size_t chunk_bytes = 1, chunks = 1;
};

/// Plan of a staged call. A shard is what a rank has for each peer (per_peer), reduces (two_shot), or else
/// its whole contribution.
struct CallPlan {
  bool two_shot = false;
  bool per_peer = false;           ///< each peer reads a shard of its own
  std::uint32_t inline_slots = 0;  ///< slots of a contribution; 0: it goes to the staging ring
  std::size_t shard_bytes = 0;
  Chunking chunking;
};

/// `bytes_per_rank`: bytes of count_per_rank() elements; 0 for all_to_all_v.
CallPlan plan_call(Collective, std::size_t bytes_per_rank, int size, const IntranodeAlgorithm&,
                   const StagingLimits&);
/// Chunks of plan.shard_bytes through the staging ring. `chunk`: bytes by the tuning rule; 0: chosen here.
Chunking chunk_shard(const CallPlan&, int size, std::size_t chunk, const StagingLimits&);
/// Bytes of a rank's shard of an all_reduce of `bytes`, a multiple of 64; the last shards may be shorter.
std::size_t shard_bytes(std::size_t bytes, int size);

/// Describes the choice for a message of `bytes`, of the whole buffer. `reachable`: all ranks have mapped its
/// buffers.
AlgorithmChoice explain_intranode(Collective, std::size_t bytes, int size, const IntranodeAlgorithm&,
                                  const StagingLimits&, bool reachable);

/// Zero-copy chunk: bytes processed between two polls of control traffic.
inline constexpr std::size_t zero_copy_chunk = 128 << 10;
/// Single-copy chunk: larger, since each system call has a fixed cost.
inline constexpr std::size_t single_copy_chunk = 1 << 20;

}  // namespace rz
