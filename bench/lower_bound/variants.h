#pragma once
/// The variants of an all_reduce of floats on two ranks that consist only of the arithmetic, the copies and
/// one flag per step: no queue, no checks, no selection of an algorithm.
///
/// Method "staged": each rank accesses its own memory and shared slots.
///   lines      at most 140 floats, in cache lines of 14, each with a flag; each rank adds all of them
///   one_shot   each rank copies all of its input to slots, in pieces, and adds the pieces of the peer
///   two_phase  a rank copies the half of the peer to slots; adds its own half from input and slots, to its
///              output and to slots; and copies the half of the peer from there; three pieces are in flight
/// Method "single_copy": the kernel copies from the memory of the peer (process_vm_readv), if permitted.
///   single_copy  a rank reads its half of the peer's input in pieces, adds it, and reads the peer's sums
/// Method "mapped": each rank reads and writes the memory of the peer.
///   read_both  each rank adds both inputs, to its own output (not in place)
///   halves     each rank adds one half of both inputs, to both outputs

#include <cstddef>
#include <string>
#include <vector>

#include "bench/lower_bound/arithmetic.h"
#include "bench/lower_bound/pair.h"

namespace rz::bench::lower_bound {

/// The largest piece of any variant, and the largest message of one_shot.
inline constexpr std::size_t max_piece = std::size_t{1} << 20, max_one_shot = std::size_t{1} << 20;

struct Variant {
  enum Kind { lines, one_shot, two_phase, single_copy, read_both, halves };
  Kind kind;
  bool in_place;
  std::size_t piece = 0;                 ///< bytes
  StoreKind stores = StoreKind::cached;  ///< for results that the call does not read again

  bool mapped() const { return kind == read_both || kind == halves; }
  /// "staged", "single_copy" or "mapped", with the suffix "_in_place" for calls in place.
  std::string method() const;
  /// E.g. "two_phase/65536/streamed".
  std::string name() const;
};

/// All variants that apply to the size.
std::vector<Variant> variants_for(std::size_t bytes);

}  // namespace rz::bench::lower_bound
