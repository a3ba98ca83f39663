#pragma once
/// The single_copy protocol, for data movement only: the kernel copies private memory of peers into this
/// rank's output (process_vm_readv, comm/os/cma.h). Not thread safe.

#include "comm/intranode/buffer_handles.h"
#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"
#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

class SingleCopyCall {
 public:
  SingleCopyCall(MailboxChannel& channel, BufferHandles& handles, int rank, int size)
      : channel_(channel), handles_(handles), rank_(rank), size_(size) {}

  /// Begins a call whose inputs all ranks can read. Step `end` ends this rank's accesses.
  void start(const PlannedCall&, StepNumber end);
  /// There are chunks to copy: call access(). Afterwards the call ends as soon as poll_ends() is true.
  bool can_access() const { return rounds_.can_access(); }
  /// Copies one chunk without blocking. False: a peer's process is gone. After the last chunk, or if the
  /// kernel has refused a read, publishes that and whether it was refused.
  bool access(const PlannedCall&);
  bool poll_ends() { return channel_.poll_all(next_, rounds_.first); }
  /// After poll_ends(): no rank was refused. Otherwise all run the call again, staged: data movement has not
  /// changed any input. From the next call on the refused rank publishes has_cma = false.
  bool succeeded() const;

 private:
  CmaResult copy_round(const PlannedCall&, std::size_t round);
  CmaResult copy_from(const PlannedCall&, int r, std::size_t round);
  void send_end(bool refused);

  MailboxChannel& channel_;
  BufferHandles& handles_;
  const int rank_, size_;
  CallPlan plan_;
  InPlaceRounds rounds_;
  int next_ = 0;  // the peer that polling resumes with
};

}  // namespace rz::intranode
