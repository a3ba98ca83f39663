#include "comm/backends/together.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "comm/backends/execution.h"
#include "comm/backends/layout.h"
#include "comm/copy.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/pause.h"

namespace rz {

namespace {

constexpr std::size_t least_bypass = 96 << 20;  // bytes of all ranks' memory that no cache keeps
constexpr std::size_t line = 64;
constexpr std::size_t least_ring = 16 << 10;  // bytes of it that calls take turns in
constexpr auto longest_of_yields = std::chrono::microseconds(500);
constexpr int turns_of_patience =
    16;  // some 4 us: then a thread that waits elsewhere may have this processor

/// Where rank `to` finds its share of what rank `by` has for each of its peers.
std::size_t share(int by, int to) { return static_cast<std::size_t>(to < by ? to : to - 1); }

}  // namespace

Together::Together(Transport& transport, int rank, int size, std::uint32_t first_step)
    : Together(transport, rank, size, TogetherTable(size), first_step) {}

Together::Together(Transport& transport, int rank, int size, TogetherTable table, std::uint32_t first_step)
    : transport_(transport),
      letters_(transport, rank, size, first_step),
      rank_(rank),
      size_(size),
      crowded_(transport.crowded()),
      collected_(std::make_unique<std::byte[]>(index(size) * most_letters * letter_bytes)),
      sources_(index(size)),
      offers_(index(size)),
      arena_(transport.arena()),
      ins_(index(size)),
      outs_(index(size)),
      table_(std::move(table)) {}

// ---- a call

void Together::start(const Operation& op, std::uint32_t sequence, std::uint8_t behind) {
  if (!sends_ahead(op.kind)) letters_.say_all();
  op_ = &op;
  const Shape shape = shape_of(op);
  if (shape == planned_) {
    letters_.begin_again(sequence, behind);
  } else {
    Signature call = signature_of(op, size_, sequence);
    call.behind = behind;
    letters_.begin(call);
    plan();
    planned_ = shape;
  }
  rewind(letters_.next());
}

/// To the beginning of a call as planned, at that step.
void Together::rewind(std::uint32_t first) {
  cut_ = plan_;
  complete_ = false;
  agreed_ = 0;
  offered_ = folded_ = taken_ = 0;
  waits_a_ = waits_b_ = 0;
  first_ = first;
  trial_ = nullptr;
  asks_ = may_ask_ && is_worth_asking();
  counts_ = op_->kind == Collective::all_to_all_v;
  if (counts_) use_ring();
  base_ = first_ + (asks_ || counts_);
}

bool Together::repeat(const BriefCall& call, std::uint32_t sequence, int turns) {
  again_.in.data = call.in, again_.out.data = call.out;
  op_ = &again_;
  letters_.begin_again(sequence, 0);
  if (!short_way_ || !has_room_to_offer()) {
    if (direct_again_ && has_room(0)) return repeat_direct(turns);
    rewind(letters_.next());
    return spin(turns);
  }
  base_ = letters_.next();
  agreed_ = 0;
  offer_again();
  prepare_to_take();
  int peer = 0;
  while (!all_arrived(peer, base_)) {
    if (crowded_ || turns-- == 0) return stay(peer, crowded_ ? turns : 0);
    letters_.look_out();
  }
  take_again();
  inline_ && !is_rooted(again_.kind) ? letters_.have_read_by(letters_.next()) : end();
  return true;
}

/// offer_and_publish(0), of what takes longest in comparison.
void Together::offer_again() {
  if (lines_ > 1) return publish_lines();
  if (gives_ && inline_ && !plan_.split)
    copy_few(letters_.payload(rank_, base_), static_cast<const std::byte*>(again_.in.data), plan_.part);
  else if (gives_)
    offer(0);
  letters_.publish();
}

/// What take_again() needs and no peer says: done while letters are on their way.
void Together::prepare_to_take() {
  if (again_.kind != Collective::all_reduce) return;
  for (int r = 0; r < size_; ++r) sources_[index(r)] = r == rank_ ? again_.in.data : place(r, base_);
}

/// take(0), likewise.
void Together::take_again() {
  if (again_.kind == Collective::all_reduce) {
    if (const std::size_t count = letters_.call().count)
      reduction_(again_.out.data, nullptr, sources_, count, again_.op.kind == ReduceOp::avg ? size_ : 1);
  } else if (again_.kind == Collective::broadcast && inline_ && rank_ != again_.root) {
    copy_few(static_cast<std::byte*>(again_.out.data), letters_.payload(again_.root, base_), plan_.part);
  } else {
    taken_ = 0;
    take(0);
  }
}

/// A call that repeat() began goes on as others do.
bool Together::stay(int peer, int turns) {
  complete_ = false;
  asks_ = counts_ = false;
  first_ = base_;
  offered_ = 1, taken_ = 0;
  waits_a_ = peer;
  return spin(turns);
}

Together::Shape Together::shape_of(const Operation& op) {
  const bool in_place = op.in.data == op.out.data;
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  return {op.in.count, op.out.count,
          static_cast<std::uint64_t>(op.kind) | static_cast<std::uint64_t>(dtype) << 8 |
              static_cast<std::uint64_t>(op.op.kind) << 16 | static_cast<std::uint64_t>(in_place) << 24 |
              static_cast<std::uint64_t>(static_cast<std::uint32_t>(op.root)) << 32};
}

const TogetherWay* Together::find_streams(const Operation& op) const {
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  const std::size_t bytes = Layout::common_count(op, size_) * size_of(dtype);
  const TogetherWay& way = table_.of(op.kind, whole_bytes(op.kind, bytes, size_));
  return way.streams ? &way : nullptr;
}

/// How many rounds the call has, and what each moves.
void Together::plan() {
  element_ = op_->kind == Collective::barrier ? 1 : size_of(letters_.call().dtype);
  total_ = op_->kind == Collective::barrier ? 0 : letters_.call().count * element_;
  const TogetherWay& way = table_.of(op_->kind, whole_bytes(op_->kind, total_, size_));
  const TogetherPlan plan = plan_together(op_->kind, total_, size_, way, room());
  cut_ = plan_ = {plan.two_shot ? Flow::two_phase : Flow::one_phase, plan.split, plan.part, plan.pieces.piece,
                  plan.pieces.rounds};
  inline_ = plan.letters > 0;
  lines_ = std::max(plan.letters, 1u);
  way_ = &way;
  choose_peers();
  if (!inline_) use_ring();
  const std::size_t n = index(size_), whole = cut_.split ? cut_.part * n : cut_.part;
  const bool read_before = reduces(op_->kind) && op_->in.data == op_->out.data;  // so that it is in the cache
  bypass_ = !read_before && 2 * n * whole >= least_bypass;
  once_ = crowded_ && way.once == Once::by_time ? Once::never : way.once;
  may_ask_ = way.asks || once_ != Once::never;
  if (reduces(op_->kind)) reduction_ = reduction(letters_.call().dtype, op_->op.kind);
  brief_ = brief_of_plan();
  if (brief_ != ~0ull) again_ = *op_;
  direct_again_ = false;
  short_way_ = !may_ask_ && plan_.flow == Flow::one_phase && plan_.rounds == 1;
}

/// None of calls that need a copy of their input, or take long.
std::uint64_t Together::brief_of_plan() const {
  const Signature call = letters_.call();
  const bool plain = call.op != ReduceOp::premul_sum && call.kind != Collective::all_to_all_v;
  if (!plain || whole_bytes(call.kind, total_, size_) > most_at_once) return ~0ull;
  return brief(call.kind, call.dtype, call.op, call.root);
}

void Together::choose_peers() {
  gives_ = offers(rank_);
  first_giver_ = 0, last_giver_ = size_;
  if (!is_rooted(op_->kind)) return;
  const bool at_root = rank_ == op_->root;
  if (sends_ahead(op_->kind))
    first_giver_ = op_->root, last_giver_ = op_->root + !at_root;
  else if (!at_root)
    last_giver_ = 0;
}

/// What ranks exchange: as little of it as pieces of such a call need. Who is ahead: for as many pieces as
/// there are letters, if it has room for them, so that small ones stay in the caches; on a crowded host only
/// if it has room for as many calls, since whoever waits at its end waits for all that others have to read
/// meanwhile.
void Together::use_ring() {
  const std::size_t shares = cut_.split ? index(size_) - 1 : 1, all = letters_.ring_bytes();
  const std::size_t own =
      cut_.rounds * (cut_.piece * shares + (cut_.flow == Flow::two_phase ? cut_.piece : 0));
  const std::size_t in_turns = room().ring_bytes;
  if (!is_rooted(op_->kind)) return letters_.use_ring(std::clamp(2 * own, least_ring, in_turns));
  if (crowded_ && own * meeting_letters > all) return letters_.use_ring(in_turns);
  const std::size_t lines = (cut_.piece * shares + line - 1) / line;
  letters_.use_ring(std::clamp(lines * line * meeting_letters, least_ring, all));
}

/// What this rank writes at a step besides its letter.
std::size_t Together::bytes_of_offer() const {
  if (inline_ || op_->kind == Collective::barrier) return 0;
  return cut_.split ? cut_.piece * (index(size_) - 1) : cut_.piece;
}

bool Together::advance() {
  if (complete_) return false;
  if (asks_ || counts_) return counts_ ? exchange_counts() : ask();
  switch (cut_.flow) {
    case Flow::one_phase:
      return advance_one_phase();
    case Flow::two_phase:
      return advance_two_phase();
    case Flow::direct:
      return advance_direct();
    case Flow::once:
      return advance_once();
  }
  return false;
}

bool Together::spin(int turns) {
  std::optional<Deadline> end;  // of yields: a rank that computes keeps its processor for milliseconds
  for (int i = 0; i < turns; ++i) {
    for (bool moved = true; moved && !complete_;) moved = advance();
    if (complete_) return true;
    if (!crowded_) {
      letters_.look_out();
      if (i % turns_of_patience == turns_of_patience - 1) sched_yield();
      continue;
    }
    letters_.say_all();
    sched_yield();
    if (i % 16 != 15) continue;  // most calls end before the clock is worth a look
    if (!end) end = Deadline::after(longest_of_yields);
    if (end->expired()) break;
  }
  letters_.claim();
  return false;
}

void Together::end() {
  if (inline_ && sends_ahead(op_->kind) && rank_ != op_->root)
    letters_.have_read_letter(letters_.next(), op_->root);
  else
    letters_.have_read_up_to(letters_.next());
  complete_ = true;
  if (trial_) end_trial();
}

bool Together::has_room(std::size_t bytes) { return letters_.has_room(bytes, bytes > 0 && gives_); }

bool Together::has_room_to_offer() {
  const std::size_t bytes = inline_ ? 0 : bytes_of_offer();
  return letters_.has_room(bytes, bytes > 0 && gives_, lines_);
}

bool Together::all_arrived(int& next, std::uint32_t step) {
  for (next = std::max(next, first_giver_); next < last_giver_; ++next)
    if (next != rank_ && !has_arrived(next, step)) return false;
  next = 0;
  return true;
}

bool Together::all_wrote(int& next, std::uint32_t step) {
  for (; next < size_; ++next)
    if (next != rank_ && !letters_.arrived(next, step)) return false;
  next = 0;
  return true;
}

bool Together::has_arrived(int peer, std::uint32_t step) {
  return lines_ == 1 ? letters_.arrived(peer, step) : collected(peer, step);
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

// ---- who reads what

bool Together::offers(int rank) const {
  switch (op_->kind) {
    case Collective::broadcast:
    case Collective::scatter:
      return rank == op_->root;
    case Collective::gather:
    case Collective::reduce:
      return rank != op_->root;
    default:
      return true;
  }
}

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
    if (letters_.call().behind > 0 && taken_ == 0) agree(step);
    take(taken_++);
    moved = true;
    if (taken_ == cut_.rounds)
      end();
    else
      letters_.have_read_up_to(step + 1);
  }
  return moved;
}

