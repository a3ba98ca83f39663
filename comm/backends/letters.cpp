#include "comm/backends/letters.h"

#include <optional>

#include "comm/backends/execution.h"
#include "comm/core/error.h"

namespace rz {

namespace {

/// Of all calls up to this one, so that ranks that once differed differ ever after: who looks at another's
/// letter late still learns of it.
std::uint64_t chain(std::uint64_t h, const Signature& s) {
  for (const std::uint64_t word :
       {s.count, static_cast<std::uint64_t>(static_cast<std::uint32_t>(s.root)),
        static_cast<std::uint64_t>(s.kind) | static_cast<std::uint64_t>(s.dtype) << 8 |
            static_cast<std::uint64_t>(s.op) << 16}) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}
constexpr std::uint64_t upper_half = 0xffffffff00000000u;

}  // namespace

Letters::Letters(Transport& transport, int rank, int size, std::uint32_t first_step)
    : transport_(transport),
      views_(transport.meeting().begin(), transport.meeting().end()),
      rank_(rank),
      size_(size),
      next_(first_step),
      first_(first_step),
      read_(index(size), first_step) {
  if (first_step == 0) return;  // as in fresh memory
  MeetingPlace& place = *views_[index(rank)].place;
  for (Letter& l : place.letters) l.tag.store(first_step);
  place.read.store(first_step);
}

void Letters::begin(const Signature& call) {
  call_ = call;
  history_ = chain(history_, call);
  first_ = next_;
  awaits_ = Awaits::nothing, lacking_ = -1;
}

bool Letters::has_room(bool in_slot) {
  const std::uint32_t kept = in_slot ? meeting_slots : meeting_letters, needed = next_ - kept + 1;
  for (int r = 0; r < size_; ++r) {
    std::uint32_t& read = read_[index(r)];
    if (r == rank_ || !is_after(needed, read)) continue;
    read = has_read(r);
    if (!is_after(needed, read)) continue;
    awaits_ = Awaits::room, awaited_ = needed, lacking_ = r;
    transport_.need(r);
    return false;
  }
  return true;
}

void Letters::publish() {
  MeetingPlace& place = *views_[index(rank_)].place;
  place.calls[next_ % meeting_letters] = call_;
  place.letters[next_ % meeting_letters].tag.store(tag_of(next_), std::memory_order_release);
  transport_.nudge();
  ++next_;
}

bool Letters::arrived(int peer, std::uint32_t step) {
  const Letter& letter = views_[index(peer)].place->letters[step % meeting_letters];
  const std::uint64_t tag = letter.tag.load(std::memory_order_acquire);
  if (is_after(step + 1, static_cast<std::uint32_t>(tag))) {
    awaits_ = Awaits::letter, awaited_ = step + 1, lacking_ = peer;
    transport_.need(peer);
    return false;
  }
  if (tag != tag_of(step)) mismatch(peer);
  if (is_after(first_, read_[index(peer)])) read_[index(peer)] = first_;  // it has ended all calls before
  return true;
}

void Letters::have_read_up_to(std::uint32_t step) {
  views_[index(rank_)].place->read.store(step, std::memory_order_release);
  transport_.nudge();
}

std::uint64_t Letters::tag_of(std::uint32_t step) const {
  return (history_ & upper_half) | static_cast<std::uint32_t>(step + 1);
}

void Letters::mismatch(int peer) const {
  const auto called = [&](int r, std::uint32_t s) -> std::optional<Signature> {
    const MeetingPlace& place = *views_[index(r)].place;
    const auto tag = [&] {
      return static_cast<std::uint32_t>(
          place.letters[s % meeting_letters].tag.load(std::memory_order_acquire));
    };
    if (tag() != s + 1) return std::nullopt;
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
       " some time before ", describe(call_), "; every rank must make the same calls in the same order");
}

// ---- who is missing

std::uint32_t Letters::has_read(int r) const {
  return views_[index(r)].place->read.load(std::memory_order_acquire);
}

/// One more than the last step at which it wrote a letter.
std::uint32_t Letters::latest(int r) const {
  const auto& letters = views_[index(r)].place->letters;
  std::uint32_t last = static_cast<std::uint32_t>(letters[0].tag.load());
  for (const Letter& l : letters)
    if (const auto tag = static_cast<std::uint32_t>(l.tag.load()); is_after(tag, last)) last = tag;
  return last;
}

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
