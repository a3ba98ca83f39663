#pragma once
/// A sequence of calls of the intra-node engine as data, for the verifier (verify.h): what a rank publishes,
/// reads, reduces and acknowledges, and in which order.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

/// Bytes that a move reads: of a rank's input, or of what it published at a step.
struct PlannedSource {
  enum Place : std::uint8_t { input, published };
  Place place = input;
  int rank = 0;
  StepNumber step = 0;
  std::size_t offset = 0;
};

/// Bytes that a move writes: the sum of the operands, in this order, or a copy of one.
struct PlannedPart {
  static constexpr int own_slot = -1, all_outputs = -2;
  int to = own_slot;  ///< what the move publishes; the outputs of all ranks; or the output of that rank
  std::size_t offset = 0, bytes = 0;
  std::vector<PlannedSource> operands;
};

struct PlannedPoll {
  int peer = 0;
  StepNumber step = 0;
};

/// Moves of one kind run in order. A move runs when those of `after` have run, the polled steps are
/// published, and its reservation is granted.
struct PlannedMove {
  enum Kind : std::uint8_t { contribute, reduce, read };
  Kind kind = read;
  std::size_t round = 0;  ///< number among the moves of that kind in its phase
  RoundCounts after;      ///< moves of this rank and phase
  std::vector<PlannedPoll> polls;
  std::vector<PlannedPart> parts;

  std::uint32_t slots = 0;     ///< published; 0: none
  StepNumber step = 0;         ///< of the first of them
  bool reserves = true;        ///< waits until the slots may be overwritten
  bool writes_ring = false;    ///< and the ring bytes
  std::size_t ring_bytes = 0;  ///< reserved; 0: the payload is in the slots
};

/// Once these moves of the phase have run, the rank acknowledges all steps before this one.
struct PlannedAck {
  StepNumber before = 0;
  RoundCounts after;
  bool deferred = false;  ///< written at most 16 steps later, or before the rank blocks
};

/// Part of a call; the next one begins when all moves of this one have run.
struct PlannedPhase {
  std::size_t call = 0;
  std::size_t window = 0;  ///< of the staging ring, set when it begins; 0: as before
  std::vector<PlannedMove> moves;
  std::vector<PlannedAck> acks;
};

/// What one rank does in a sequence of calls.
struct RankPlan {
  std::vector<PlannedPhase> phases;
};

}  // namespace rz::intranode