/// On as many as all ranks would fuse, if all read this step's letters of all.
void Together::agree(std::uint32_t step) {
  if (op_->kind != Collective::all_reduce) return;
  agreed_ = letters_.call().behind;
  for (int r = 0; r < size_; ++r)
    if (r != rank_) agreed_ = std::min(agreed_, letters_.behind(r, step));
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

std::byte* Together::place(int r, std::uint32_t step) const {
  if (lines_ > 1) return collected_.get() + index(r) * most_letters * letter_bytes;
  return inline_ ? letters_.payload(r, step) : letters_.bytes(r, step);
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
  if (!cut_.split) return copy_twice(to, own_copy(round), part_to(rank_) + at, length(cut_.part, round));
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (const std::size_t n = length(part_of(r), round))
      std::memcpy(to + share(rank_, r) * cut_.piece, part_to(r) + at, n);
  }
}

/// Where this rank's own part goes in its own result, if that is better written along with the offer, while
/// the part is in the first-level cache; else take() copies it while news are on their way. Null: nowhere.
std::byte* Together::own_copy(std::size_t round) const {
  if (cut_.rounds == 1 || !op_->out.data) return nullptr;
  const bool gathers = op_->kind == Collective::all_gather;
  if (!gathers && op_->kind != Collective::broadcast) return nullptr;
  const std::size_t at = (gathers ? index(rank_) * cut_.part : 0) + round * cut_.piece;
  std::byte* const to = static_cast<std::byte*>(op_->out.data) + at;
  return to == part_to(rank_) + round * cut_.piece ? nullptr : to;
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

/// For the peers, and to the result, if `out` is not null.
void Together::copy_twice(std::byte* to, std::byte* out, const std::byte* bytes_of, std::size_t bytes) const {
  if (!out) {
    if (bytes) std::memcpy(to, bytes_of, bytes);
    return;
  }
  for (std::size_t at = 0; at < bytes; at += block) {
    const std::size_t n = std::min(block, bytes - at);
    std::memcpy(to + at, bytes_of + at, n);
    copy_out(out + at, to + at, n);
  }
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
      if (rank_ != op_->root) return copy_out(out + at, from(op_->root, step), n);
      return own_copy(round) ? void() : copy_out(out + at, part_to(rank_) + at, n);
    case Collective::gather:
      if (rank_ != op_->root) return;
      [[fallthrough]];
    default:
      for (int r = 0; r < size_; ++r) take_from(r, round, step);
  }
}

