// Calls whose bytes go through letters and rings: everybody offers, and who needs something reads it there.

#include <algorithm>
#include <cstring>

#include "comm/backends/together.h"
#include "comm/copy.h"

namespace rz {

namespace {

/// Where rank `to` finds its share of what rank `by` has for each of its peers.
std::size_t share(int by, int to) { return static_cast<std::size_t>(to < by ? to : to - 1); }

}  // namespace

// ---- one phase: offer, and read what others offer

bool Together::advance_one_phase() {
  bool moved = false;
  // Who offers nothing writes letters all the same, so that all that are kept are of the last steps. What it
  // has yet to read is among the steps whose place in the rings is remembered.
  const bool near = offered_ < taken_ + meeting_letters / 2;
  if (offered_ < cut_.rounds && near && has_room_to_offer()) {
    offer_and_publish(offered_++);
    moved = true;
  }
  const std::uint32_t step = base_ + static_cast<std::uint32_t>(taken_);
  if (taken_ < offered_ && all_arrived(waits_a_, step)) {
    take(taken_++);
    moved = true;
    if (taken_ == cut_.rounds)
      end();
    else
      letters_.have_read_up_to(step + 1);
  }
  return moved;
}

/// Brings together what this rank reads of an offer of several letters; resumes where it stopped.
bool Together::collected(int peer, std::uint32_t step) {
  const std::size_t begin = cut_.split ? share(peer, rank_) * cut_.part : 0, end = begin + cut_.part;
  for (line_ = std::max(line_, static_cast<std::uint32_t>(begin / letter_bytes)); line_ * letter_bytes < end;
       ++line_) {
    if (!letters_.arrived(peer, step + line_)) return false;
    std::memcpy(place(peer, step) + line_ * letter_bytes, letters_.payload(peer, step + line_), letter_bytes);
  }
  line_ = 0;
  return true;
}

/// This round's bytes of a part: fewer in the last one.
std::size_t Together::length(std::size_t part, std::size_t round) const {
  const std::size_t at = round * cut_.piece;
  return part > at ? std::min(cut_.piece, part - at) : 0;
}

/// Bytes of the part of rank r: of a reduction in two phases, whose last parts are shorter; else all alike.
std::size_t Together::part_of(int r) const {
  if (op_->kind == Collective::all_to_all_v) return op_->pairs->send_counts[index(r)] * element_;
  if (cut_.flow == Flow::one_phase || op_->kind != Collective::all_reduce) return cut_.part;
  const std::size_t begin = index(r) * cut_.part;
  return total_ > begin ? std::min(cut_.part, total_ - begin) : 0;
}

const std::byte* Together::part_to(int r) const {
  const auto* in = static_cast<const std::byte*>(op_->in.data);
  if (op_->kind == Collective::all_to_all_v) return in + op_->pairs->send_offsets[index(r)] * element_;
  return in + (cut_.split ? index(r) * cut_.part : 0);
}

const std::byte* Together::from(int peer, std::uint32_t step) const {
  return place(peer, step) + (cut_.split ? share(peer, rank_) * cut_.piece : 0);
}

void Together::offer_and_publish(std::size_t round) {
  if (lines_ > 1) return publish_lines();
  if (gives_) offer(round);
  letters_.publish();
}

void Together::publish_lines() {
  if (!gives_) return letters_.publish(lines_, nullptr, 0);
  if (!cut_.split) return letters_.publish(lines_, part_to(rank_), cut_.part);
  offer(0);
  letters_.publish(lines_, place(rank_, letters_.next()), cut_.part * (index(size_) - 1));
}

void Together::offer(std::size_t round) {
  std::byte* const to = place(rank_, letters_.next());
  const std::size_t at = round * cut_.piece;
  if (!cut_.split) {
    if (const std::size_t n = length(cut_.part, round)) std::memcpy(to, part_to(rank_) + at, n);
    return;
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (const std::size_t n = length(part_of(r), round))
      std::memcpy(to + share(rank_, r) * cut_.piece, part_to(r) + at, n);
  }
}

void Together::fold(std::byte* to, std::byte* too, std::size_t bytes) {
  if (bytes) reduction_(to, too, sources_, bytes / element_, op_->op.kind == ReduceOp::avg ? size_ : 1);
}

/// To the result, and to `too` for the peers, if it is not null.
void Together::fold_out(std::byte* to, std::byte* too, std::size_t bytes) {
  if (!bypass_) return fold(to, too, bytes);
  std::byte buffer[block];
  for (std::size_t at = 0; at < bytes; at += block) {
    const std::size_t n = std::min(block, bytes - at);
    std::byte* const near = too ? too + at : buffer;
    fold(near, nullptr, n);
    copy_past_caches(to + at, near, n);
    for (auto& s : sources_) s = static_cast<const std::byte*>(s) + n;
  }
}

/// To the result.
void Together::copy_out(std::byte* to, const std::byte* bytes_of, std::size_t bytes) const {
  if (bytes == 0 || to == bytes_of) return;
  bypass_ ? copy_past_caches(to, bytes_of, bytes) : void(std::memcpy(to, bytes_of, bytes));
}

void Together::take(std::size_t round) {
  const std::uint32_t step = base_ + static_cast<std::uint32_t>(round);
  const std::size_t at = round * cut_.piece, n = length(cut_.part, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  switch (op_->kind) {
    case Collective::barrier:
      return;
    case Collective::reduce:
      if (rank_ != op_->root) return;
      [[fallthrough]];
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      for (int r = 0; r < size_; ++r) sources_[index(r)] = r == rank_ ? part_to(rank_) + at : from(r, step);
      return fold_out(out + at, nullptr, n);
    case Collective::broadcast:
    case Collective::scatter:
      return copy_out(out + at, rank_ == op_->root ? part_to(rank_) + at : from(op_->root, step), n);
    case Collective::gather:
      if (rank_ != op_->root) return;
      [[fallthrough]];
    default:
      for (int r = 0; r < size_; ++r) take_from(r, round, step);
  }
}

/// What rank r has for this rank alone, to the place that is r's.
void Together::take_from(int r, std::size_t round, std::uint32_t step) {
  const bool pairs = op_->kind == Collective::all_to_all_v;
  const std::size_t whole = pairs ? op_->pairs->recv_counts[index(r)] * element_ : cut_.part;
  const std::size_t begin = pairs ? op_->pairs->recv_offsets[index(r)] * element_ : index(r) * cut_.part;
  if (length(whole, round) == 0) return;  // there may be no memory at all
  copy_out(static_cast<std::byte*>(op_->out.data) + begin + round * cut_.piece,
           r == rank_ ? part_to(rank_) + round * cut_.piece : from(r, step), length(whole, round));
}

// ---- two phases: rank r folds part r, then everybody gathers the parts

// Offers and results take turns: A0, A1, B0, A2, B1, …, so that a rank folds while its peers read.
std::uint32_t Together::step_a(std::size_t k) const {
  return base_ + static_cast<std::uint32_t>(k + (k > 0 ? k - 1 : 0));
}
std::uint32_t Together::step_b(std::size_t k) const {
  return base_ + static_cast<std::uint32_t>(std::min(k + 2, cut_.rounds) + k);
}

bool Together::advance_two_phase() {
  bool moved = false;
  if (offered_ < cut_.rounds && letters_.next() == step_a(offered_) && has_room(bytes_of_offer())) {
    offer(offered_++);
    letters_.publish();
    moved = true;
  }
  if (folded_ < offered_ && letters_.next() == step_b(folded_) && all_arrived(waits_a_, step_a(folded_)) &&
      has_room(cut_.piece)) {
    fold_part(folded_++);
    letters_.publish();
    moved = true;
  }
  if (taken_ < folded_ && all_arrived(waits_b_, step_b(taken_))) {
    gather_parts(taken_++);
    moved = true;
    if (taken_ == cut_.rounds) {
      end();
      return true;
    }
  }
  if (moved) {
    const std::uint32_t b = step_b(taken_), a = folded_ < cut_.rounds ? step_a(folded_) : b;
    letters_.have_read_up_to(Letters::is_after(a, b) ? b : a);
  }
  return moved;
}

void Together::fold_part(std::size_t round) {
  const std::size_t at = round * cut_.piece, n = length(part_of(rank_), round);
  for (int r = 0; r < size_; ++r)
    sources_[index(r)] = r == rank_ ? part_to(rank_) + at : from(r, step_a(round));
  fold_out(static_cast<std::byte*>(op_->out.data) + index(rank_) * cut_.part + at,
           place(rank_, letters_.next()), n);
}

void Together::gather_parts(std::size_t round) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    copy_out(static_cast<std::byte*>(op_->out.data) + index(r) * cut_.part + round * cut_.piece,
             letters_.bytes(r, step_b(round)), length(part_of(r), round));
  }
}

}  // namespace rz
