#pragma once
/// The zero_copy protocol: peers read registered inputs in place; in an all_reduce rank r writes shard r into
/// the registered outputs of all ranks. No call completes before all ranks have done so. After a failure a
/// peer may still write into the output for a short time. Not thread safe.

#include <vector>

#include "comm/intranode/buffer_handles.h"
#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"
#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

class ZeroCopyCall {
 public:
  ZeroCopyCall(MailboxChannel& channel, BufferHandles& handles, int size)
      : channel_(channel), handles_(handles), operands_(static_cast<std::size_t>(size)) {}

  /// Begins a call whose needed buffers are all mapped. Step `end` ends this rank's accesses.
  void start(const PlannedCall& c, StepNumber end) {
    rounds_ = {.first = end, .chunks = c.in_place.chunking.chunks};
    next_ = 0;
  }
  /// Maps the buffers of that peer that a call accesses.
  void map_peer(const PlannedCall&, int peer);
  /// There are chunks to move: call access(). Afterwards the call completes as soon as poll_ends() is true.
  bool can_access() const { return rounds_.can_access(); }
  /// Moves one chunk without blocking. After the last one this rank no longer accesses any peer's buffers,
  /// and publishes that.
  void access(const PlannedCall&);
  /// True once all peers have published the end of their accesses.
  bool poll_ends() { return channel_.poll_all(next_, rounds_.first); }

 private:
  void access_round(const PlannedCall&, std::size_t round);
  const std::byte* source(const PlannedCall& c, int r) const {
    return r == c.ranks().rank ? c.in() : handles_.in(r);
  }
  void reduce(const PlannedCall&, std::size_t round);
  void reduce_to_all(const PlannedCall&, std::size_t at, std::size_t bytes);

  MailboxChannel& channel_;
  BufferHandles& handles_;
  InPlaceRounds rounds_;
  int next_ = 0;                       // the peer that polling resumes with
  std::vector<const void*> operands_;  // of a reduction, by rank
};

}  // namespace rz::intranode
