#include "comm/intranode/staged.h"

#include <algorithm>
#include <cstring>

namespace rz::intranode {

// ---- contributions

/// Copies the slots of a peer's contribution that this rank needs into one contiguous buffer. False: a slot
/// is missing; the next call resumes with it.
bool Contributions::collect_slots(const PlannedCall& c, int peer, StepNumber step) {
  const auto [begin, end] = slots_for(c.layout, c.plan, peer, c.ranks().rank);
  for (next_slot_ = std::max(next_slot_, begin); next_slot_ < end; ++next_slot_) {
    if (!channel_.poll(peer, step + next_slot_)) return false;
    std::memcpy(of(c, peer, step) + next_slot_ * inline_bytes, channel_.payload(peer, step + next_slot_),
                inline_bytes);
  }
  next_slot_ = 0;
  return true;
}

void Contributions::send(const PlannedCall& c, std::size_t round) {
  if (c.plan.inline_slots > 1) return send_slots(c);
  if (c.ranks().is_sender) write(c, round);
  channel_.send();
}

void Contributions::send_slots(const PlannedCall& c) {
  const CallRanks& ranks = c.ranks();
  const std::uint32_t slots = c.plan.slots();
  if (!ranks.is_sender) return channel_.send(slots, nullptr, 0);
  if (!c.plan.per_peer) return channel_.send(slots, c.in(), c.plan.shard_bytes);
  write(c, 0);
  channel_.send(slots, of(c, ranks.rank, channel_.next_step()), c.plan.shard_bytes * (index(ranks.size) - 1));
}

void Contributions::write(const PlannedCall& c, std::size_t round) {
  std::byte* const to = of(c, c.ranks().rank, channel_.next_step());
  const std::byte* const in = c.in();
  c.layout.for_each_contributed(c.plan, round, [&](std::size_t at, std::size_t from, std::size_t bytes) {
    std::memcpy(to + at, in + from, bytes);
  });
}

// ---- one_shot

void OneShotCall::start(const PlannedCall& c, StepNumber first) {
  rounds_ = {.first = first, .chunks = c.plan.chunking.chunks, .slots = c.plan.slots()};
  next_ = 0;
}

bool OneShotCall::advance(const PlannedCall& c) {
  bool moved = false;
  if (rounds_.can_contribute() && channel_.try_reserve(c.contribution)) {
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
  if (!rounds_.can_contribute() || !channel_.try_reserve(c.contribution)) return false;
  contributions_.send(c, rounds_.done.contributed++);
  return true;
}

bool TwoShotCall::try_reduce(const PlannedCall& c) {
  const std::size_t round = rounds_.done.reduced;
  if (!rounds_.can_reduce() ||
      !contributions_.all_arrived(c, next_contribution_, rounds_.contribution_step(round)) ||
      !channel_.try_reserve(c.plan.result_reservation()))
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
