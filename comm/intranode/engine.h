#pragma once
/// Intra-node collectives over shared memory, by mailbox slots instead of transport streams (which serve
/// comm/schedule/executor.h). See README.md in this folder.
///
/// A call is a sequence of steps, the same on every rank. At each step a rank publishes one slot: with an
/// inline payload, with bytes in its staging ring, or with buffer handles. Four protocols:
///   one_shot     every rank reads every contribution that it needs from slots or staging rings (staged.h).
///   two_shot     all_reduce: rank r reduces shard r, and an all_gather follows; both through staging rings.
///   zero_copy    peers access registered buffers in place (zero_copy.h).
///   single_copy  data movement only: receivers copy out of the owner's process (single_copy.h).
/// All reduce in IntranodeTable::order(), so results have the bits of every schedule in that order.
///
/// Not thread safe, except table(): one thread at a time drives the engine.

#include <cstdint>

#include "comm/collective.h"
#include "comm/intranode/count_exchange.h"
#include "comm/intranode/fast_path.h"
#include "comm/intranode/handle_exchange.h"
#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"
#include "comm/intranode/single_copy.h"
#include "comm/intranode/staged.h"
#include "comm/intranode/zero_copy.h"
#include "comm/progress/collective_engine.h"
#include "comm/transport/transport.h"

namespace rz::intranode {

class Engine final : public CollectiveEngine {
 public:
  /// Requires shared_memory() with mailboxes(). `first_step`: see MailboxChannel.
  Engine(Transport&, int rank, int size, StepNumber first_step = 0);
  Engine(Transport&, int rank, int size, tuning::IntranodeTable, StepNumber first_step = 0);

  /// Begins the call of that sequence number; requires complete(). The CollectiveCall must outlive the call,
  /// unless rebind() replaces it.
  void start(const CollectiveCall&, std::uint32_t sequence) override;
  /// Largest message, in bytes, that the caller's own thread tries before the progress engine gets it.
  static constexpr std::size_t max_inline_bytes = FastPath::max_bytes;

  /// True if run_fast_path() can run the call, on host memory: it has the plan of the last call, and that
  /// plan is no premul_sum, all_to_all_v or message over max_inline_bytes.
  bool matches_last(const CollectiveCall& call) const {
    return fast_path_.eligible() && same_plan(call, planned_for_);
  }
  /// start() and spin() of such a call, with the fewest instructions. True: complete. False: call() goes on
  /// with advance() or spin().
  bool run_fast_path(const CollectiveCall&, std::uint32_t sequence, int turns);
  const CollectiveCall& call() const { return *call_.op; }
  /// Replaces the current call by an equal one at another address.
  void rebind(const CollectiveCall& op) { call_.bind(op); }
  /// Moves data without blocking; true on any progress. Errc::mismatch if a peer made another call.
  bool advance() override;
  /// advance() until the call is complete or `turns` polls have failed; on an oversubscribed node it yields
  /// between polls, for 500 us at most. Then check_peer_alive(). True: complete. Returns early, with busy(),
  /// after max_spin_bytes bytes, so that the caller can check failures and deadlines during large calls.
  bool spin(int turns);
  static constexpr std::size_t max_spin_bytes = 8 << 20;
  /// The last spin() returned after max_spin_bytes: there is more to move without waiting.
  bool busy() const { return busy_; }
  bool complete() const override { return phase_ == Phase::complete; }
  /// Throws if the peer that the call waits for has left the group.
  void check_peer_alive() { channel_.check_peer_alive(); }

  /// The tuning entry whose schedule serves the call, by the executor; null: call start().
  const tuning::IntranodeAlgorithm* schedule_for(const CollectiveCall& op) const {
    return planner_.schedule_for(op);
  }
  /// Thread safe.
  const tuning::IntranodeTable& table() const { return planner_.table(); }
  /// What plan_call() may use of the staging ring.
  StagingLimits limits() const { return planner_.limits(); }

  WaitState waiting_on() const override;

 private:
  /// Part of the current call.
  enum class Phase : std::uint8_t {
    complete,
    exchanging_handles,
    exchanging_counts,
    one_shot,
    two_shot,
    zero_copy,
    single_copy
  };

  void begin();
  void begin_staged(StepNumber first);
  void begin_data(Protocol);
  template <class Call>
  bool advance_staged(Call&);
  bool advance_exchange();
  bool advance_zero_copy();
  bool advance_single_copy();
  void finish();
  std::size_t chunk_bytes() const;

  MailboxChannel channel_;
  const CallPlanner planner_;
  Contributions contributions_;
  OneShotCall one_shot_;
  TwoShotCall two_shot_;
  CountExchange counts_;
  HandleExchange handles_;
  ZeroCopyCall zero_copy_;
  SingleCopyCall single_copy_;
  FastPath fast_path_;

  PlannedCall call_;
  CollectiveCall planned_for_{.kind = Collective::send};  // has the plan of call_; at first equals no call's
  Phase phase_ = Phase::complete;
  StepNumber first_step_ = 0;  // of the call
  bool busy_ = false;
};

}  // namespace rz::intranode
