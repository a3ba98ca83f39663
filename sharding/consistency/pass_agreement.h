#pragma once
/// What the ranks exchange with every reduced pass: which parameters a loss reached, whether a rank gave the
/// update up, and whether values were written since they were last compared.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace rz {

/// One small all_reduce a pass; none in a group of one rank.
class PassAgreement {
 public:
  PassAgreement(Communicator&, std::size_t members);
  /// Waits for an exchange under way, whose memory goes: it ends by the communicator's deadline.
  ~PassAgreement();
  PassAgreement(const PassAgreement&) = delete;

  /// A gradient of the member was written here.
  void mark_used(int member) { used_[static_cast<std::size_t>(member)] = 1; }
  /// Gradients were forgotten here.
  void reset();
  /// Values were written here.
  void mark_values_written() { values_written_ = true; }

  /// Starts the exchange; every rank calls it, once a reduced pass.
  void begin(bool cancelled);
  /// Waits for it. From here on the ranks know the same.
  void wait();
  /// In place of both where a pass is captured in a graph, which cannot ask: what the last exchange gave.
  /// Errc::invalid_argument if a loss reaches other parameters now.
  void reuse_last();

  /// On any rank, since its gradients were forgotten.
  bool is_used(int member) const { return words_[fixed_words + static_cast<std::size_t>(member)] != 0; }
  /// The lowest rank that gave the update up; -1: none.
  int cancelled_by() const;
  /// Whether values were written on any rank before the last exchange and not compared since.
  bool values_need_check() const { return words_[1] != 0; }
  /// All ranks have compared them.
  void mark_values_checked();

 private:
  static constexpr std::size_t fixed_words = 2;
  Communicator& communicator_;
  std::vector<std::uint8_t> used_, exchanged_;  // here: now, and at the last exchange
  bool values_written_ = true;
  std::vector<std::int32_t> words_;  // size - rank if it cancelled, values written, members: reached
  Work exchange_;
};

}  // namespace rz
