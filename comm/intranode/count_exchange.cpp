#include "comm/intranode/count_exchange.h"

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"

namespace rz::intranode {

bool CountExchange::advance(const PlannedCall& c, StepNumber step) {
  const int rank = c.ranks().rank;
  const std::size_t* const own = c.op->counts->send_counts.data();
  if (channel_.next_step() == step) {
    const Reservation counts = count_reservation(size_);
    if (!channel_.try_reserve(counts)) return false;
    std::memcpy(channel_.bytes(rank, step), own, counts.ring_bytes);
    channel_.send();
    return true;
  }
  if (!channel_.poll_all(next_, step)) return false;
  max_count_ = 0;
  for (int r = 0; r < size_; ++r)
    read(c, r, r == rank ? own : reinterpret_cast<const std::size_t*>(channel_.bytes(r, step)));
  channel_.ack(step + 1);
  return complete_ = true;
}

void CountExchange::read(const PlannedCall& c, int peer, const std::size_t* send_counts) {
  const int rank = c.ranks().rank;
  max_count_ = std::max(max_count_, *std::max_element(send_counts, send_counts + size_));
  CallSignature theirs = channel_.call(), mine = theirs;
  theirs.count = send_counts[rank], mine.count = c.op->counts->recv_counts[static_cast<std::size_t>(peer)];
  require(theirs == mine, Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(theirs),
          " while rank ", rank, " called ", describe(mine),
          "; every rank must make the same calls in the same order");
}

}  // namespace rz::intranode
