// An all_reduce of 8 B by two ranks takes these steps on each of them:
//
//   1. try_reserve: the peer has acknowledged, or implied, that it no longer reads the slot's last contents.
//   2. send: the 8 bytes go into the payload of this rank's slot. Then its tag, with a release store: step
//      number and hash of the calls so far. Payload and tag share a cache line, so the peer gets both in one
//      miss. The bookkeeping (call log, step counter) follows while the line travels.
//   3. all_arrived: polls the tag of the peer's slot until it is that of this step, with an acquire load. A
//      tag of a later step, or of another history, is a mismatch.
//   4. read: reduces this rank's input and the peer's payload, in rank order, into the output.
//   5. ack_lazily: the next call's slot implies the acknowledgement, so it is written every 16 steps only.
//
// In other collectives without handle exchange the contribution may lie in two slots or in the staging ring,
// and the receiver copies. Where calls of this shape are zero_copy, steps 2 and 3 exchange the handles of the
// buffers, which seldom change; step 4 accesses the peers' buffers; and a second slot ends these accesses.

#include "comm/intranode/fast_path.h"

#include <utility>

namespace rz::intranode {

void FastPath::plan(const PlannedCall& c) {
  const Collective kind = c.ranks().kind;
  const bool plain = c.op->op.kind != ReduceOp::premul_sum && kind != Collective::all_to_all_v;
  eligible_ = plain && message_bytes(kind, c.layout.total_bytes, c.ranks().size) <= max_bytes;
  const bool one_round = c.plan.protocol == Protocol::one_shot && c.plan.chunking.chunks == 1;
  form_ = one_round && !c.may_exchange_handles() ? Form::one_shot : Form::none;
}

void FastPath::chosen(const PlannedCall& c, Protocol protocol) {
  form_ = protocol == Protocol::zero_copy && c.in_place.chunking.chunks == 1 ? Form::zero_copy : Form::none;
}

FastPath::End FastPath::run(const PlannedCall& c, int& turns) {
  if (form_ == Form::one_shot && channel_.try_reserve(c.contribution)) return run_one_shot(c, turns);
  if (form_ == Form::zero_copy && channel_.try_reserve(handle_reservation)) return run_zero_copy(c, turns);
  return End::declined;
}

// ---- one_shot

FastPath::End FastPath::run_one_shot(const PlannedCall& c, int& turns) {
  const StepNumber step = channel_.next_step();
  send(c, step);
  std::span<const void*> operands;  // found while slots are in flight
  if (c.ranks().kind == Collective::all_reduce) operands = contributions_.operands(c, 0, step);
  peer_ = 0;
  if (!poll([&] { return contributions_.all_arrived(c, peer_, step); }, turns))
    return End::waits_contributions;
  read(c, operands, step);
  contributions_.ack_all(c, channel_.next_step());
  return End::complete;
}

/// Contributions::send(), with the payload of one slot copied without a call of memcpy().
void FastPath::send(const PlannedCall& c, StepNumber step) {
  if (c.plan.inline_slots != 1 || c.plan.per_peer) return contributions_.send(c, 0);
  if (c.ranks().is_sender) copy_small(channel_.payload(c.ranks().rank, step), c.in(), c.plan.shard_bytes);
  channel_.send();
}

/// OneShotCall::read(), likewise.
void FastPath::read(const PlannedCall& c, std::span<const void*> operands, StepNumber step) {
  const CallRanks& ranks = c.ranks();
  if (ranks.kind == Collective::all_reduce) {
    if (c.op->in.count) c.stores.kernel(c.out(), nullptr, operands, c.op->in.count, c.stores.mean);
  } else if (ranks.kind == Collective::broadcast && c.inlined() && ranks.rank != ranks.root) {
    copy_small(c.out(), channel_.payload(ranks.root, step), c.plan.shard_bytes);
  } else {
    one_shot_.read(c, 0, step);
  }
}

// ---- zero_copy

FastPath::End FastPath::run_zero_copy(const PlannedCall& c, int& turns) {
  const StepNumber first = channel_.next_step();
  handles_.publish_again(c, first);
  handles_.begin(c);
  if (!poll([&] { return handles_.poll_all(first); }, turns) ||
      !handles_.receive_again(c, first, [&](int r) { zero_copy_.map_peer(c, r); }))
    return End::waits_handles;
  zero_copy_.start(c, first + 1);
  zero_copy_.access(c);
  if (!poll([&] { return zero_copy_.poll_ends(); }, turns)) return End::waits_ends;
  // Every rank waits for all others here, so each learns of it by the next call's slot, too.
  channel_.ack_lazily(channel_.next_step());
  return End::complete;
}

template <class F>
bool FastPath::poll(const F& arrived, int& turns) {
  for (; !arrived(); --turns) {
    if (oversubscribed_ || turns == 0) return false;
    channel_.spin_once();
  }
  return true;
}

}  // namespace rz::intranode
