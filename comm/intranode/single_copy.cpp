#include "comm/intranode/single_copy.h"

namespace rz::intranode {

void SingleCopyCall::start(const PlannedCall& c, StepNumber end) {
  plan_ = plan_in_place(Protocol::single_copy, c.ranks().kind, c.layout.total_bytes, size_);
  rounds_ = {.first = end, .chunks = plan_.chunking.chunks};
  next_ = 0;
}

bool SingleCopyCall::access(const PlannedCall& c) {
  const CmaResult read = copy_round(c, rounds_.done.read);
  if (read == CmaResult::gone) return false;
  const bool refused = read == CmaResult::refused;
  rounds_.done.read = refused ? rounds_.chunks : rounds_.done.read + 1;
  if (!can_access()) send_end(refused);
  return true;
}

/// No try_reserve() is needed for this payload: all ranks have entered this call, so no peer reads the slot's
/// previous contents.
void SingleCopyCall::send_end(bool refused) {
  *channel_.payload(rank_, rounds_.first) = std::byte{refused};
  channel_.send();
}

bool SingleCopyCall::succeeded() const {
  for (int r = 0; r < size_; ++r)
    if (*channel_.payload(r, rounds_.first) != std::byte{}) return false;
  return true;
}

CmaResult SingleCopyCall::copy_round(const PlannedCall& c, std::size_t round) {
  const CallLayout& layout = c.layout;
  if (!layout.has_output()) return CmaResult::done;
  const int first = layout.first_moved(), ranks = layout.last_moved() - first;
  for (int i = 1; i <= ranks; ++i) {
    const int r = first + (rank_ - first + i) % ranks;  // its own shard last
    if (const CmaResult read = copy_from(c, r, round); read != CmaResult::done) return read;
  }
  return CmaResult::done;
}

/// Copies one chunk of rank r's data for this rank, mapped or by CMA.
CmaResult SingleCopyCall::copy_from(const PlannedCall& c, int r, std::size_t round) {
  const CallLayout::Moved part = c.layout.moved(plan_, r, round);
  if (part.bytes == 0) return CmaResult::done;
  std::byte* const to = c.out() + part.output;
  const std::byte* const mapped =
      r == rank_ ? c.in() + part.input : handles_.mapped_in(r, part.input, part.bytes);
  if (!mapped) return handles_.cma_read(r, part.input, {to, part.bytes});
  c.stores.copy(to, mapped, part.bytes);
  return CmaResult::done;
}

}  // namespace rz::intranode
