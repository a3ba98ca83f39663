#include "comm/intranode/contributions.h"

#include <algorithm>
#include <cstring>

namespace rz::intranode {

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

}  // namespace rz::intranode
