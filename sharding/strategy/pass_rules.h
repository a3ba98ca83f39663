#pragma once
/// What the ranks of a reduced pass must know of each other, and the rules that their passes keep.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/gather_plan.h"
#include "sharding/model/options.h"
#include "sharding/strategy/pass_state.h"

namespace rz {

/// Exchanges control state once per reduced pass, in one small all_reduce; none in a group of one rank.
/// Afterwards all ranks know which parameters were used, and whether one has broken a rule:
/// find_unused_parameters or static_graph. A rank without data breaks none. Not thread-safe.
class PassRules {
 public:
  /// All references must outlive this object. Parameters are equal on all ranks.
  PassRules(const StrategyOptions&, const PassState&, const ModelParameters&, Communicator&);
  /// Waits for an exchange in flight, because its buffer is freed here. The deadline of the communicator
  /// bounds the wait.
  ~PassRules();
  PassRules(const PassRules&) = delete;

  // ---- what this rank adds to the next exchange, besides its PassState
  /// Hash of the scopes that this rank has run.
  void set_scopes(std::uint64_t hash);
  /// What this rank has counted as weights of micro-batches; the maximum over the ranks is counted().
  void set_counted(int counted) { counted_ = counted; }
  /// Hash of the optimizer of the update, its options and rates.
  void set_optimizer(std::uint64_t hash);
  /// Values were written on this rank.
  void mark_values_written() { values_written_ = true; }

  // ---- the exchange
  /// The size of its buffer.
  std::size_t bytes() const { return words_.size() * sizeof(words_[0]); }
  /// Starts it. Every rank calls it once per reduced pass.
  void begin_exchange();
  /// Waits for it. Afterwards all ranks have the same state.
  void wait();
  /// Replaces it in a pass that is captured in a graph, which cannot exchange host data: reuses the result of
  /// the last one. Errc::invalid_argument if the set of used parameters has changed.
  void reuse_last();
  /// Before a graph is launched that contains the pass: exchanges hashes of optimizers. One call of 8 bytes.
  void exchange_before_replay();
  /// An exchange in flight has failed, and the trace of scopes begins anew.
  void restart() { exchange_ = {}, compared_visits_ = 0; }

  // ---- of all ranks, as of the last exchange
  /// True if any rank wrote the gradient of the member since gradients were dropped.
  bool is_used(int member) const { return words_[fixed_words + static_cast<std::size_t>(member)] != 0; }
  /// PassState::used() of this rank.
  std::span<const std::uint8_t> used_here() const { return exchanged_; }
  /// The maximum of set_counted() over the ranks.
  int counted() const { return words_[4]; }
  /// Errc::mismatch names the first scope that ranks have not run alike since the last call, and the rank.
  /// Collective.
  void require_same_scopes(const ScopeTrace&);
  /// True if all ranks had the same set_optimizer().
  bool same_optimizer() const { return words_[5] == -words_[6]; }
  /// True if values were written on any rank before it and not compared since.
  bool values_need_check() const { return words_[0] != 0; }
  /// Called after all ranks have compared their values.
  void mark_values_checked();
  /// Whether a rank has broken a rule. Every rank calls fail() then.
  bool failed() const { return words_[3] != 0; }
  /// Throws the same error on all ranks: Errc::invalid_argument names the parameters without a gradient and
  /// their ranks; Errc::mismatch the parameter and the rank that left the static graph, its culprit.
  /// Collective.
  [[noreturn]] void fail() const;

  // ---- the static graph
  /// The update has succeeded. With static_graph, the last pass of the first one becomes the graph.
  void end_update();
  /// False for a member that no rank uses in the static graph.
  bool may_be_used(int member) const { return !recorded_ || anywhere_[static_cast<std::size_t>(member)]; }

 private:
  /// How a rank's pass breaks a rule; four words on the wire.
  struct Finding {
    enum Kind : std::int32_t { none, unused, added, missing, reordered };
    std::int32_t kind = none, member = 0, expected = 0, position = 0;
  };
  Finding find(std::span<const std::uint8_t> used) const;
  Finding difference(std::span<const std::uint8_t> used) const;
  [[noreturn]] void fail_static(const Finding&, int rank) const;
  [[noreturn]] void fail_unused() const;

  const StrategyOptions& options_;
  const PassState& state_;
  const ModelParameters& parameters_;
  Communicator& communicator_;
  // [0]: values written; [1], [2]: hash of scopes, and its negative; [3]: a rule is broken; [4]: what was
  // counted; [5], [6]: hash of the optimizer, and its negative; then one per member: used. The maximum over
  // the ranks.
  static constexpr std::size_t fixed_words = 7;
  std::vector<std::int32_t> words_;
  std::vector<std::uint8_t> exchanged_;  // PassState::used() at the last exchange
  Work exchange_;
  bool values_written_ = true;
  int counted_ = 0;
  std::uint64_t compared_visits_ = 0;  // of the trace, until the last require_same_scopes()
  std::int32_t scopes_ = 0, optimizer_ = 0;
  // The static graph: members of this rank as they became ready, and those used, none if it had no data; and
  // what any rank used.
  bool recorded_ = false;
  std::vector<int> static_order_;
  std::vector<std::uint8_t> static_used_, anywhere_;
};

}  // namespace rz
