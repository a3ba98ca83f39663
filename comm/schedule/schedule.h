#pragma once
/// Algorithms as data. A Schedule holds the steps of one rank in one collective: sends, and reductions of
/// local chunks and incoming messages. It is independent of sizes, types and transports. One executor
/// (comm/schedule/executor.h) runs any Schedule on any Transport, and the tests prove it correct by verify()
/// (tests/proof/verify.h).
///
/// Steps are in program order, and each waits for its dependencies only: a step that reads a chunk follows
/// the last step that wrote it, a step that writes a chunk follows the steps that read or wrote it, and
/// messages between two ranks are sent and received in program order. All else may overlap, slice by slice
/// within a chunk, so that a ring is pipelined without further notation.

#include <span>
#include <vector>

#include "comm/collective.h"
#include "comm/core/types.h"

namespace rz::schedule {

/// A rank's position in its group, and the root of a rooted collective (0 for others).
struct RankContext {
  int rank = 0;
  int size = 1;
  int root = 0;
  /// The node of every rank. Nodes are numbered from 0 in the order of their first ranks; empty: all on one
  /// node.
  std::span<const int> node_of_rank{};
  /// Order in which a step combines the contributions of all ranks, if the algorithm has such a step.
  ReductionOrder order = ReductionOrder::rank;
};

/// Memory of a call. `input` is never written. In an in-place call the chunks of `input` and `output` with
/// the same number are the same memory. `scratch` is temporary; a cell holds one chunk of any size.
enum class Region : unsigned char { input, output, scratch };

/// A chunk in a region: what one step sends or reduces. Numbers of chunks, by collective:
///   all_reduce, broadcast, reduce
///     0 … Schedule::chunks-1, an even division of the buffer (large chunks begin at cache lines; sizes
///     differ and may be 0). Input and output hold all of them (broadcast: input at the root only, output on
///     all ranks; reduce: output at the root only).
///   reduce_scatter, scatter
///     Chunk r is rank r's shard. Input holds all (scatter: at the root), output the own one.
///   all_gather, gather
///     Chunk r is rank r's shard. Input holds the own one, output all (gather: at the root).
///   all_to_all, all_to_all_v
///     Chunk s·size + d goes from rank s to rank d. Input holds the chunks that the rank sends, output those
///     that it receives. There is no in-place form: the caller copies the input first.
///   barrier
///     One chunk of one byte, scratch only. Its cells may be read before they are written, since only the
///     dependencies matter, not the values.
struct ChunkRef {
  Region region = Region::input;
  int number = 0;
  int cell = 0;  ///< scratch only
  bool operator==(const ChunkRef&) const = default;
};

/// One operand of a reduction: the next message from `peer`, or, with peer = -1, a chunk of this rank.
struct Operand {
  int peer = -1;
  ChunkRef chunk{};
  bool partial = false;  ///< a sum, not a contribution, which an `avg` of floats scales (AverageStep)
};

struct Step {
  enum Kind : unsigned char { send, reduce };
  Kind kind = reduce;
  int peer = -1;                  ///< send: receiver
  ChunkRef chunk{};               ///< send: source; reduce: destination
  std::vector<Operand> operands;  ///< reduce: in `order`; one operand is a copy
  /// reduce: the result includes all ranks, so `avg` divides here, even in a step of one operand. Every
  /// element of a reduced output passes exactly one final step, on one rank.
  bool final = false;
  ReductionOrder order = ReductionOrder::rank;  ///< of the operands: from the left, or pairwise
};

struct Schedule {
  int chunks = 1;
  int scratch_cells = 0;  ///< number of scratch cells
  std::vector<Step> steps;
};

// Shorthands for chunks, operands and steps.
inline ChunkRef input(int chunk) { return {Region::input, chunk, 0}; }
inline ChunkRef output(int chunk) { return {Region::output, chunk, 0}; }
inline ChunkRef scratch(int cell, int chunk) { return {Region::scratch, chunk, cell}; }
inline Operand from(int peer, bool partial = false) { return {peer, {}, partial}; }
inline Operand local(ChunkRef ref, bool partial) { return {-1, ref, partial}; }
inline Operand local(ChunkRef ref) { return local(ref, ref.region != Region::input); }
inline Step send(int peer, ChunkRef what) { return {Step::send, peer, what, {}, false}; }
inline Step reduce_step(ChunkRef to, std::vector<Operand> operands, bool final = false,
                        ReductionOrder order = ReductionOrder::rank) {
  return {Step::reduce, -1, to, std::move(operands), final, order};
}
inline Step recv(ChunkRef to, int peer) { return reduce_step(to, {from(peer)}); }
inline Step copy(ChunkRef to, ChunkRef what) { return reduce_step(to, {local(what)}); }

/// The rank at `distance` (of either sign, less than the size) from this one, cyclically.
inline int rank_at_distance(RankContext context, int distance) {
  return (context.rank + distance + context.size) % context.size;
}

/// The operands x0, x1, …, x(n-1): the next message of every peer, and `mine` in this rank's place.
inline std::vector<Operand> rank_ordered_operands(RankContext context, ChunkRef mine) {
  std::vector<Operand> operands;
  operands.reserve(static_cast<std::size_t>(context.size));
  for (int r = 0; r < context.size; ++r) operands.push_back(r == context.rank ? local(mine) : from(r));
  return operands;
}

/// A pure function of the context. Thread safe.
using ScheduleFunction = Schedule (*)(RankContext);

}  // namespace rz::schedule
