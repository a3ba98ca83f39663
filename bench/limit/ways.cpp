#include "bench/limit/ways.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"

namespace rz::bench::limit {
namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
constexpr std::size_t most_one_shot = 1 * MiB, least_two_phase = 8 * KiB, least_streamed = 1 * MiB;
constexpr std::size_t least_single_copy = 16 * KiB;
constexpr std::size_t pieces[] = {1 * KiB, 4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 1 * MiB};
constexpr std::size_t most_one_shot_piece = 256 * KiB, most_pieces = 512;
constexpr std::uint64_t depth = 4;  // slots of each kind
static_assert(2 * 2 * depth * pieces[5] <= Memory::slot_bytes && 2 * 2 * most_one_shot <= Memory::slot_bytes);

void add_staged(std::vector<Way>& all, std::size_t bytes, bool in_place) {
  if (bytes <= Meeting::most_letters * Letter::floats * sizeof(float))
    all.push_back({Way::letters, in_place});
  for (const std::size_t piece : pieces) {
    if (bytes / piece > most_pieces) continue;
    if (bytes <= most_one_shot && piece <= most_one_shot_piece && (piece == pieces[0] || piece <= bytes))
      all.push_back({Way::one_shot, in_place, piece});
    if (bytes < least_two_phase || piece > bytes / 2) continue;
    all.push_back({Way::two_phase, in_place, piece});
    if (bytes >= least_streamed) all.push_back({Way::two_phase, in_place, piece, Stores::streamed});
  }
}

void add_single_copy(std::vector<Way>& all, std::size_t bytes, bool in_place) {
  for (const std::size_t piece : pieces) {
    if (bytes < least_single_copy || piece < 16 * KiB || piece > std::max(bytes / 2, 16 * KiB)) continue;
    all.push_back({Way::single_copy, in_place, piece});
    if (bytes >= least_streamed) all.push_back({Way::single_copy, in_place, piece, Stores::streamed});
  }
}

/// Out of another process. Errc::system if the kernel does not permit it.
void read_peer(pid_t process, float* to, const float* from, std::size_t count) {
  for (std::size_t at = 0; at < count * sizeof(float);) {
    const iovec here{reinterpret_cast<std::byte*>(to) + at, count * sizeof(float) - at};
    const iovec there{reinterpret_cast<std::byte*>(const_cast<float*>(from)) + at, here.iov_len};
    const ssize_t n = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (n <= 0) fail_errno("process_vm_readv", str("of process ", process));
    at += static_cast<std::size_t>(n);
  }
}

void add_mapped(std::vector<Way>& all, std::size_t bytes) {
  for (const Stores stores : {Stores::cached, Stores::streamed}) {
    if (stores == Stores::streamed && bytes < least_streamed) continue;
    all.push_back({Way::read_both, false, 0, stores});
    for (const bool in_place : {false, true}) all.push_back({Way::halves, in_place, 0, stores});
  }
}

/// A rank's half of the elements, to whole cache lines; rank 0's is the larger.
struct Part {
  std::size_t begin, count;
};
Part part_of(int rank, std::size_t count) {
  const std::size_t half = ((count + 1) / 2 + 15) / 16 * 16, cut = std::min(half, count);
  return rank == 0 ? Part{0, cut} : Part{cut, count - cut};
}

/// Of a part, piece k of `piece` elements; the last ones may be empty.
Part piece_of(Part part, std::size_t k, std::size_t piece) {
  const std::size_t at = std::min(k * piece, part.count);
  return {part.begin + at, std::min(piece, part.count - at)};
}

/// What a count must have come to before the slot of `number` is free again.
std::uint64_t before(std::uint64_t number) { return number < depth ? 0 : number - depth + 1; }

}  // namespace

std::string Way::variant() const {
  return str(mapped()              ? "mapped"
             : kind == single_copy ? "single_copy"
                                   : "staged",
             in_place ? "_in_place" : "");
}

std::string Way::name() const {
  constexpr const char* names[] = {"letters", "one_shot", "two_phase", "single_copy", "read_both", "halves"};
  std::string text = names[kind];
  if (piece) text += str('/', piece);
  return text + (stores == Stores::streamed ? "/streamed" : "");
}

std::vector<Way> ways_for(std::size_t bytes) {
  std::vector<Way> all;
  add_staged(all, bytes, false);
  add_staged(all, bytes, true);
  for (const bool in_place : {false, true}) add_single_copy(all, bytes, in_place);
  add_mapped(all, bytes);
  return all;
}

void Calls::all_reduce(const Way& way, std::size_t count) {
  float* const in = way.in_place ? memory_.out : memory_.in;
  switch (way.kind) {
    case Way::letters:
      return letters(in, count);
    case Way::one_shot:
      return one_shot(way, in, count);
    case Way::two_phase:
      return two_phase(way, in, count);
    case Way::single_copy:
      return single_copy(way, count);
    case Way::read_both:
    case Way::halves:
      return mapped(way, count);
  }
}

// Two calls' letters and slots take turns: who begins a call has seen that the other had all of the call
// before, and so has read what it overwrites.

void Calls::letters(float* in, std::size_t count) {
  const std::uint64_t number = ++letters_;
  Letter* mine = seat_.meeting.letters[seat_.rank][number % 2];
  for (std::size_t at = 0; at < count; at += Letter::floats, ++mine) {
    std::memcpy(mine->values, in + at, std::min(Letter::floats, count - at) * sizeof(float));
    mine->number.store(number, std::memory_order_release);
  }
  const Letter* other = seat_.meeting.letters[seat_.peer][number % 2];
  for (std::size_t at = 0; at < count; at += Letter::floats, ++other) {
    seat_.wait_for(other->number, number);
    const std::size_t n = std::min(Letter::floats, count - at);
    for (std::size_t i = 0; i < n; ++i) memory_.out[at + i] = in[at + i] + other->values[i];
  }
}

