// Calls like the last one: the same steps, without what was found out then.

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

/// send_contribution(0), of what takes longest in comparison.
void IntranodeEngine::send_last_contribution() {
  if (slots_ > 1) return send_slots();
  if (is_sender_ && inline_ && !plan_.per_peer)
    copy_small(channel_.payload(rank_, data_step_), static_cast<const std::byte*>(last_call_.in.data),
               plan_.shard_bytes);
  else if (is_sender_)
    write_contribution(0);
  channel_.send();
}

/// What read_last() needs and no peer says: done while letters are on their way.
void IntranodeEngine::prepare_operands() {
  if (last_call_.kind != Collective::all_reduce) return;
  for (int r = 0; r < size_; ++r)
    sources_[index(r)] = r == rank_ ? last_call_.in.data : contribution(r, data_step_);
}

/// take(0), likewise.
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

/// A call that repeat() began goes on as others do.
bool IntranodeEngine::leave_fast_path(int peer, int turns) {
  complete_ = false;
  exchanges_handles_ = exchanges_counts_ = false;
  first_step_ = data_step_;
  contributed_ = 1, read_ = 0;
  next_contribution_ = peer;
  return spin(turns);
}

/// advance() of a call whose last one was direct, as a row of steps. What has changed since, or takes long,
/// is left to advance() itself.
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
  channel_.ack_lazily(channel_.next_step());  // all wait for all, so the next call's letter says so, too
  complete_ = true;
  return true;
}

/// Looks for what is left of the turns, unless who is waited for may need this processor.
bool IntranodeEngine::poll_all_produced(int& next, std::uint32_t step, int& turns) {
  for (; !all_produced(next, step); --turns) {
    if (oversubscribed_ || turns == 0) return false;
    channel_.spin_once();
  }
  return true;
}

/// Whether all that is needed can be reached again; mostly it lies where it did.
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
