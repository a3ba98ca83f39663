// Fast path: a small call with the plan of the last one. It runs the same steps as advance_one_shot() or
// advance_zero_copy(), as straight-line code, and leaves to spin() if a peer is late.

#include "comm/intranode/engine.h"

namespace rz {

bool IntranodeEngine::run_fast_path(const CallKey& call, std::uint32_t sequence, int turns) {
  last_call_.in.data = call.in, last_call_.out.data = call.out;
  op_ = &last_call_;
  channel_.begin_repeat(sequence);
  if (!fast_path_ || !can_reserve_contribution()) {
    if (last_was_zero_copy_ && can_reserve(0)) return run_zero_copy(turns);
    reset(channel_.next_step());
    return spin(turns);
  }
  data_step_ = channel_.next_step();
  send_last_contribution();
  prepare_operands();
  int peer = 0;
  while (!all_arrived(peer, data_step_)) {
    if (oversubscribed_ || turns-- == 0) return leave_fast_path(peer, oversubscribed_ ? turns : 0);
    channel_.spin_once();
  }
  read_last();
  inline_ && !traits(last_call_.kind).rooted() ? channel_.ack_lazily(channel_.next_step()) : finish();
  return true;
}

/// send_contribution(0), with the inline payload copied without a call of memcpy().
void IntranodeEngine::send_last_contribution() {
  if (slots_ > 1) return send_slots();
  if (is_sender_ && inline_ && !plan_.per_peer)
    copy_small(channel_.payload(rank_, data_step_), static_cast<const std::byte*>(last_call_.in.data),
               plan_.shard_bytes);
  else if (is_sender_)
    write_contribution(0);
  channel_.send();
}

/// Operands of read_last(), computed while slots are in flight.
void IntranodeEngine::prepare_operands() {
  if (last_call_.kind != Collective::all_reduce) return;
  for (int r = 0; r < size_; ++r)
    sources_[index(r)] = r == rank_ ? last_call_.in.data : contribution(r, data_step_);
}

/// read_contributions(0), likewise.
void IntranodeEngine::read_last() {
  if (last_call_.kind == Collective::all_reduce) {
    if (const std::size_t count = channel_.call().count)
      reduce_kernel_(last_call_.out.data, nullptr, sources_, count,
                     last_call_.op.kind == ReduceOp::avg ? size_ : 1);
  } else if (last_call_.kind == Collective::broadcast && inline_ && rank_ != last_call_.root) {
    copy_small(static_cast<std::byte*>(last_call_.out.data), channel_.payload(last_call_.root, data_step_),
               plan_.shard_bytes);
  } else {
    read_ = 0;
    read_contributions(0);
  }
}

/// Continues the call in the regular state machine, by spin().
bool IntranodeEngine::leave_fast_path(int peer, int turns) {
  complete_ = false;
  exchanges_handles_ = exchanges_counts_ = false;
  first_step_ = data_step_;
  contributed_ = 1, read_ = 0;
  next_contribution_ = peer;
  return spin(turns);
}

/// The steps of exchange_handles() and advance_zero_copy() for a call whose predecessor was zero_copy in one
/// round. If a buffer is no longer mapped or a peer is late, spin() continues.
bool IntranodeEngine::run_zero_copy(int turns) {
  const std::uint32_t first = channel_.next_step();
  if (const LocalBuffers own = local_buffers(); !handles_.is_unchanged(own)) publish_handles(own);
  handles_.write_to(channel_.payload(rank_, first));
  channel_.send();
  reset(first);
  if (!poll_all_produced(next_contribution_, first_step_, turns) || !receive_handles()) return spin(turns);
  exchanges_handles_ = false;
  chunks_ = zero_copy_chunks_;
  read_zero_copy(read_++);
  channel_.send();
  if (!poll_all_produced(next_result_, data_step_, turns)) return spin(turns);
  // Every rank waits for all others here, so each learns of it by the next call's slot, too.
  channel_.ack_lazily(channel_.next_step());
  complete_ = true;
  return true;
}

/// Polls until all peers have published that step, or `turns` is used up; on an oversubscribed node only
/// once, since a peer may need this processor.
bool IntranodeEngine::poll_all_produced(int& next, std::uint32_t step, int& turns) {
  for (; !all_produced(next, step); --turns) {
    if (oversubscribed_ || turns == 0) return false;
    channel_.spin_once();
  }
  return true;
}

/// Reads all handles of this call; true if every needed buffer is mapped. Unchanged handles need no mapping.
bool IntranodeEngine::receive_handles() {
  if (!is_mapped(rank_)) return false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (!handles_.receive(r, channel_.payload(r, first_step_))) continue;
    if (!is_mapped(r)) return false;
    map_peer(r);
  }
  return true;
}

}  // namespace rz