void Calls::one_shot(const Way& way, float* in, std::size_t count) {
  const std::uint64_t turn = ++one_shots_ % 2, first = pieces_;
  const auto slots = [&](int rank) {
    return reinterpret_cast<float*>(memory_.slots +
                                    (turn * 2 + static_cast<std::size_t>(rank)) * most_one_shot);
  };
  float* const mine = slots(seat_.rank);
  const float* const other = slots(seat_.peer);
  const std::size_t piece = way.piece / sizeof(float);
  for (std::size_t at = 0; at < count; at += piece) {
    copy(mine + at, in + at, std::min(piece, count - at), Stores::cached);
    Seat::publish(seat_.meeting.pieces[seat_.rank], ++pieces_);
  }
  std::uint64_t arrived = first;
  for (std::size_t at = 0; at < count; at += piece) {
    seat_.wait_for(seat_.meeting.pieces[seat_.peer], ++arrived);
    add(memory_.out + at, in + at, other + at, std::min(piece, count - at), way.stores);
  }
}

float* Calls::slot(int rank, int kind, std::uint64_t number, std::size_t piece) const {
  const std::size_t which = (static_cast<std::size_t>(rank) * 2 + static_cast<std::size_t>(kind)) * depth;
  return reinterpret_cast<float*>(memory_.slots + (which + number % depth) * piece);
}

void Calls::two_phase(const Way& way, float* in, std::size_t count) {
  Meeting& m = seat_.meeting;
  const int rank = seat_.rank, peer = seat_.peer;
  const Part mine = part_of(rank, count), other = part_of(peer, count);
  const std::size_t piece = way.piece / sizeof(float), rounds = (part_of(0, count).count + piece - 1) / piece;
  for (std::size_t k = 0; k < rounds + 2; ++k) {
    if (k < rounds) {
      const Part p = piece_of(other, k, piece);
      seat_.wait_for(m.folded[peer], before(offered_));
      copy(slot(rank, 0, offered_, way.piece), in + p.begin, p.count, Stores::cached);
      Seat::publish(m.offered[rank], ++offered_);
    }
    if (k >= 1 && k <= rounds) {
      const Part p = piece_of(mine, k - 1, piece);
      seat_.wait_for(m.offered[peer], folded_ + 1);
      seat_.wait_for(m.taken[peer], before(folded_));
      add_twice(memory_.out + p.begin, way.stores, slot(rank, 1, folded_, way.piece), Stores::cached,
                in + p.begin, slot(peer, 0, folded_, way.piece), p.count);
      Seat::publish(m.folded[rank], ++folded_);
    }
    if (k >= 2) {
      const Part p = piece_of(other, k - 2, piece);
      seat_.wait_for(m.folded[peer], taken_ + 1);
      copy(memory_.out + p.begin, slot(peer, 1, taken_, way.piece), p.count, way.stores);
      Seat::publish(m.taken[rank], ++taken_);
    }
  }
}

void Calls::single_copy(const Way& way, std::size_t count) {
  Meeting& m = seat_.meeting;
  const int rank = seat_.rank, peer = seat_.peer;
  const Part mine = part_of(rank, count), other = part_of(peer, count);
  const float* const in = way.in_place ? memory_.out : memory_.in;
  const float* const theirs = way.in_place ? memory_.peer.out : memory_.peer.in;
  const std::size_t piece = way.piece / sizeof(float);
  if (piece_.size() < piece) piece_.resize(piece);
  Seat::publish(m.ready[rank], ++mapped_);
  seat_.wait_for(m.ready[peer], mapped_);
  for (std::size_t k = 0; k * piece < mine.count; ++k) {
    const Part p = piece_of(mine, k, piece);
    read_peer(memory_.peer.process, piece_.data(), theirs + p.begin, p.count);
    add(memory_.out + p.begin, in + p.begin, piece_.data(), p.count, way.stores);
  }
  // In place nobody has written but to its own half, which is read after this alone.
  Seat::publish(m.halved[rank], mapped_);
  seat_.wait_for(m.halved[peer], mapped_);
  read_peer(memory_.peer.process, memory_.out + other.begin, memory_.peer.out + other.begin, other.count);
  Seat::publish(m.done[rank], mapped_);
  seat_.wait_for(m.done[peer], mapped_);
}

void Calls::mapped(const Way& way, std::size_t count) {
  Meeting& m = seat_.meeting;
  const int rank = seat_.rank, peer = seat_.peer;
  float* const* const in = way.in_place ? memory_.mapped_out : memory_.mapped_in;
  float* const* const out = memory_.mapped_out;
  Seat::publish(m.ready[rank], ++mapped_);
  seat_.wait_for(m.ready[peer], mapped_);
  if (way.kind == Way::read_both) {
    add(out[rank], in[0], in[1], count, way.stores);
  } else {
    const Part p = part_of(rank, count);
    add_twice(out[rank] + p.begin, way.stores, out[peer] + p.begin, way.stores, in[0] + p.begin,
              in[1] + p.begin, p.count);
  }
  Seat::publish(m.done[rank], mapped_);
  seat_.wait_for(m.done[peer], mapped_);
}

}  // namespace rz::bench::limit