/// What rank r has for this rank alone, to the place that is r's.
void Together::take_from(int r, std::size_t round, std::uint32_t step) {
  if (r == rank_ && own_copy(round)) return;
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

// ---- all_to_all_v: who sends how much decides how many rounds there are

bool Together::exchange_counts() {
  const std::size_t n = index(size_);
  if (letters_.next() == first_) {
    const std::size_t bytes = n * sizeof(std::size_t);
    if (!has_room(bytes)) return false;
    std::memcpy(letters_.bytes(rank_, first_), op_->pairs->send_counts.data(), bytes);
    letters_.publish();
    return true;
  }
  if (!all_arrived(waits_a_, first_)) return false;
  std::size_t most = 0;
  for (int r = 0; r < size_; ++r) {
    const auto* row = r == rank_ ? op_->pairs->send_counts.data()
                                 : reinterpret_cast<const std::size_t*>(letters_.bytes(r, first_));
    most = std::max(most, *std::max_element(row, row + size_));
    Signature theirs = letters_.call(), mine = theirs;
    theirs.count = row[rank_], mine.count = op_->pairs->recv_counts[index(r)];
    require(theirs == mine, Errc::mismatch, "mismatched collectives: rank ", r, " called ", describe(theirs),
            " while rank ", rank_, " called ", describe(mine),
            "; every rank must make the same calls in the same order");
  }
  letters_.have_read_up_to(first_ + 1);
  counts_ = false;
  cut_.part = most * element_;
  const TogetherPieces cut =
      cut_together({.split = cut_.split, .part = cut_.part}, size_, way_->chunk, room());
  cut_.piece = cut.piece, cut_.rounds = cut.rounds;
  use_ring();
  return true;
}

// ---- who is missing

bool Together::looks_at(int peer) const { return asks_ || cut_.flow >= Flow::direct || reads_from(peer); }
RankSet Together::debtors() const {
  RankSet all;
  if (complete_) return all;
  for (const int r : letters_.missing([this](int r) { return looks_at(r); })) all.set(index(r));
  return all;
}
int Together::culprit() const {
  return complete_ ? -1 : letters_.culprit([this](int r) { return looks_at(r); });
}
std::string Together::waiting_for() const {
  return complete_ ? "nobody" : letters_.waiting_for([this](int r) { return looks_at(r); });
}

}  // namespace rz
