// Calls whose memory all ranks reach: what is needed is read, and results are written, where they lie.

#include <algorithm>
#include <cstring>

#include "comm/backends/together.h"
#include "comm/core/rounding.h"

namespace rz {

/// Says where this rank's memory lies, and hears where the others' does: direct, if all that is needed can be
/// reached.
bool Together::ask() {
  if (letters_.next() == first_) {
    if (!has_room(0)) return false;
    make_offer(own_memory());
    memory_.write(letters_.payload(rank_, first_));
    letters_.publish();
    return true;
  }
  if (!all_wrote(waits_a_, first_)) return false;
  bool direct = way_->asks, once = once_ != Once::never;
  for (int r = 0; r < size_; ++r) {
    memory_.hear(r, letters_.payload(r, first_));
    direct = direct && is_reachable(r);
    once = once && is_readable(r);
  }
  asks_ = direct_again_ = false;
  if (direct)
    begin_direct();
  else if (once && (once_ == Once::always || chooses_once()))
    begin_in_pieces(Flow::once, once_piece);
  conclude(direct, once);
  return true;
}

/// What calls like this one do next.
void Together::conclude(bool direct, bool once) {
  Doubt& d = doubt();
  const bool by_time = once && !direct && once_ == Once::by_time;
  d.told(direct || (once && !by_time), by_time);
  if (!d.by_time().on()) trial_ = nullptr;
}

/// Bytes of a rank's input.
std::size_t Together::bytes_in() const {
  return plan_.split && op_->kind != Collective::all_reduce ? plan_.part * index(size_) : total_;
}

/// Of which peers may need something. Parts that change places in one buffer are overwritten while peers
/// would read them: they are copied.
OwnMemory Together::own_memory() const {
  const bool swaps = op_->kind == Collective::all_to_all && op_->in.data == op_->out.data;
  const auto at = [](const void* p, std::size_t bytes) {
    return std::span(static_cast<const std::byte*>(p), p ? bytes : 0);
  };
  OwnMemory own;
  if (!swaps) own.in = at(op_->in.data, bytes_in());
  if (op_->kind == Collective::all_reduce) own.out = at(op_->out.data, total_);
  return own;
}

void Together::make_offer(const OwnMemory& own) {
  const WayByTime& by_time = doubt().by_time();
  memory_.make(own, once_ != Once::never,
               by_time.on() && by_time.chooses() ? by_time.mine() : WayByTime::Times{});
}

/// All that is needed of that rank's memory, by its letter.
bool Together::is_reachable(int r) const {
  return (memory_.shares_in(r) || !offers(r)) &&
         (memory_.shares_out(r) || op_->kind != Collective::all_reduce);
}

/// Calls like this one, which every rank finds by the same numbers.
Doubt& Together::doubt() {
  const Signature call = letters_.call();
  const std::uint64_t h = (call.count * 16 + static_cast<std::uint64_t>(call.kind)) * 0x9e3779b97f4a7c15u;
  return doubts_[h >> 58];
}

/// Not if the last such calls were in vain, as all ranks know: the less often, the more of them were.
bool Together::is_worth_asking() {
  if (way_->insists) return true;
  Doubt& d = doubt();
  const bool asks = d.asks();
  if (d.by_time().on() && d.by_time().is_trial()) begin_trial(d.by_time());
  return asks;
}

/// Of memory where it lies.
void Together::begin_in_pieces(Flow flow, std::size_t piece) {
  if (op_->kind == Collective::all_reduce) cut_.split = true, cut_.part = part_together(total_, size_);
  cut_.flow = flow;
  cut_.piece = piece;
  cut_.rounds = std::max<std::size_t>(ceil_div(cut_.part, cut_.piece), 1);
}

void Together::begin_direct() {
  begin_in_pieces(Flow::direct, direct_piece);
  for (int r = 0; r < size_; ++r)
    if (r != rank_) reach(r);
  direct_ = cut_;
  direct_again_ = cut_.rounds == 1;
}

/// What that peer offers, where it is needed.
void Together::reach(int peer) {
  if (reads_from(peer)) memory_.reach_in(peer, bytes_in());
  if (op_->kind == Collective::all_reduce) memory_.reach_out(peer, total_);
}

bool Together::advance_direct() {
  if (taken_ < cut_.rounds) {
    take_direct(taken_++);
    if (taken_ == cut_.rounds) letters_.publish();  // this rank reads and writes no peer's memory any more
    return true;
  }
  if (!all_wrote(waits_b_, base_)) return false;
  end();
  return true;
}

void Together::take_direct(std::size_t round) {
  const std::size_t at = round * cut_.piece;
  auto* const out = static_cast<std::byte*>(op_->out.data);
  const auto source = [&](int r) {
    const auto* base = r == rank_ ? static_cast<const std::byte*>(op_->in.data) : memory_.in(r);
    return base + (cut_.split ? index(rank_) * cut_.part : 0) + at;
  };
  if (op_->kind == Collective::broadcast || op_->kind == Collective::scatter)
    return copy_out(out + at, rank_ == op_->root ? part_to(rank_) + at : source(op_->root),
                    length(cut_.part, round));
  if ((op_->kind == Collective::gather || op_->kind == Collective::reduce) && rank_ != op_->root) return;
  if (!traits(op_->kind).reduces) {
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
  if (size_ == 2 && !bypass_) return fold(to, memory_.out(other) + at, bytes);
  std::byte buffer[block];
  for (std::size_t i = 0; i < bytes; i += block) {
    const std::size_t n = std::min(block, bytes - i);
    std::byte* const near = bypass_ ? buffer : to + i;
    fold(near, nullptr, n);
    copy_out(to + i, near, n);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) copy_out(memory_.out(r) + at + i, near, n);
    for (auto& s : sources_) s = static_cast<const std::byte*>(s) + n;
  }
}

}  // namespace rz
