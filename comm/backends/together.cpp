#include "comm/backends/together.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "comm/backends/execution.h"
#include "comm/backends/layout.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/rounding.h"

namespace rz {

namespace {

constexpr std::size_t least_bypass = 96 << 20;  // bytes of all ranks' memory that no cache keeps
constexpr std::size_t line = 64;
constexpr std::size_t least_ring = 16 << 10;    // bytes of it that calls take turns in
constexpr std::size_t max_kept_near = 4 << 10;  // of an exchange that stays in a small part of the ring
constexpr auto longest_of_yields = std::chrono::microseconds(500);
constexpr int turns_of_patience = 16;  // some 4 us: then who waits elsewhere may have this processor

}  // namespace

Together::Together(Transport& transport, int rank, int size, std::uint32_t first_step)
    : Together(transport, rank, size, TogetherTable(size), first_step) {}

Together::Together(Transport& transport, int rank, int size, TogetherTable table, std::uint32_t first_step)
    : letters_(transport, rank, size, first_step),
      rank_(rank),
      size_(size),
      crowded_(transport.crowded()),
      collected_(std::make_unique<std::byte[]>(index(size) * most_letters * letter_bytes)),
      sources_(index(size)),
      memory_(transport, rank, size),
      table_(std::move(table)) {}

// ---- a call

void Together::start(const Operation& op, std::uint32_t sequence) {
  if (!traits(op.kind).root_sends()) letters_.say_all();
  op_ = &op;
  const Shape shape = shape_of(op);
  if (shape == planned_) {
    letters_.begin_again(sequence);
  } else {
    letters_.begin(signature_of(op, size_, sequence));
    plan();
    planned_ = shape;
  }
  rewind(letters_.next());
}

/// To the beginning of a call as planned, at that step.
void Together::rewind(std::uint32_t first) {
  cut_ = plan_;
  complete_ = false;
  offered_ = folded_ = taken_ = 0;
  waits_a_ = waits_b_ = 0;
  first_ = first;
  trial_ = nullptr;
  asks_ = may_ask_ && is_worth_asking();
  counts_ = op_->kind == Collective::all_to_all_v;
  if (counts_) use_ring();
  base_ = first_ + (asks_ || counts_);
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
  const std::size_t bytes = common_count(op, size_) * size_of(dtype);
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
  const bool read_before =
      traits(op_->kind).reduces && op_->in.data == op_->out.data;  // so that it is in the cache
  bypass_ = !read_before && 2 * n * whole >= least_bypass;
  once_ = crowded_ && way.once == Once::by_time ? Once::never : way.once;
  may_ask_ = way.asks || once_ != Once::never;
  if (traits(op_->kind).reduces) reduction_ = reduction(letters_.call().dtype, op_->op.kind);
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

bool Together::offers(int rank) const { return traits(op_->kind).sends(rank == op_->root); }

void Together::choose_peers() {
  gives_ = offers(rank_);
  first_giver_ = 0, last_giver_ = size_;
  if (!traits(op_->kind).rooted()) return;
  const bool at_root = rank_ == op_->root;
  if (traits(op_->kind).root_sends())
    first_giver_ = op_->root, last_giver_ = op_->root + !at_root;
  else if (!at_root)
    last_giver_ = 0;
}

/// How much of the ring the call's bytes take turns in.
///
/// An exchange takes all of it, so that the places that it writes have left its readers' caches
/// (comm/transports/staging_ring.h). Two kinds take less. One of a few KiB is over before its readers' caches
/// matter, and its own cache keeps a small part of the ring. One of more than half the ring was measured
/// to be slower in all of it, most likely since the ring then takes space in the third level from the data.
///
/// A rank that only sends, in a rooted call, may run ahead of its readers: it takes as much as the letters
/// reach. On a crowded host, where a call is too large for that, it takes less, since at the part's end it
/// waits until all that the part holds has been read.
void Together::use_ring() {
  const std::size_t shares = cut_.split ? index(size_) - 1 : 1, all = letters_.ring_bytes();
  const std::size_t own =
      cut_.rounds * (cut_.piece * shares + (cut_.flow == Flow::two_phase ? cut_.piece : 0));
  const std::size_t in_turns = room().ring_bytes;
  if (!traits(op_->kind).rooted()) {
    const bool turns_in_all = own > max_kept_near && own <= all / 2;
    return letters_.use_ring(turns_in_all ? all : std::clamp(2 * own, least_ring, in_turns));
  }
  if (crowded_ && own * meeting_letters > all) return letters_.use_ring(in_turns);
  const std::size_t bytes = round_up(cut_.piece * shares, line);
  letters_.use_ring(std::clamp(bytes * meeting_letters, least_ring, all));
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
  std::size_t moved = 0;        // bytes
  busy_ = false;
  for (int i = 0; i < turns; ++i) {
    while (!complete_ && !busy_ && advance()) busy_ = (moved += cut_.piece) >= most_at_a_spin;
    if (complete_) return busy_ = false, true;
    if (busy_) return false;
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
