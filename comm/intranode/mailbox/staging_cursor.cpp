#include "comm/intranode/mailbox/staging_cursor.h"

#include <utility>

#include "comm/core/integer_math.h"

namespace rz::intranode {

/// Places the bytes behind the last reservation, or at the ring's beginning if they do not fit into the
/// window. Reservations of the current lap do not overlap. Those of the previous lap overlap if they begin
/// before the end of this one. All older ones are treated as overlapping.
void StagingCursor::reserve(StepNumber step, std::size_t bytes) {
  if (next_ + bytes > window_) next_ = 0, overwritten_before_ = std::exchange(lap_begin_, step);
  offsets_[step % mailbox_depth] = static_cast<std::uint32_t>(next_);
  next_ = round_up(next_ + bytes, cache_line_bytes);
  const StepNumber kept = step + 1 - static_cast<StepNumber>(mailbox_depth);
  if (is_after(kept, overwritten_before_)) overwritten_before_ = kept;
  if (is_after(kept, lap_begin_)) lap_begin_ = kept;
  while (is_after(lap_begin_, overwritten_before_) && offset(overwritten_before_) < next_)
    ++overwritten_before_;
}

}  // namespace rz::intranode
