#pragma once
/// Algorithms as data. A Schedule is what one rank does in one collective: sends, and combinations of what it
/// holds with what arrives. It knows nothing of bytes, types or wires; one executor (comm/backends/scheduled)
/// runs any Schedule on any Transport, and one verifier proves it before it ships.
///
/// Steps are in program order. Each waits for exactly what it needs: a step that reads a slot follows the
/// last step that wrote it, one that writes a slot follows the steps that read or wrote it, and messages
/// between two ranks are sent and received in program order. All else may overlap, slice by slice within a
/// chunk, so a ring is pipelined without saying so.

#include <span>
#include <string>
#include <vector>

#include "comm/collective.h"

namespace rz {

/// Where a rank stands in its group, and the root of a rooted collective (0 for others).
struct RankContext {
  int rank = 0;
  int size = 1;
  int root = 0;
  /// The host of every rank: those of one number share memory. Numbered from 0 in the order of their first
  /// ranks; empty: all on one.
  std::span<const int> node_of_rank{};
};

/// `input` is never written. In an in-place call a slot of `input` and the slot of `output` with the same
/// chunk are the same memory. `scratch` belongs to the call; a cell holds one chunk of any size.
enum class Region : unsigned char { input, output, scratch };

/// One chunk's place in a region. Logical chunks, by collective:
///   all_reduce, broadcast, reduce: 0 … Schedule::chunks-1, an even cut of the buffer (sizes may differ by
///     one element, or be 0); input and output hold all of them (broadcast: input only at the root, output
///     elsewhere too; reduce: output only at the root).
///   reduce_scatter, scatter: chunk r is rank r's part. Input holds all (scatter: at the root), output its
///     own.
///   all_gather, gather: chunk r is rank r's part. Input holds its own, output all (gather: at the root).
///   all_to_all, all_to_all_v: chunk s·size + d goes from s to d. Input holds those it sends, output those it
///     receives. There is no in-place form: whoever runs one with in == out first copies the input aside.
///   barrier: one chunk of one byte, scratch only. Its cells may be read before they are written, and its
///     sums mean nothing: what counts is who waits for whom.
struct ChunkRef {
  Region region = Region::input;
  int chunk = 0;
  int scratch_index = 0;  ///< scratch only
  bool operator==(const ChunkRef&) const = default;
};

/// One summand of a combination: the next message from `peer`, or, with peer = -1, a slot of this rank.
struct Operand {
  int peer = -1;
  ChunkRef chunk{};
};

struct Step {
  enum Kind : unsigned char { send, reduce };
  Kind kind = reduce;
  int peer = -1;               ///< send: to whom
  ChunkRef slot{};             ///< send: what; combine: where to
  std::vector<Operand> terms;  ///< combine: folded from the left, ((t0 + t1) + t2) + …; one term is a copy
  /// Combine: the result is the reduction over every rank, so `avg` divides here, a step of one term too.
  /// Every element of an output that is reduced passes exactly one such step, on the rank that finishes it.
  bool final = false;
};

struct Schedule {
  int chunks = 1;
  int scratch_chunks = 0;  ///< scratch cells
  std::vector<Step> steps;
};

// The usual steps, in words.
inline ChunkRef input(int chunk) { return {Region::input, chunk, 0}; }
inline ChunkRef output(int chunk) { return {Region::output, chunk, 0}; }
inline ChunkRef scratch(int cell, int chunk) { return {Region::scratch, chunk, cell}; }
inline Operand from(int peer) { return {peer, {}}; }
inline Operand local(ChunkRef slot) { return {-1, slot}; }
inline Step send(int peer, ChunkRef what) { return {Step::send, peer, what, {}, false}; }
inline Step reduce_step(ChunkRef to, std::vector<Operand> terms, bool final = false) {
  return {Step::reduce, -1, to, std::move(terms), final};
}
inline Step recv(ChunkRef to, int peer) { return reduce_step(to, {from(peer)}); }
inline Step copy(ChunkRef to, ChunkRef what) { return reduce_step(to, {local(what)}); }

/// Makes in the output what a schedule makes in scratch, only so that it overwrites no input, and then copies
/// to the output: one pass over memory less. For ranks that are not in place.
void elide_scratch_copies(Schedule&);

/// A pure function: the same seat gives the same schedule.
using ScheduleFunction = Schedule (*)(RankContext);

/// Which ranks make their calls in place. `any`: each as it likes, whatever the others do.
enum class InPlace : unsigned char { none, all, any };

/// What the verifier found out about an algorithm beyond its being right.
struct Verification {
  std::string error;  ///< empty: proved
  /// Reductions only: every element is ((x0 + x1) + x2) + … in rank order, whatever its chunk, so that
  /// results do not depend on how a buffer is cut.
  bool rank_order = false;
  /// In rank order, and stored nowhere before it is complete: small floats are rounded once.
  bool rounded_once = false;
  int depth = 0;  ///< longest chain of dependent messages
  explicit operator bool() const { return error.empty(); }
};

/// Proves, for one group size, root and placement of ranks on hosts (as RankContext::node_of_rank): every
/// slot of the output ends as the collective says; sent and received chunks match; every reduced element
/// holds every rank's contribution exactly once, and has passed one final step; all ranks that hold a result
/// hold the same expression (a + b counts as b + a), so the same bits; no deadlock even if no message is ever
/// buffered; nothing is written while it may still be read; `input` is never written (out of place). All of
/// it for the schedule as written and as it runs, after elide_scratch_copies(). The error names rank, step
/// and chunk, or is what the function throws.
Verification verify(ScheduleFunction, Collective, int size, int root, InPlace,
                    std::span<const int> host = {});

}  // namespace rz
