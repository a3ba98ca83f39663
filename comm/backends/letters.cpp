#include "comm/backends/letters.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "comm/backends/execution.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/rounding.h"

namespace rz {

namespace {

constexpr std::size_t line = 64;
constexpr int looks = 40;  // at one thing, before all else is looked at again
constexpr int keen_looks =
    32;  // without a pause, which takes longer than a letter does between near processors

std::uint64_t hash_of(const Signature& s) {
  std::uint64_t h = 0;
  for (const std::uint64_t word :
       {s.count, static_cast<std::uint64_t>(static_cast<std::uint32_t>(s.root)),
        static_cast<std::uint64_t>(s.kind) | static_cast<std::uint64_t>(s.dtype) << 8 |
            static_cast<std::uint64_t>(s.op) << 16}) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace

Letters::Letters(Transport& transport, int rank, int size, std::uint32_t first_step)
    : transport_(transport),
      views_(transport.meeting().begin(), transport.meeting().end()),
      rank_(rank),
      size_(size),
      own_(*views_[index(rank)].place),
      next_(first_step),
      first_(first_step),
      read_(index(size), first_step),
      in_use_(views_[0].ring_bytes),
      lap_(first_step),
      over_(first_step) {
  if (first_step == 0) return;  // as in fresh memory
  for (Letter& l : own_.letters) l.tag.store(first_step);
  own_.read.store(first_step);
  own_.written.store(first_step);
}

void Letters::begin(const Signature& call) {
  call_ = call;
  hash_ = hash_of(call);
  begin_again(call.sequence);
}

void Letters::use_ring(std::size_t bytes) { in_use_ = std::min(bytes, ring_bytes()); }

/// Behind the last bytes, or at the ring's beginning. Since the ring began anew nothing overlaps; of the lap
/// before, what begins before the end of these bytes; and all older ones are taken to.
void Letters::lay_out(std::size_t bytes) {
  is_laid_ = true;
  if (cursor_ + bytes > in_use_) cursor_ = 0, over_ = std::exchange(lap_, next_);
  laid_[next_ % meeting_letters] = static_cast<std::uint32_t>(cursor_);
  cursor_ = round_up(cursor_ + bytes, line);
  const std::uint32_t kept = next_ + 1 - static_cast<std::uint32_t>(meeting_letters);
  if (is_after(kept, over_)) over_ = kept;
  if (is_after(kept, lap_)) lap_ = kept;
  while (is_after(lap_, over_) && laid_[over_ % meeting_letters] < cursor_) ++over_;
}

void Letters::look_out() {
  say_all();
  for (int i = 0; i < looks; ++i) {
    if (awaits_ == Awaits::letter &&
        !is_after(awaited_, static_cast<std::uint32_t>(tag(lacking_, awaited_ - 1))))
      return;
    if (awaits_ == Awaits::room && !is_after(awaited_, has_read(lacking_))) return;
    if (i >= keen_looks) cpu_pause();
  }
}

void Letters::claim() {
  say_all();
  if (awaits_ != Awaits::nothing) transport_.need(lacking_);
}

/// Letters of one call have one history. False, too, where the letter before is gone.
bool Letters::begins_call(int rank, std::uint32_t step) const {
  const std::uint64_t before = tag(rank, step - 1), there = tag(rank, step);
  return static_cast<std::uint32_t>(before) == step && before >> history_shift != there >> history_shift;
}

void Letters::mismatch(int peer, std::uint32_t step) const {
  // Its call is written after the letter: at once, unless that rank was stopped in between.
  for (const Deadline end = Deadline::after(std::chrono::seconds(1));
       is_after(step + 1, latest(peer)) && !end.expired();)
    sched_yield();
  const auto called = [&](int r, std::uint32_t s) -> std::optional<Signature> {
    const MeetingPlace& place = *views_[index(r)].place;
    const auto tag = [&] {
      return static_cast<std::uint32_t>(
          place.letters[s % meeting_letters].tag.load(std::memory_order_acquire));
    };
    if (tag() != s + 1 || !is_after(latest(r), s) || !begins_call(r, s)) return std::nullopt;
    const Signature call = place.calls[s % meeting_letters];
    std::atomic_thread_fence(std::memory_order_acquire);
    return tag() == s + 1 ? std::optional(call) : std::nullopt;  // it may be written anew meanwhile
  };
  for (std::uint32_t s = next_ - static_cast<std::uint32_t>(meeting_letters); s != next_; ++s) {
    const auto theirs = called(peer, s), mine = called(rank_, s);
    if (!theirs || !mine || *theirs == *mine) continue;
    fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(*theirs), " while rank ",
         rank_, " called ", describe(*mine), "; every rank must make the same calls in the same order");
  }
  fail(Errc::mismatch, "mismatched collectives: rank ", peer, " made other calls than rank ", rank_,
       " some time before ", describe(call()), "; every rank must make the same calls in the same order");
}

// ---- who is missing

std::vector<int> Letters::missing(const Looks& looks) const {
  std::vector<int> all;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if ((awaits_ == Awaits::room && is_after(awaited_, has_read(r))) ||
        (awaits_ == Awaits::letter && looks(r) && is_after(awaited_, latest(r))))
      all.push_back(r);
  }
  return all;
}

int Letters::culprit(const Looks& looks) const {
  int worst = -1;
  const auto is_behind = [&](int a, int b) {
    const std::uint32_t x = latest(a), y = latest(b);
    return x != y ? is_after(y, x) : is_after(has_read(b), has_read(a));
  };
  for (const int r : missing(looks))
    if (worst < 0 || is_behind(r, worst)) worst = r;
  return worst < 0 ? lacking_ : worst;
}

std::string Letters::waiting_for(const Looks& looks) const {
  std::string out;
  for (const int r : missing(looks))
    out += str(out.empty() ? "" : ", ", "rank ", r, awaits_ == Awaits::room ? " to receive" : " to send");
  return out.empty() ? "nobody" : out;
}

}  // namespace rz
