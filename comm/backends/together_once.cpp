// Calls that move what lies in other processes: the kernel copies it once (comm/transports/process_memory.h).

#include "comm/backends/together.h"

namespace rz {

/// Whether what is needed of that rank can be read, and it reads what it needs.
bool Together::is_readable(int r) const {
  return memory_.reads(r) && (memory_.has_readable_in(r) || !offers(r));
}

void Together::begin_trial(WayByTime& by_time) {
  trial_ = &by_time;
  began_ = std::chrono::steady_clock::now();
}

void Together::end_trial() {
  trial_->took(std::chrono::steady_clock::now() - began_);
  trial_ = nullptr;
}

/// All have heard the same.
bool Together::chooses_once() {
  WayByTime& by_time = doubt().by_time();
  if (!by_time.on()) return false;
  if (by_time.chooses()) {
    std::uint64_t once_ns, staged_ns;
    memory_.sum_times(once_ns, staged_ns);
    by_time.choose(once_ns, staged_ns);
  }
  return by_time.once();
}

bool Together::advance_once() {
  if (taken_ < cut_.rounds) {
    if (!take_once(taken_)) return false;
    if (++taken_ == cut_.rounds) letters_.publish();  // this rank reads no peer's memory any more
    return true;
  }
  if (!all_wrote(waits_b_, base_)) return false;
  end();
  return true;
}

/// False: somebody's memory is gone, as the group will learn.
bool Together::take_once(std::size_t round) {
  const std::size_t at = round * cut_.piece, n = length(cut_.part, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  if (sends_ahead(op_->kind)) return fetch(op_->root, at, out + at, n);
  if (is_rooted(op_->kind) && rank_ != op_->root) return true;
  for (int i = 1; i <= size_; ++i) {
    const int r = (rank_ + i) % size_;  // one's own last
    if (!fetch(r, at, out + index(r) * cut_.part + at, n)) return false;
  }
  return true;
}

/// What rank r has for this one, from `at` on.
bool Together::fetch(int r, std::size_t at, std::byte* to, std::size_t bytes) {
  if (bytes == 0) return true;
  if (r == rank_) return copy_out(to, part_to(rank_) + at, bytes), true;
  if (cut_.split) at += index(rank_) * cut_.part;
  const std::byte* const mapped = memory_.find_in(r, at, bytes);
  return mapped ? copy_out(to, mapped, bytes), true : memory_.read(r, at, {to, bytes});
}

}  // namespace rz
