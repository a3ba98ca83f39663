#pragma once
/// Algorithm selection of the intra-node engine (comm/intranode/engine.h), as pure functions of values that
/// are the same on every rank.
///
/// Names in tuning tables: all_reduce has "one_shot" (every rank reduces everything) and "two_shot" (rank r
/// reduces shard r); the other collectives have "staged" (receivers read slots and staging rings). All but
/// all_to_all_v and barrier have "zero_copy" (registered buffers in place), data movement also "single_copy"
/// (CMA). A rule may name a schedule instead, which the executor runs over the transport.

#include <array>
#include <string>
#include <vector>

#include "comm/tuning/overrides.h"
#include "comm/tuning/tuning.h"

namespace rz::tuning {

/// Whether unregistered memory is copied by CMA. `adaptive`: if that was faster in the last samples of the
/// call shape (comm/intranode/single_copy_tuner.h).
enum class SingleCopyPolicy : std::uint8_t { never, adaptive, always };

/// Table entry: the algorithm of all calls of one collective in a range of sizes.
struct IntranodeAlgorithm {
  std::size_t max_bytes = any_bytes;  ///< message size limit, inclusive: bytes of the whole buffer
  const schedule::Algorithm* schedule = nullptr;  ///< run this schedule instead of the intra-node engine
  bool two_shot = false;                          ///< all_reduce only
  bool try_zero_copy = false;                     ///< zero_copy if all ranks have mapped the buffers
  SingleCopyPolicy single_copy = SingleCopyPolicy::never;  ///< otherwise
  bool forced = false;    ///< exchange handles at every call, without backoff
  std::size_t chunk = 0;  ///< bytes; 0: chosen by plan_call()
  std::size_t slice = 0;  ///< of `schedule`: bytes; 0: default_slice_bytes
  std::string reason, zero_copy_reason, single_copy_reason;

  bool same_algorithm(const IntranodeAlgorithm&) const;
};

/// The tuning table resolved for one group size. Immutable, so thread safe.
class IntranodeTable {
 public:
  /// The built-in rules only.
  explicit IntranodeTable(int size);
  /// Rules in order of precedence: `forced`, `tuned` (of the file named `table`), built-in. Errc::config for
  /// a forced name that the collective does not have.
  IntranodeTable(int size, const std::vector<Rule>& tuned, const std::string& table,
                 const AlgorithmOverrides& forced, bool deterministic, ReductionOrder = ReductionOrder::rank);

  /// The entry for a message of `bytes`, of the whole buffer.
  const IntranodeAlgorithm& find(Collective c, std::size_t bytes) const {
    const IntranodeAlgorithm* entry = algorithms_[static_cast<std::size_t>(c)].data();
    while (bytes > entry->max_bytes) ++entry;
    return *entry;
  }
  /// Order of all reductions.
  ReductionOrder order() const { return order_; }
  /// True if any entry of the collective is a schedule.
  bool has_schedule(Collective c) const { return has_schedule_[static_cast<std::size_t>(c)]; }

 private:
  std::array<std::vector<IntranodeAlgorithm>, collective_count> algorithms_;
  std::array<bool, collective_count> has_schedule_{};
  ReductionOrder order_;
};

}  // namespace rz::tuning
