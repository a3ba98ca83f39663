#pragma once
/// Runs one collective at a time by its schedule, as a dataflow machine over the byte streams of a transport.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/schedule/chunk_memory.h"
#include "comm/schedule/dependency_plan.h"
#include "comm/schedule/receive_stream.h"
#include "comm/transport/transport.h"
#include "comm/transport/wait_for_graph.h"

namespace rz::schedule {

/// Slice: bytes reduced before dependent sends continue. Large enough to amortize, small enough to stay in
/// cache.
inline constexpr std::size_t default_slice_bytes = 64 << 10;

/// How far a step of a call is.
struct StepProgress {
  std::size_t size = 0, done = 0;  ///< bytes; a send: bytes that the transport has accepted
  std::uint64_t stream_begin = 0;  ///< a send: its first byte in all bytes posted to the peer
  bool finished = false;
};

class StepProgressList {
 public:
  /// For a new call, whose steps have no size yet.
  void start(std::size_t steps) {
    steps_.assign(steps, {});
    first_unfinished_ = 0;
    unfinished_ = steps;
  }
  StepProgress& operator[](int step) { return steps_[static_cast<std::size_t>(step)]; }
  const StepProgress& operator[](int step) const { return steps_[static_cast<std::size_t>(step)]; }
  void finish(int step) {
    (*this)[step].finished = true;
    --unfinished_;
    while (first_unfinished_ < steps_.size() && steps_[first_unfinished_].finished) ++first_unfinished_;
  }
  bool all_finished() const { return unfinished_ == 0; }
  int first_unfinished() const { return static_cast<int>(first_unfinished_); }
  int size() const { return static_cast<int>(steps_.size()); }

 private:
  std::vector<StepProgress> steps_;
  std::size_t first_unfinished_ = 0, unfinished_ = 0;
};

/// Reused from call to call; in the steady state it allocates nothing. Not thread safe: the progress engine's
/// driving thread calls all of it.
class Executor {
 public:
  Executor(Transport&, int rank, int size);

  /// Begins a call; requires complete(). Call and plan must outlive it. `slice`: bytes, a multiple of 64.
  void start(const CollectiveCall&, const DependencyPlan&, const CallSignature&,
             std::size_t slice = default_slice_bytes);
  /// Moves data without blocking; true on any progress. Errc::mismatch if a peer made another call.
  bool advance();
  bool complete() const { return steps_.all_finished(); }
  /// The peers that the call waits for. The suspect is first a peer that has sent nothing of the call, then
  /// one that has not sent all, then one that does not receive.
  WaitState waiting_on() const;

 private:
  /// The call that start() began.
  struct ScheduledCall {
    const CollectiveCall* op = nullptr;
    const DependencyPlan* plan = nullptr;
    CallSignature signature;
    DType dtype = DType::u8;
    std::size_t element_bytes = 1, slice_bytes = default_slice_bytes;

    const Step& step(int i) const { return plan->steps[static_cast<std::size_t>(i)].step; }
    CallSignature signature_of_send(int peer) const;
    CallSignature signature_of_receive(int peer) const;
  };
  /// A peer, and the positions of its next steps in DependencyPlan::sends and receives.
  struct Peer {
    ReceiveStream incoming;
    std::size_t next_send = 0, next_receive = 0;
    std::uint64_t posted = 0;  // bytes, in all calls; Transport::released() counts against it
  };
  enum class PeerWait { none, receiving, partial, everything };

  const Peer& peer(int i) const { return peers_[static_cast<std::size_t>(i)]; }
  Peer& peer(int i) { return peers_[static_cast<std::size_t>(i)]; }
  std::size_t progress_of(int step) const;
  std::size_t available(int step) const;
  bool copies(const Step&) const;
  std::size_t posted_limit(int step) const;
  bool advance_send(int step);
  bool advance_local(int step);
  bool advance_receive(int step, int peer, std::size_t limit);
  bool advance_reduce(int step, std::size_t limit);
  bool match(int peer);
  bool is_next_send(int step, int peer) const;
  bool is_next_receive(const Step&, int step) const;
  PeerWait wait_of(int peer) const;

  Transport& transport_;
  const int rank_, size_;
  ScheduledCall call_;
  ChunkMemory memory_;
  StepProgressList steps_;
  std::vector<Peer> peers_;
  std::vector<const void*> sources_;    // of one reduction; a member, to allocate nothing
  std::vector<unsigned char> partial_;  // by source: Operand::partial
};

}  // namespace rz::schedule
