#pragma once
/// The moves of all ranks, ordered by what they wait for. Not thread safe.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/proof/rank_plans.h"

namespace rz::intranode {

/// A plan that cannot be proved.
struct RefusedPlan {
  std::string reason;
};

/// Where the bytes of each step lie, and what its writer waits for: StagingCursor run over all steps. Refuses
/// ranks that publish or reserve differently.
class StepTable {
 public:
  StepTable(std::span<const RankPlan>, const NodeCase&);

  struct Entry {
    std::size_t ring_offset = 0, ring_bytes = 0;
    StepNumber needed = 0, needed_to_write = 0;  ///< acknowledgements: steps before these
  };
  std::size_t size() const { return entries_.size(); }
  const Entry& at(std::size_t number) const { return entries_[number]; }
  /// Steps since the first one.
  std::size_t number(StepNumber step) const { return static_cast<std::size_t>(step - first_); }
  StepNumber step(std::size_t number) const { return first_ + static_cast<StepNumber>(number); }

 private:
  const StepNumber first_;
  std::vector<Entry> entries_;  // by number
};

/// Every move waits for moves of its own rank, for the publishers of the steps that it polls, and for the
/// acknowledgements that its reservation needs. These conditions, once met, stay so: hence one order of moves
/// that runs them all shows that none runs dry in any other order. A move `a` happens before `b` in every
/// interleaving if b waits for it, directly or not: clocks have that.
class MoveGraph {
 public:
  MoveGraph(std::span<const RankPlan>, const NodeCase&, const StepTable&);

  struct Node {
    const PlannedMove* move;
    int rank;
    std::size_t phase, position;  ///< position: among the moves of that rank and kind
  };
  using Id = std::size_t;
  static constexpr Id none = ~std::size_t{0};

  const std::vector<Node>& nodes() const { return nodes_; }
  /// All moves, each behind those that it waits for.
  const std::vector<Id>& order() const { return order_; }
  bool happens_before(Id a, Id b) const { return clock(b)[lane(a)] > nodes_[a].position; }
  /// The move of that rank that publishes the step of that number, or none.
  Id publisher(int rank, std::size_t number) const { return publishers_[index(rank)][number]; }
  /// The moves that poll that rank's slot.
  const std::vector<Id>& pollers(int rank, std::size_t number) const { return pollers_[index(rank)][number]; }
  std::string where(Id) const;

 private:
  using Phase = std::array<std::vector<Id>, 3>;  // moves by kind and round
  struct Ack {
    std::int64_t before;  // number of the step
    std::vector<Id> after;
    bool deferred;
    std::size_t phase;
  };
  struct NeededAck {
    Id by;
    int rank;  // that acknowledges
    std::int64_t before;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  std::size_t lane(Id a) const { return index(nodes_[a].rank) * 3 + nodes_[a].move->kind; }
  const std::uint32_t* clock(Id a) const { return clocks_.data() + a * lanes_; }
  void add_rank(int rank, const RankPlan&);
  void add_acks(int rank, const RankPlan&);
  void order_rank(int rank, const RankPlan&);
  std::vector<Id> moves_of(int rank, std::size_t phase, const RoundCounts&) const;
  void wait_for_steps(Id);
  void wait_for_acks(Id);
  void wait_for(Id, Id before);
  void run();
  void check_deferred(const NeededAck&) const;

  const StepTable& steps_;
  const std::size_t lanes_;
  std::vector<Node> nodes_;
  std::vector<std::vector<Phase>> phases_;             // by rank and phase
  std::vector<std::vector<Id>> publishers_;            // by rank and number of the step
  std::vector<std::vector<std::vector<Id>>> pollers_;  // likewise
  std::vector<std::vector<Ack>> acks_;                 // by rank, ascending
  std::vector<NeededAck> needed_acks_;
  std::vector<std::vector<Id>> before_;  // by move: those that it waits for
  std::vector<Id> order_;
  std::vector<std::uint32_t> clocks_;  // by move and lane: moves that happen before it, and itself
};

}  // namespace rz::intranode
