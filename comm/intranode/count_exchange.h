#pragma once
/// Exchange of counts at the beginning of an all_to_all_v: they determine its number of rounds. Not thread
/// safe.

#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"

namespace rz::intranode {

class CountExchange {
 public:
  CountExchange(MailboxChannel& channel, int size) : channel_(channel), size_(size) {}

  void start() { next_ = 0, complete_ = false; }
  /// Publishes this rank's counts at that step, then reads all others; true on any progress. complete() when
  /// all are read. Errc::mismatch if a peer sends another count than this rank receives.
  bool advance(const PlannedCall&, StepNumber);
  bool complete() const { return complete_; }
  /// Elements of the largest shard of any pair of ranks; the same on all ranks.
  std::size_t max_count() const { return max_count_; }

 private:
  void read(const PlannedCall&, int peer, const std::size_t* send_counts);

  MailboxChannel& channel_;
  const int size_;
  int next_ = 0;  // the peer that polling resumes with
  bool complete_ = true;
  std::size_t max_count_ = 0;
};

}  // namespace rz::intranode
