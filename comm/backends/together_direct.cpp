// Calls whose memory all ranks reach: what is needed is read, and results are written, where they lie.

#include <algorithm>
#include <cstring>

#include "comm/backends/together.h"
#include "comm/core/error.h"
#include "comm/transports/process_memory.h"

namespace rz {

namespace {

constexpr int most_unasked = 63;  // calls, before it is tried again whether memory is shared

}  // namespace

/// Says where this rank's memory lies, and hears where the others' does: direct, if all that is needed can be
/// reached.
bool Together::ask() {
  if (letters_.next() == first_) {
    if (!has_room(0)) return false;
    make_offer();
    std::memcpy(letters_.payload(rank_, first_), &offers_[index(rank_)], sizeof(Offer));
    letters_.publish();
    return true;
  }
  if (!all_wrote(waits_a_, first_)) return false;
  bool direct = way_->asks, once = once_ != Once::never;
  for (int r = 0; r < size_; ++r) {
    std::memcpy(&offers_[index(r)], letters_.payload(r, first_), sizeof(Offer));
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
  const bool could = once && !direct && once_ == Once::by_time;
  if (could && d.by_time.on()) return;
  trial_ = nullptr;
  d.by_time.stop();
  if (could && d.last == most_unasked / 2) d.by_time.start();  // rings are warm by now
  const bool in_vain = could || !(direct || once);
  d.last = in_vain ? static_cast<std::uint8_t>(std::min(2 * d.last + 1, most_unasked)) : 0;
  d.left = d.last;
}

/// Bytes of a rank's input.
std::size_t Together::bytes_in() const {
  return plan_.split && op_->kind != Collective::all_reduce ? plan_.part * index(size_) : total_;
}

/// Where this rank's memory lies, for its peers.
void Together::make_offer() {
  offered_in_ = op_->in.data, offered_out_ = op_->out.data;
  offered_version_ = arena_->version();  // before it is looked at, since other threads may change it
  Offer& mine = offers_[index(rank_)] = {};
  // Parts that change places in one buffer are overwritten while peers would read them: they are copied.
  const bool swaps = op_->kind == Collective::all_to_all && op_->in.data == op_->out.data;
  if (op_->in.data && !swaps) mine.in = find(op_->in.data, bytes_in());
  if (op_->kind == Collective::all_reduce) mine.out = find(op_->out.data, total_);
  if (once_ == Once::never) return;
  mine.reads = transport_.reads_peers();
  const WayByTime& by_time = doubt().by_time;
  if (by_time.on() && by_time.chooses()) mine.took = by_time.mine();
}

/// What was freed or is shared since then, at the same addresses, has changed the version.
bool Together::lies_as_offered() const {
  return op_->in.data == offered_in_ && op_->out.data == offered_out_ &&
         arena_->version() == offered_version_;
}

/// All that is needed of that rank's memory, by its letter.
bool Together::is_reachable(int r) const {
  const Offer& o = offers_[index(r)];
  return (is_shared(o.in) || !offers(r)) && (is_shared(o.out) || op_->kind != Collective::all_reduce);
}

/// advance() of a call whose last one was direct, as a row of steps. What has changed since, or takes long,
/// is left to advance() itself.
bool Together::repeat_direct(int turns) {
  const std::uint32_t first = letters_.next();
  if (!lies_as_offered()) make_offer();
  std::memcpy(letters_.payload(rank_, first), &offers_[index(rank_)], sizeof(Offer));
  letters_.publish();
  rewind(first);
  if (!all_write_soon(waits_a_, first_, turns) || !hear_again()) return spin(turns);
  asks_ = false;
  cut_ = direct_;
  take_direct(taken_++);
  letters_.publish();
  if (!all_write_soon(waits_b_, base_, turns)) return spin(turns);
  letters_.have_read_by(letters_.next());  // all wait for all, so the next call's letter says so, too
  complete_ = true;
  return true;
}

/// Looks for what is left of the turns, unless who is waited for may need this processor.
bool Together::all_write_soon(int& next, std::uint32_t step, int& turns) {
  for (; !all_wrote(next, step); --turns) {
    if (crowded_ || turns == 0) return false;
    letters_.look_out();
  }
  return true;
}

/// Whether all that is needed can be reached again; mostly it lies where it did.
bool Together::hear_again() {
  if (!is_reachable(rank_)) return false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Offer now;
    std::memcpy(&now, letters_.payload(r, first_), sizeof now);
    if (now == offers_[index(r)]) continue;
    offers_[index(r)] = now;
    if (!is_reachable(r)) return false;
    reach(r);
  }
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
  if (way_->insists) return true;
  Doubt& d = doubt();
  if (d.by_time.on()) return begin_by_time(d.by_time);
  if (d.left == 0) return true;
  --d.left;
  return false;
}

SharedSpot Together::find(const void* at, std::size_t bytes) const {
  const std::span memory(static_cast<const std::byte*>(at), bytes);
  if (const auto found = transport_.share(memory)) return *found;
  if (once_ == Once::never || !kernel_reads(memory)) return {nowhere, 0};
  return {own_process, reinterpret_cast<std::uint64_t>(at)};
}

/// Of memory where it lies.
void Together::begin_in_pieces(Flow flow, std::size_t piece) {
  if (op_->kind == Collective::all_reduce) cut_.split = true, cut_.part = part_together(total_, size_);
  cut_.flow = flow;
  cut_.piece = piece;
  cut_.rounds = std::max<std::size_t>((cut_.part + cut_.piece - 1) / cut_.piece, 1);
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
  const Offer& o = offers_[index(peer)];
  ins_[index(peer)] = reads_from(peer) ? reached(peer, o.in, bytes_in()) : nullptr;
  outs_[index(peer)] = op_->kind == Collective::all_reduce ? reached(peer, o.out, total_) : nullptr;
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
  if (!all_wrote(waits_b_, base_)) return false;
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
