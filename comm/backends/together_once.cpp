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
    const PeerRead read = take_once(taken_);
    if (read == PeerRead::gone) return false;
    refused_ = read == PeerRead::refused;
    taken_ = refused_ ? cut_.rounds : taken_ + 1;
    if (taken_ == cut_.rounds) publish_end_of_reads();
    return true;
  }
  if (!all_wrote(waits_b_, base_)) return false;
  all_have_read() ? end() : stage_after_all();
  return true;
}

/// This rank reads no peer's memory any more; its letter says whether it was refused. All have come to this
/// call, so nobody needs what lay there.
void Together::publish_end_of_reads() {
  *letters_.payload(rank_, base_) = std::byte{refused_};
  letters_.publish();
}

bool Together::all_have_read() const {
  for (int r = 0; r < size_; ++r)
    if (*letters_.payload(r, base_) != std::byte{}) return false;
  return true;
}

/// Begins the call anew, through letters and rings, on all ranks: calls that only move have not changed what
/// is yet to be moved. From the next call on who was refused says so before (MemoryOffer::reads).
void Together::stage_after_all() {
  letters_.have_read_up_to(letters_.next());
  cut_ = plan_;
  base_ = letters_.next();
  offered_ = folded_ = taken_ = 0;
  waits_a_ = waits_b_ = 0;
  refused_ = false;
  trial_ = nullptr;  // its time tells nothing
}

PeerRead Together::take_once(std::size_t round) {
  const std::size_t at = round * cut_.piece, n = length(cut_.part, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  if (traits(op_->kind).root_sends()) return fetch(op_->root, at, out + at, n);
  if (traits(op_->kind).rooted() && rank_ != op_->root) return PeerRead::done;
  for (int i = 1; i <= size_; ++i) {
    const int r = (rank_ + i) % size_;  // one's own last
    const PeerRead read = fetch(r, at, out + index(r) * cut_.part + at, n);
    if (read != PeerRead::done) return read;
  }
  return PeerRead::done;
}

/// What rank r has for this one, from `at` on.
PeerRead Together::fetch(int r, std::size_t at, std::byte* to, std::size_t bytes) {
  if (bytes == 0) return PeerRead::done;
  if (r == rank_) return copy_out(to, part_to(rank_) + at, bytes), PeerRead::done;
  if (cut_.split) at += index(rank_) * cut_.part;
  const std::byte* const mapped = memory_.find_in(r, at, bytes);
  return mapped ? copy_out(to, mapped, bytes), PeerRead::done : memory_.read(r, at, {to, bytes});
}

}  // namespace rz
