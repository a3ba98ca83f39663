// Calls whose memory all ranks reach: what is needed is read, and results are written, where they lie.

#include <algorithm>
#include <cstring>

#include "comm/backends/together.h"
#include "comm/core/error.h"

namespace rz {

namespace {

constexpr int most_unasked = 63;  // calls, before it is tried again whether memory is shared

}  // namespace

/// Says where this rank's memory lies, and hears where the others' does: direct, if all that is needed can be
/// reached.
bool Together::ask() {
  const std::size_t n = index(size_);
  if (letters_.next() == first_) {
    if (!has_room(0)) return false;
    Offer mine{};
    const std::size_t in = (cut_.split && op_->kind != Collective::all_reduce ? cut_.part * n : total_);
    // Parts that change places in one buffer are overwritten while peers would read them: they are copied.
    const bool swaps = op_->kind == Collective::all_to_all && op_->in.data == op_->out.data;
    if (op_->in.data && !swaps) mine.in_shared = shared(op_->in.data, in, mine.in);
    if (op_->kind == Collective::all_reduce) mine.out_shared = shared(op_->out.data, total_, mine.out);
    std::memcpy(letters_.payload(rank_, first_), &mine, sizeof mine);
    letters_.publish();
    return true;
  }
  for (; waits_a_ < size_; ++waits_a_)
    if (waits_a_ != rank_ && !letters_.arrived(waits_a_, first_)) return false;
  waits_a_ = 0;
  bool direct = true;
  for (int r = 0; r < size_; ++r) {
    Offer& o = peers_[index(r)];
    std::memcpy(&o, letters_.payload(r, first_), sizeof o);
    if (offers(r)) direct = direct && o.in_shared;
    if (op_->kind == Collective::all_reduce) direct = direct && o.out_shared;
  }
  asks_ = false;
  Doubt& d = doubt();
  d.last = direct ? 0 : static_cast<std::uint8_t>(std::min(2 * d.last + 1, most_unasked));
  d.left = d.last;
  if (direct) begin_direct();
  return true;
}

/// Calls like this one, which every rank finds by the same numbers.
Together::Doubt& Together::doubt() {
  const Signature call = letters_.call();
  const std::uint64_t h = (call.count * 16 + static_cast<std::uint64_t>(call.kind)) * 0x9e3779b97f4a7c15u;
  return doubts_[h >> 58];
}

/// Not if the last such calls were in vain, as all ranks know: the less often, the more of them were.
bool Together::is_worth_asking() {
  Doubt& d = doubt();
  if (d.left == 0) return true;
  --d.left;
  return false;
}

bool Together::shared(const void* at, std::size_t bytes, SharedSpot& spot) {
  const auto found = transport_.share({static_cast<const std::byte*>(at), bytes});
  if (found) spot = *found;
  return found.has_value();
}

void Together::begin_direct() {
  cut_.flow = Flow::direct;
  if (op_->kind == Collective::all_reduce) cut_.split = true, cut_.part = part_together(total_, size_);
  cut_.piece = direct_piece;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Offer& o = peers_[index(r)];
    const std::size_t in =
        cut_.split && op_->kind != Collective::all_reduce ? cut_.part * index(size_) : total_;
    ins_[index(r)] = reads_from(r) ? reached(r, o.in, in) : nullptr;
    outs_[index(r)] = op_->kind == Collective::all_reduce ? reached(r, o.out, total_) : nullptr;
  }
  cut_.rounds = std::max<std::size_t>((cut_.part + cut_.piece - 1) / cut_.piece, 1);
}

std::byte* Together::reached(int peer, const SharedSpot& spot, std::size_t bytes) {
  std::byte* const at = transport_.reach(peer, spot, bytes);
  require(at != nullptr, Errc::system, "rank ", peer, " offers memory that rank ", rank_,
          " cannot reach: ", bytes, " bytes at ", spot.offset, " of its segment ", spot.segment);
  return at;
}

bool Together::advance_direct() {
  if (taken_ < cut_.rounds) {
    take_direct(taken_++);
    if (taken_ == cut_.rounds) letters_.publish();  // this rank reads and writes no peer's memory any more
    return true;
  }
  for (; waits_b_ < size_; ++waits_b_)
    if (waits_b_ != rank_ && !letters_.arrived(waits_b_, base_)) return false;
  waits_b_ = 0;
  end();
  return true;
}

void Together::take_direct(std::size_t round) {
  const std::size_t at = round * cut_.piece;
  auto* const out = static_cast<std::byte*>(op_->out.data);
  const auto source = [&](int r) {
    const auto* base = r == rank_ ? static_cast<const std::byte*>(op_->in.data) : ins_[index(r)];
    return base + (cut_.split ? index(rank_) * cut_.part : 0) + at;
  };
  if (op_->kind == Collective::broadcast || op_->kind == Collective::scatter)
    return copy_out(out + at, rank_ == op_->root ? part_to(rank_) + at : source(op_->root),
                    length(cut_.part, round));
  if ((op_->kind == Collective::gather || op_->kind == Collective::reduce) && rank_ != op_->root) return;
  if (!reduces(op_->kind)) {
    for (int r = 0; r < size_; ++r)
      copy_out(out + index(r) * cut_.part + at, source(r), length(cut_.part, round));
    return;
  }
  for (int r = 0; r < size_; ++r) sources_[index(r)] = source(r);
  if (op_->kind != Collective::all_reduce) return fold_out(out + at, nullptr, length(cut_.part, round));
  const std::size_t own = index(rank_) * cut_.part + at;
  fold_for_all(out + own, own, length(part_of(rank_), round));
}

/// To this rank's result, and to the same place in all others'.
void Together::fold_for_all(std::byte* to, std::size_t at, std::size_t bytes) {
  const int other = rank_ == 0 ? 1 : 0;
  if (size_ == 2 && !bypass_) return fold(to, outs_[index(other)] + at, bytes);
  std::byte buffer[block];
  for (std::size_t i = 0; i < bytes; i += block) {
    const std::size_t n = std::min(block, bytes - i);
    std::byte* const near = bypass_ ? buffer : to + i;
    fold(near, nullptr, n);
    copy_out(to + i, near, n);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) copy_out(outs_[index(r)] + at + i, near, n);
    for (auto& s : sources_) s = static_cast<const std::byte*>(s) + n;
  }
}

}  // namespace rz
