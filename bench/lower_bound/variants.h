#pragma once
/// The variants of an all_reduce of floats on two ranks that do nothing but the arithmetic, the copies and
/// one flag a step: no queue, no checks, no choice of an algorithm.
///
/// Method "staged": each rank accesses its own memory and shared slots.
///   lines      at most 140 floats, in cache lines of 14, each beside a flag; each rank adds all
///   one_shot   each rank copies all of its input to slots, in pieces, and adds the peer's pieces
///   two_phase  a rank copies the peer's half to slots; adds its own half from input and slots, to its output
///              and to slots; and copies the peer's half from there; three pieces are in work at a time
/// Method "single_copy": the kernel copies out of the peer's memory (process_vm_readv), if it permits that.
///   single_copy  a rank reads its half of the peer's input in pieces, adds, and then reads the peer's sums
/// Method "mapped": each rank reads and writes the peer's memory.
///   read_both  each adds both inputs whole, to its own output (not in place)
///   halves     each adds one half of both inputs, to both outputs

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
  StoreKind stores = StoreKind::cached;  ///< of results that the call does not read again

  bool mapped() const { return kind == read_both || kind == halves; }
  /// "staged", "single_copy" or "mapped", or with "_in_place".
  std::string method() const;
  /// E.g. "two_phase/65536/streamed".
  std::string name() const;
};

/// All variants that suit the size.
std::vector<Variant> variants_for(std::size_t bytes);

}  // namespace rz::bench::lower_bound
