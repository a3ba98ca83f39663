#include "bench/lower_bound/kernel.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"

namespace rz::bench::lower_bound {
namespace {

constexpr std::uint64_t depth = 4;  // slots of each kind
static_assert(2 * 2 * depth * max_piece <= RankMemory::slot_bytes &&
              2 * 2 * max_one_shot <= RankMemory::slot_bytes);

/// Copies from the memory of another process. Errc::system if the kernel does not permit it.
void read_peer(pid_t process, float* to, const float* from, std::size_t count) {
  for (std::size_t at = 0; at < count * sizeof(float);) {
    const iovec here{reinterpret_cast<std::byte*>(to) + at, count * sizeof(float) - at};
    const iovec there{reinterpret_cast<std::byte*>(const_cast<float*>(from)) + at, here.iov_len};
    const ssize_t n = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (n <= 0) fail_errno("process_vm_readv", concat("of process ", process));
    at += static_cast<std::size_t>(n);
  }
}

/// The elements reduced by a rank: one half, rounded to whole cache lines; the half of rank 0 is the larger.
struct Part {
  std::size_t begin, count;
};
Part part_of(int rank, std::size_t count) {
  const std::size_t half = ((count + 1) / 2 + 15) / 16 * 16, cut = std::min(half, count);
  return rank == 0 ? Part{0, cut} : Part{cut, count - cut};
}

/// Piece k of `piece` elements of a part; the last pieces may be empty.
Part piece_of(Part part, std::size_t k, std::size_t piece) {
  const std::size_t at = std::min(k * piece, part.count);
  return {part.begin + at, std::min(piece, part.count - at)};
}

/// The count that the peer must reach before the slot of `number` may be overwritten.
std::uint64_t count_that_frees(std::uint64_t number) { return number < depth ? 0 : number - depth + 1; }

}  // namespace

void Kernel::all_reduce(const Variant& variant, std::size_t count) {
  float* const in = variant.in_place ? memory_.out : memory_.in;
  switch (variant.kind) {
    case Variant::lines:
      return lines(in, count);
    case Variant::one_shot:
      return one_shot(variant, in, count);
    case Variant::two_phase:
      return two_phase(variant, in, count);
    case Variant::single_copy:
      return single_copy(variant, count);
    case Variant::read_both:
    case Variant::halves:
      return mapped(variant, count);
  }
}

// Successive calls alternate between two sets of lines and slots. A rank that starts a call has received all
// data of the previous call, so the peer has read the set that this call overwrites.

void Kernel::lines(float* in, std::size_t count) {
  const std::uint64_t number = ++lines_;
  LineSlot* mine = self_.state.lines[self_.rank][number % 2];
  for (std::size_t at = 0; at < count; at += LineSlot::floats, ++mine) {
    std::memcpy(mine->values, in + at, std::min(LineSlot::floats, count - at) * sizeof(float));
    mine->number.store(number, std::memory_order_release);
  }
  const LineSlot* other = self_.state.lines[self_.peer][number % 2];
  for (std::size_t at = 0; at < count; at += LineSlot::floats, ++other) {
    self_.wait_for(other->number, number);
    const std::size_t n = std::min(LineSlot::floats, count - at);
    for (std::size_t i = 0; i < n; ++i) memory_.out[at + i] = in[at + i] + other->values[i];
  }
}

void Kernel::one_shot(const Variant& variant, float* in, std::size_t count) {
  const std::uint64_t turn = ++one_shots_ % 2, first = pieces_;
  const auto slots = [&](int rank) {
    return reinterpret_cast<float*>(memory_.slots +
                                    (turn * 2 + static_cast<std::size_t>(rank)) * max_one_shot);
  };
  float* const mine = slots(self_.rank);
  const float* const other = slots(self_.peer);
  const std::size_t piece = variant.piece / sizeof(float);
  for (std::size_t at = 0; at < count; at += piece) {
    copy(mine + at, in + at, std::min(piece, count - at), StoreKind::cached);
    PairRank::publish(self_.state.pieces[self_.rank], ++pieces_);
  }
  std::uint64_t arrived = first;
  for (std::size_t at = 0; at < count; at += piece) {
    self_.wait_for(self_.state.pieces[self_.peer], ++arrived);
    add(memory_.out + at, in + at, other + at, std::min(piece, count - at), variant.stores);
  }
}

float* Kernel::slot(int rank, int kind, std::uint64_t number, std::size_t piece) const {
  const std::size_t which = (static_cast<std::size_t>(rank) * 2 + static_cast<std::size_t>(kind)) * depth;
  return reinterpret_cast<float*>(memory_.slots + (which + number % depth) * piece);
}

void Kernel::two_phase(const Variant& variant, float* in, std::size_t count) {
  PairState& state = self_.state;
  const int rank = self_.rank, peer = self_.peer;
  const Part mine = part_of(rank, count), other = part_of(peer, count);
  const std::size_t piece = variant.piece / sizeof(float),
                    rounds = (part_of(0, count).count + piece - 1) / piece;
  for (std::size_t k = 0; k < rounds + 2; ++k) {
    if (k < rounds) {
      const Part p = piece_of(other, k, piece);
      self_.wait_for(state.reduced[peer], count_that_frees(copied_));
      copy(slot(rank, 0, copied_, variant.piece), in + p.begin, p.count, StoreKind::cached);
      PairRank::publish(state.copied[rank], ++copied_);
    }
    if (k >= 1 && k <= rounds) {
      const Part p = piece_of(mine, k - 1, piece);
      self_.wait_for(state.copied[peer], reduced_ + 1);
      self_.wait_for(state.gathered[peer], count_that_frees(reduced_));
      add_twice(memory_.out + p.begin, variant.stores, slot(rank, 1, reduced_, variant.piece),
                StoreKind::cached, in + p.begin, slot(peer, 0, reduced_, variant.piece), p.count);
      PairRank::publish(state.reduced[rank], ++reduced_);
    }
    if (k >= 2) {
      const Part p = piece_of(other, k - 2, piece);
      self_.wait_for(state.reduced[peer], gathered_ + 1);
      copy(memory_.out + p.begin, slot(peer, 1, gathered_, variant.piece), p.count, variant.stores);
      PairRank::publish(state.gathered[rank], ++gathered_);
    }
  }
}

void Kernel::single_copy(const Variant& variant, std::size_t count) {
  PairState& state = self_.state;
  const int rank = self_.rank, peer = self_.peer;
  const Part mine = part_of(rank, count), other = part_of(peer, count);
  const float* const in = variant.in_place ? memory_.out : memory_.in;
  const float* const theirs = variant.in_place ? memory_.peer.out : memory_.peer.in;
  const std::size_t piece = variant.piece / sizeof(float);
  if (piece_.size() < piece) piece_.resize(piece);
  PairRank::publish(state.ready[rank], ++mapped_);
  self_.wait_for(state.ready[peer], mapped_);
  for (std::size_t k = 0; k * piece < mine.count; ++k) {
    const Part p = piece_of(mine, k, piece);
    read_peer(memory_.peer.process, piece_.data(), theirs + p.begin, p.count);
    add(memory_.out + p.begin, in + p.begin, piece_.data(), p.count, variant.stores);
  }
  // Up to here, in place, each rank has written only its own half. The peer reads that half after this wait.
  PairRank::publish(state.half_done[rank], mapped_);
  self_.wait_for(state.half_done[peer], mapped_);
  read_peer(memory_.peer.process, memory_.out + other.begin, memory_.peer.out + other.begin, other.count);
  PairRank::publish(state.done[rank], mapped_);
  self_.wait_for(state.done[peer], mapped_);
}

void Kernel::mapped(const Variant& variant, std::size_t count) {
  PairState& state = self_.state;
  const int rank = self_.rank, peer = self_.peer;
  float* const* const in = variant.in_place ? memory_.mapped_out : memory_.mapped_in;
  float* const* const out = memory_.mapped_out;
  PairRank::publish(state.ready[rank], ++mapped_);
  self_.wait_for(state.ready[peer], mapped_);
  if (variant.kind == Variant::read_both) {
    add(out[rank], in[0], in[1], count, variant.stores);
  } else {
    const Part p = part_of(rank, count);
    add_twice(out[rank] + p.begin, variant.stores, out[peer] + p.begin, variant.stores, in[0] + p.begin,
              in[1] + p.begin, p.count);
  }
  PairRank::publish(state.done[rank], mapped_);
  self_.wait_for(state.done[peer], mapped_);
}

}  // namespace rz::bench::lower_bound
