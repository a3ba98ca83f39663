#pragma once
/// Exchange of buffer handles at the beginning of a call, and the choice of its protocol. All ranks see the
/// same handles, outcomes and times, and so choose alike. Not thread safe.

#include <array>
#include <chrono>

#include "comm/intranode/buffer_handles.h"
#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"
#include "comm/intranode/zero_copy_backoff.h"

namespace rz::intranode {

class HandleExchange {
 public:
  HandleExchange(MailboxChannel& channel, SharedMemoryGroup& memory, int rank, int size)
      : channel_(channel), handles_(memory, rank, size), rank_(rank), size_(size) {}

  /// Counts the call; true if it exchanges handles, for which advance() is called. By the backoff of calls
  /// like this one. Begins a sample of the SingleCopyTuner if this call is one.
  bool begin(const PlannedCall&);
  /// Publishes this rank's handle, then reads all others; true on any progress. complete() when all are read.
  bool advance(const PlannedCall&, StepNumber);
  bool complete() const { return complete_; }
  /// The protocol of the call whose handles are complete: zero_copy if all needed buffers are mapped; else
  /// single_copy if they are readable by CMA and the policy chooses it; else as planned.
  Protocol choose(const PlannedCall&);
  /// Ends a call that has succeeded: reports its time if it was a sample. Without it the sample is dropped.
  void end() {
    if (sampled_) end_sample();
  }
  void drop_sample() { sampled_ = nullptr; }

  // The fast path, for a call like the last one, which was zero_copy.
  /// Publishes this rank's handle, which is mostly that of the last call, in a reserved slot.
  void publish_again(const PlannedCall&, StepNumber);
  /// Resumes advance() after publish_again(); `next` is the peer to poll.
  bool poll_all(StepNumber step) { return channel_.poll_all(next_, step); }
  /// Reads all handles, calling map(peer) for those that have changed. False if a needed buffer is not
  /// mapped.
  template <class F>
  bool receive_again(const PlannedCall&, StepNumber, const F& map);

  BufferHandles& handles() { return handles_; }

 private:
  void publish(const PlannedCall&, const LocalBuffers&);
  bool is_mapped(const PlannedCall&, int rank) const;
  bool is_readable(const PlannedCall&, int rank) const;
  bool tuner_chooses_single_copy(ZeroCopyBackoff&);
  ZeroCopyBackoff& backoff_of(const PlannedCall&);
  void end_sample();

  MailboxChannel& channel_;
  BufferHandles handles_;
  const int rank_, size_;
  int next_ = 0;  // the peer that polling resumes with
  bool complete_ = false;
  std::array<ZeroCopyBackoff, 64> backoffs_{};
  SingleCopyTuner* sampled_ = nullptr;  // this call is a sample of it
  std::chrono::steady_clock::time_point sample_begin_;
};

template <class F>
bool HandleExchange::receive_again(const PlannedCall& c, StepNumber step, const F& map) {
  if (!is_mapped(c, rank_)) return false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !handles_.receive(r, channel_.payload(r, step))) continue;
    if (!is_mapped(c, r)) return false;
    map(r);
  }
  return true;
}

}  // namespace rz::intranode
