#pragma once
/// Exchange of control state in every reduced pass: which parameters were used, whether a rank cancelled the
/// update or broke a rule, what was counted as weights of losses, whether values were written since they were
/// last compared, the order of scopes, and on a device the optimizer's options.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace rz {

/// One small all_reduce per pass; none in a group of one rank.
class PassAgreement {
 public:
  /// `members`: the number of trainable parameters, equal on all ranks.
  PassAgreement(Communicator&, std::size_t members);
  /// Waits for an exchange in flight, because its buffer is freed here. The deadline of the communicator
  /// bounds the wait.
  ~PassAgreement();
  PassAgreement(const PassAgreement&) = delete;

  /// The gradient of the member was written on this rank.
  void mark_used(int member) { used_[static_cast<std::size_t>(member)] = 1; }
  /// Gradients were dropped on this rank.
  void reset();
  /// Hash of the scopes that this rank has run.
  void set_scopes(std::uint64_t hash);
  /// Whether the pass of this rank breaks a rule of which all ranks must know.
  void set_broken(bool broken) { broken_ = broken; }
  /// What this rank has counted as weights of micro-batches; the maximum over the ranks is counted().
  void set_counted(int counted) { counted_ = counted; }
  /// Hash of the optimizer of the update, its options and rates.
  void set_optimizer(std::uint64_t hash);
  /// Values were written on this rank.
  void mark_values_written() { values_written_ = true; }

  /// Of the buffer of an exchange.
  std::size_t bytes() const { return words_.size() * sizeof(words_[0]); }
  /// Starts the exchange. Every rank calls it once per reduced pass.
  void begin(bool cancelled);
  /// Waits for the exchange. Afterwards all ranks have the same state.
  void wait();
  /// Replaces begin() and wait() in a pass that is captured in a graph, which cannot exchange host data:
  /// reuses the result of the last exchange. Errc::invalid_argument if the set of used parameters has
  /// changed.
  void reuse_last();

  /// Before a graph is launched that contains the pass: exchanges whether a rank has cancelled the update,
  /// and hashes of optimizers; on a rank that has cancelled it, its own does not count. One call of 12 bytes.
  void exchange_before_replay(bool cancelled);

  /// True if any rank wrote the gradient of the member since gradients were dropped.
  bool is_used(int member) const { return words_[fixed_words + static_cast<std::size_t>(member)] != 0; }
  /// The members used on this rank since gradients were dropped.
  std::span<const std::uint8_t> used_now() const { return used_; }
  /// The members used on this rank, as of the last exchange.
  std::span<const std::uint8_t> used_here() const { return exchanged_; }
  /// is_used() of all members.
  std::vector<std::uint8_t> used_anywhere() const;
  /// True if any rank broke a rule.
  bool is_broken() const { return words_[4] != 0; }
  /// The maximum of set_counted() over the ranks.
  int counted() const { return words_[5]; }
  /// The lowest rank that cancelled the update; -1: none.
  int cancelled_by() const;
  /// True if all ranks had the same hash of scopes at the last exchange.
  bool same_scopes() const { return words_[2] == -words_[3]; }
  /// True if all ranks had the same set_optimizer() at the last exchange.
  bool same_optimizer() const { return words_[6] == -words_[7]; }
  /// True if values were written on any rank before the last exchange and not compared since.
  bool values_need_check() const { return words_[1] != 0; }
  /// Called after all ranks have compared their values.
  void mark_values_checked();

 private:
  static constexpr std::size_t fixed_words = 8;
  Communicator& communicator_;
  std::vector<std::uint8_t> used_, exchanged_;  // on this rank: now, and at the last exchange
  bool values_written_ = true, broken_ = false;
  int counted_ = 0;
  // [0]: size - rank if it cancelled; [1]: values written; [2], [3]: hash of scopes, and its negative; [4]: a
  // rule is broken; [5]: what was counted; [6], [7]: hash of the optimizer, and its negative; then one per
  // member: used. The maximum over the ranks.
  std::vector<std::int32_t> words_;
  std::int32_t scopes_ = 0, optimizer_ = 0;
  Work exchange_;
};

}  // namespace rz
