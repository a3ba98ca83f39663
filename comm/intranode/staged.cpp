#include "comm/intranode/staged.h"

namespace rz::intranode {

void StagedCall::start(const PlannedCall& c, StepNumber first) {
  is_two_shot_ = c.plan.protocol == Protocol::two_shot;
  is_two_shot_ ? two_shot_.start(c, first) : one_shot_.start(c, first);
}

// ---- one_shot

void OneShotCall::start(const PlannedCall& c, StepNumber first) {
  rounds_ = {.first = first, .chunks = c.plan.chunking.chunks, .slots = c.plan.slots()};
  next_ = 0;
}

bool OneShotCall::advance(const PlannedCall& c) {
  bool moved = false;
  if (rounds_.can_contribute() && contributions_.try_reserve(c)) {
    contributions_.send(c, rounds_.done.contributed++);
    moved = true;
  }
  const StepNumber step = rounds_.contribution_step(rounds_.done.read);
  if (rounds_.can_read() && contributions_.all_arrived(c, next_, step)) {
    read(c, rounds_.done.read++, step);
    moved = true;
    complete() ? contributions_.ack_all(c, rounds_.acked()) : channel_.ack(rounds_.acked());
  }
  return moved;
}

void OneShotCall::read(const PlannedCall& c, std::size_t round, StepNumber step) {
  const CallLayout& layout = c.layout;
  if (!layout.has_output()) return;
  if (traits(layout.ranks.kind).reduces) {
    const CallLayout::Reduced part = layout.reduced(c.plan, round);
    return c.stores.reduce(c.out() + part.output, nullptr, contributions_.operands(c, part.input, step),
                           part.bytes);
  }
  for (int r = layout.first_moved(); r < layout.last_moved(); ++r) {
    const CallLayout::Moved part = layout.moved(c.plan, r, round);
    if (part.bytes == 0) continue;  // the pointers may be null
    c.stores.copy(c.out() + part.output,
                  r == layout.ranks.rank ? c.in() + part.input : contributions_.for_this_rank(c, r, step),
                  part.bytes);
  }
}

// ---- two_shot

void TwoShotCall::start(const PlannedCall& c, StepNumber first) {
  rounds_ = {.first = first, .chunks = c.plan.chunking.chunks};
  next_contribution_ = next_result_ = 0;
}

bool TwoShotCall::advance(const PlannedCall& c) {
  bool moved = try_contribute(c);
  moved |= try_reduce(c);
  moved |= try_gather(c);
  if (moved) channel_.ack(rounds_.acked());
  return moved;
}

bool TwoShotCall::try_contribute(const PlannedCall& c) {
  if (!rounds_.can_contribute() || !contributions_.try_reserve(c)) return false;
  contributions_.send(c, rounds_.done.contributed++);
  return true;
}

bool TwoShotCall::try_reduce(const PlannedCall& c) {
  const std::size_t round = rounds_.done.reduced;
  const Reservation result = c.plan.result_reservation();
  if (!rounds_.can_reduce() ||
      !contributions_.all_arrived(c, next_contribution_, rounds_.contribution_step(round)) ||
      !channel_.try_reserve(result.ring_bytes, result.writes_ring, result.slots))
    return false;
  reduce(c, rounds_.done.reduced++);
  channel_.send();
  return true;
}

bool TwoShotCall::try_gather(const PlannedCall& c) {
  if (!rounds_.can_read() || !channel_.poll_all(next_result_, rounds_.result_step(rounds_.done.read)))
    return false;
  gather(c, rounds_.done.read++);
  return true;
}

void TwoShotCall::reduce(const PlannedCall& c, std::size_t round) {
  const CallLayout::Reduced part = c.layout.reduced(c.plan, round);
  c.stores.reduce(c.out() + part.output, channel_.bytes(c.ranks().rank, channel_.next_step()),
                  contributions_.operands(c, part.input, rounds_.contribution_step(round)), part.bytes);
}

void TwoShotCall::gather(const PlannedCall& c, std::size_t round) {
  for (int r = 0; r < c.ranks().size; ++r) {
    if (r == c.ranks().rank) continue;
    const CallLayout::Moved part = c.layout.gathered(c.plan, r, round);
    c.stores.copy(c.out() + part.output, channel_.bytes(r, rounds_.result_step(round)) + part.input,
                  part.bytes);
  }
}

}  // namespace rz::intranode
