// Calls that move what lies in other processes: the kernel copies it once (comm/transports/process_memory.h).

#include "comm/backends/together.h"

namespace rz {

/// Whether what is needed of that rank can be read, and it reads what it needs.
bool Together::is_readable(int r) const {
  const Offer& o = offers_[index(r)];
  return o.reads && (is_offered(o.in) || !offers(r));
}

/// Whether the call, of which some kind went before, asks where memory lies.
bool Together::begin_by_time(WayByTime& by_time) {
  const bool asks = by_time.begin();
  if (!by_time.is_trial()) return asks;
  trial_ = &by_time;
  began_ = std::chrono::steady_clock::now();
  return asks;
}

void Together::end_trial() {
  trial_->took(std::chrono::steady_clock::now() - began_);
  trial_ = nullptr;
}

/// All have heard the same.
bool Together::chooses_once() {
  WayByTime& by_time = doubt().by_time;
  if (!by_time.on()) return false;
  if (by_time.chooses()) {
    std::uint64_t once = 0, staged = 0;
    for (const Offer& o : offers_) once += o.took.once_ns, staged += o.took.staged_ns;
    by_time.choose(once, staged);
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
  const SharedSpot& spot = offers_[index(r)].in;
  if (!is_shared(spot)) return transport_.read(r, spot.offset + at, {to, bytes});
  copy_out(to, reached(r, {spot.segment, spot.offset + at}, bytes), bytes);
  return true;
}

}  // namespace rz
