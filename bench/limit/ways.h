#pragma once
/// The ways in which two ranks can add up their floats when nothing but the arithmetic, the copies and one
/// flag a step stand between them: no queue, no checks, no choice.
///
/// Staged, each rank sees its own memory alone and shared slots:
///   letters    at most 140 floats, in cache lines of 14, each beside a flag; each rank adds all
///   one_shot   each rank copies all of its input to slots, in pieces, and adds what the other did
///   two_phase  a rank copies the other's half to slots, adds its own half from input and slots, to its
///   output and
///              to slots, and copies the other half from there; three pieces are in work at a time
/// Single copy, the kernel copies out of the other's memory (process_vm_readv), if it permits that:
///   single_copy  a rank reads the other's half of its own part in pieces, adds, and then reads the other's
///   sums
/// Mapped, each rank reads and writes the other's memory:
///   read_both  each adds both inputs whole, to its own output (not in place)
///   halves     each adds one half of both inputs, to both outputs

#include <string>
#include <vector>

#include "bench/limit/kernels.h"
#include "bench/limit/pair.h"

namespace rz::bench::limit {

struct Way {
  enum Kind { letters, one_shot, two_phase, single_copy, read_both, halves };
  Kind kind;
  bool in_place;
  std::size_t piece = 0;           ///< bytes
  Stores stores = Stores::cached;  ///< of what is not read again in the call

  bool mapped() const { return kind == read_both || kind == halves; }
  /// "staged", "single_copy" or "mapped", or with "_in_place".
  std::string variant() const;
  /// E.g. "two_phase/65536/streamed".
  std::string name() const;
};

/// All that suit the size.
std::vector<Way> ways_for(std::size_t bytes);

/// What one rank sees. Everything starts at a multiple of 64 bytes; `slots` holds slot_bytes.
struct Memory {
  static constexpr std::size_t slot_bytes = std::size_t{16} << 20;
  float *in, *out;
  float *mapped_in[2], *mapped_out[2];
  std::byte* slots;
  Lying peer;
};

class Calls {
 public:
  Calls(Seat& seat, const Memory& memory) : seat_(seat), memory_(memory) {}

  /// One all_reduce of `count` floats on this rank; the other makes the same calls. In place, `out` is the
  /// input. Between calls of different ways the ranks meet.
  void all_reduce(const Way&, std::size_t count);

 private:
  void letters(float* in, std::size_t count);
  void one_shot(const Way&, float* in, std::size_t count);
  void two_phase(const Way&, float* in, std::size_t count);
  void single_copy(const Way&, std::size_t count);
  void mapped(const Way&, std::size_t count);
  float* slot(int rank, int kind, std::uint64_t number, std::size_t piece) const;

  Seat& seat_;
  const Memory memory_;
  std::vector<float> piece_;
  std::uint64_t letters_ = 0, mapped_ = 0, one_shots_ = 0, pieces_ = 0;
  std::uint64_t offered_ = 0, folded_ = 0, taken_ = 0;  // pieces of two_phase
};

}  // namespace rz::bench::limit
