#include "comm/intranode/engine.h"

#include <sched.h>

#include <optional>

#include "comm/core/deadline.h"
#include "comm/os/wait_policy.h"

namespace rz::intranode {

Engine::Engine(Transport& transport, int rank, int size, StepNumber first_step)
    : Engine(transport, rank, size, tuning::IntranodeTable(size), first_step) {}

Engine::Engine(Transport& transport, int rank, int size, tuning::IntranodeTable table, StepNumber first_step)
    : channel_(*transport.shared_memory(), rank, size, first_step),
      planner_(std::move(table), rank, size, channel_.staging_bytes(), transport.oversubscribed()),
      contributions_(channel_, size),
      one_shot_(channel_, contributions_),
      two_shot_(channel_, contributions_),
      counts_(channel_, size),
      handles_(channel_, *transport.shared_memory(), rank, size),
      zero_copy_(channel_, handles_.handles(), size),
      single_copy_(channel_, handles_.handles(), rank, size),
      fast_path_(channel_, contributions_, one_shot_, handles_, zero_copy_, transport.oversubscribed()) {}

// ---- begin of a call

void Engine::start(const CollectiveCall& op, std::uint32_t sequence) {
  if (!traits(op.kind).root_sends()) channel_.flush_acks();
  if (same_plan(op, planned_for_)) {
    channel_.begin_repeat(sequence);
  } else {
    channel_.begin(make_signature(op, planner_.size(), sequence));
    call_ = planner_.plan(op);
    planned_for_ = op;
    if (!call_.inlined()) channel_.set_staging_window(planner_.window(call_));
    fast_path_.plan(call_);
  }
  call_.bind(op);
  begin();
}

/// Begins the current call, whose first step is the next one.
void Engine::begin() {
  first_step_ = channel_.next_step();
  if (call_.ranks().kind == Collective::all_to_all_v) {
    planner_.divide(call_, 0);
    channel_.set_staging_window(planner_.window(call_));
    counts_.start();
    phase_ = Phase::exchanging_counts;
  } else if (call_.may_exchange_handles() && handles_.begin(call_)) {
    phase_ = Phase::exchanging_handles;
  } else {
    begin_staged(first_step_);
  }
}

void Engine::begin_staged(StepNumber first) {
  if (call_.plan.protocol == Protocol::two_shot) {
    two_shot_.start(call_, first);
    phase_ = Phase::two_shot;
  } else {
    one_shot_.start(call_, first);
    phase_ = Phase::one_shot;
  }
}

/// Continues behind the exchange of handles, by that protocol.
void Engine::begin_data(Protocol protocol) {
  const StepNumber step = first_step_ + 1;
  fast_path_.chosen(call_, protocol);
  if (protocol == Protocol::zero_copy) {
    for (int r = 0; r < planner_.size(); ++r)
      if (r != call_.ranks().rank) zero_copy_.map_peer(call_, r);
    zero_copy_.start(call_, step);
    phase_ = Phase::zero_copy;
  } else if (protocol == Protocol::single_copy) {
    single_copy_.start(call_, step);
    phase_ = Phase::single_copy;
  } else {
    begin_staged(step);
  }
}

bool Engine::run_fast_path(const CollectiveCall& op, std::uint32_t sequence, int turns) {
  call_.op = &op;
  channel_.begin_repeat(sequence);
  first_step_ = channel_.next_step();
  switch (fast_path_.run(call_, turns)) {
    case FastPath::End::complete:
      return true;
    case FastPath::End::declined:
      call_.bind(op);
      begin();
      break;
    case FastPath::End::waits_contributions:
      one_shot_.resume(call_, first_step_, fast_path_.peer());
      phase_ = Phase::one_shot;
      break;
    case FastPath::End::waits_handles:
      phase_ = Phase::exchanging_handles;
      break;
    case FastPath::End::waits_ends:
      phase_ = Phase::zero_copy;
      break;
  }
  return spin(turns);
}

// ---- progress

bool Engine::advance() {
  switch (phase_) {
    case Phase::complete:
      return false;
    case Phase::exchanging_handles:
    case Phase::exchanging_counts:
      return advance_exchange();
    case Phase::one_shot:
      return advance_staged(one_shot_);
    case Phase::two_shot:
      return advance_staged(two_shot_);
    case Phase::zero_copy:
      return advance_zero_copy();
    case Phase::single_copy:
      return advance_single_copy();
  }
  return false;
}

bool Engine::advance_exchange() {
  if (phase_ == Phase::exchanging_handles) {
    const bool moved = handles_.advance(call_, first_step_);
    if (handles_.complete()) begin_data(handles_.choose(call_));
    return moved;
  }
  const bool moved = counts_.advance(call_, first_step_);
  if (!counts_.complete()) return moved;
  planner_.divide(call_, counts_.max_count());
  channel_.set_staging_window(planner_.window(call_));
  begin_staged(first_step_ + 1);
  return true;
}

template <class Call>
bool Engine::advance_staged(Call& staged) {
  const bool moved = staged.advance(call_);
  if (staged.complete()) finish();
  return moved;
}

bool Engine::advance_zero_copy() {
  if (zero_copy_.can_access()) {
    zero_copy_.access(call_);
    return true;
  }
  if (!zero_copy_.poll_ends()) return false;
  channel_.ack(channel_.next_step());
  finish();
  return true;
}

bool Engine::advance_single_copy() {
  if (single_copy_.can_access()) return single_copy_.access(call_);
  if (!single_copy_.poll_ends()) return false;
  const bool succeeded = single_copy_.succeeded();  // before the slots may be reused
  channel_.ack(channel_.next_step());
  if (succeeded) {
    finish();
  } else {
    handles_.drop_sample();  // its time is meaningless
    begin_staged(channel_.next_step());
  }
  return true;
}

void Engine::finish() {
  phase_ = Phase::complete;
  handles_.end();
}

/// Bytes that advance() moves for each peer.
std::size_t Engine::chunk_bytes() const {
  switch (phase_) {
    case Phase::zero_copy:
      return zero_copy_chunk;
    case Phase::single_copy:
      return single_copy_chunk;
    default:
      return call_.plan.chunking.chunk_bytes;
  }
}

bool Engine::spin(int turns) {
  constexpr const IntranodeWaitPolicy& policy = intranode_wait_policy;
  const bool yields = planner_.limits().oversubscribed;
  std::optional<Deadline> end;  // of yields
  std::size_t moved = 0;        // bytes
  busy_ = false;
  for (int i = 0; i < turns; ++i) {
    while (!complete() && !busy_ && advance()) busy_ = (moved += chunk_bytes()) >= max_spin_bytes;
    if (complete()) return busy_ = false, true;
    if (busy_) return false;
    if (!yields) {
      channel_.spin_once();
      if (i % policy.polls_per_yield == policy.polls_per_yield - 1) sched_yield();
      continue;
    }
    channel_.flush_acks();
    sched_yield();
    if (i % 16 != 15) continue;  // most calls end before the first clock read
    if (!end) end = Deadline::after(policy.max_yield_time);
    if (end->expired()) break;
  }
  channel_.check_peer_alive();
  return false;
}

// ---- missing peers

WaitState Engine::waiting_on() const {
  if (complete()) return {.text = "no rank"};
  const bool of_all = phase_ != Phase::one_shot;  // two_shot reads from all, too
  return channel_.waiting_on([&](int r) { return of_all || call_.ranks().reads_from(r); });
}

}  // namespace rz::intranode
