#include "tests/proof/rank_plans.h"

#include "comm/intranode/plan/call_plan.h"
#include "tests/proof/round_explorer.h"

namespace rz::intranode {

namespace {

using MoveKind = PlannedMove::Kind;

/// Makes the phases of one call on all ranks.
class CallPlans {
 public:
  CallPlans(std::vector<RankPlan>& plans, const NodeCase& node, const CallCase& c, std::size_t number,
            StepNumber first)
      : plans_(plans),
        node_(node),
        case_(c),
        number_(number),
        step_(first),
        limits_(staging_limits(node.ring_bytes, node.oversubscribed)),
        plan_(plan_call(c.kind, c.bytes, node.size, c.algorithm, limits_)) {}

  /// Returns the step after the call.
  StepNumber make() {
    if (case_.kind == Collective::all_to_all_v) return exchange_counts(), make_one_shot(), step_;
    if (case_.access != MemoryAccess::staged) exchange_handles();
    if (case_.access == MemoryAccess::zero_copy) return make_in_place(Protocol::zero_copy, true), step_;
    if (case_.access >= MemoryAccess::single_copy)
      make_in_place(Protocol::single_copy, case_.access == MemoryAccess::single_copy);
    if (case_.access != MemoryAccess::single_copy)
      plan_.protocol == Protocol::two_shot ? make_two_shot() : make_one_shot();
    return step_;
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  CallLayout layout_of(int rank) const {
    CallLayout layout;
    layout.ranks = CallRanks(case_.kind, rank, node_.size, case_.root);
    layout.total_bytes = case_.bytes;
    if (!case_.counts.empty()) layout.counts = &case_.counts[index(rank)];
    return layout;
  }
  std::size_t window() const {
    return staging_window(plan_, case_.kind, node_.size, limits_, node_.ring_bytes);
  }
  /// Adds a phase to every rank's plan: add(phase, layout).
  template <class F>
  void for_each_rank(std::size_t window, const F& add) {
    for (int r = 0; r < node_.size; ++r) {
      plans_[index(r)].phases.push_back({.call = number_, .window = window});
      add(plans_[index(r)].phases.back(), layout_of(r));
    }
  }
  std::vector<PlannedPoll> poll_all(int rank, StepNumber step) const {
    std::vector<PlannedPoll> polls;
    for (int r = 0; r < node_.size; ++r)
      if (r != rank) polls.push_back({r, step});
    return polls;
  }

  // Handles are one slot payload each; counts lie in the staging ring.
  void exchange_handles() { exchange(handle_reservation); }
  void exchange_counts() {
    plan_.shard_bytes = 0;
    plan_.chunking = chunk_shard(plan_, node_.size, case_.algorithm.chunk, limits_);
    exchange(count_reservation(node_.size));
    for (const AllToAllVCounts& c : case_.counts)
      plan_.shard_bytes =
          std::max(plan_.shard_bytes, *std::max_element(c.send_counts.begin(), c.send_counts.end()));
    plan_.chunking = chunk_shard(plan_, node_.size, case_.algorithm.chunk, limits_);
  }
  void exchange(const Reservation& own) {
    const bool in_ring = own.ring_bytes > 0;
    for_each_rank(in_ring ? window() : 0, [&](PlannedPhase& phase, const CallLayout& layout) {
      phase.moves.push_back(publish({.kind = MoveKind::contribute, .step = step_}, own));
      phase.moves.push_back(
          {.kind = MoveKind::read, .after = {1, 0, 0}, .polls = poll_all(layout.ranks.rank, step_)});
      if (in_ring) phase.acks.push_back({step_ + 1, {1, 0, 1}});
    });
    ++step_;
  }
  /// The move, which publishes what it has reserved.
  static PlannedMove publish(PlannedMove move, const Reservation& own) {
    move.slots = own.slots, move.writes_ring = own.writes_ring, move.ring_bytes = own.ring_bytes;
    return move;
  }

  // ---- staged

  PlannedMove contribute(const CallLayout& layout, StepNumber step, std::size_t round) const {
    PlannedMove move = publish({.kind = MoveKind::contribute, .round = round, .step = step},
                               plan_.contribution_reservation(node_.size, layout.ranks.is_sender));
    if (!layout.ranks.is_sender) return move;
    layout.for_each_contributed(plan_, round, [&](std::size_t at, std::size_t from, std::size_t bytes) {
      move.parts.push_back({.offset = at, .bytes = bytes, .operands = {input(layout.ranks.rank, from)}});
    });
    return move;
  }
  static PlannedSource input(int rank, std::size_t offset) {
    return {.place = PlannedSource::input, .rank = rank, .offset = offset};
  }
  /// What rank r contributed at that step for this rank.
  PlannedSource contribution(const CallLayout& layout, int r, StepNumber step, std::size_t own) const {
    if (r == layout.ranks.rank) return input(r, own);
    return {.place = PlannedSource::published,
            .rank = r,
            .step = step,
            .offset = layout.contribution_offset(plan_, r, layout.ranks.rank)};
  }
  std::vector<PlannedSource> contributions(const CallLayout& layout, StepNumber step, std::size_t own) const {
    std::vector<PlannedSource> all;
    for (int r = 0; r < node_.size; ++r) all.push_back(contribution(layout, r, step, own));
    return all;
  }
  std::vector<PlannedPoll> poll_sources(const CallLayout& layout, StepNumber step) const {
    std::vector<PlannedPoll> polls;
    for (int r = layout.ranks.first_source; r < layout.ranks.last_source; ++r) {
      if (r == layout.ranks.rank) continue;
      const SlotRange slots =
          plan_.inline_slots > 1 ? slots_for(layout, plan_, r, layout.ranks.rank) : SlotRange{0, 1};
      for (std::uint32_t i = slots.first; i < slots.last; ++i) polls.push_back({r, step + i});
    }
    return polls;
  }

  void make_one_shot() {
    const OneShotRounds rounds{.first = step_, .chunks = plan_.chunking.chunks, .slots = plan_.slots()};
    const RoundExplorer order(rounds);
    for_each_rank(plan_.inline_slots ? 0 : window(), [&](PlannedPhase& phase, const CallLayout& layout) {
      for (std::size_t k = 0; k < rounds.chunks; ++k) {
        phase.moves.push_back(contribute(layout, rounds.contribution_step(k), k));
        phase.moves.push_back(read_contributions(layout, rounds.contribution_step(k), k));
      }
      set_order(phase, order);
      phase.acks.back().deferred = may_defer_ack(plan_, case_.kind, node_.size, node_.ring_bytes);
    });
    step_ = rounds.end_step();
  }
  PlannedMove read_contributions(const CallLayout& layout, StepNumber step, std::size_t round) const {
    PlannedMove move{.kind = MoveKind::read, .round = round, .polls = poll_sources(layout, step)};
    const int rank = layout.ranks.rank;
    if (!layout.has_output()) return move;
    if (traits(case_.kind).reduces) {
      const CallLayout::Reduced part = layout.reduced(plan_, round);
      move.parts.push_back({rank, part.output, part.bytes, contributions(layout, step, part.input)});
      return move;
    }
    for (int r = layout.first_moved(); r < layout.last_moved(); ++r) {
      const CallLayout::Moved part = layout.moved(plan_, r, round);
      move.parts.push_back({rank, part.output, part.bytes, {contribution(layout, r, step, part.input)}});
    }
    return move;
  }

  void make_two_shot() {
    const TwoShotRounds rounds{.first = step_, .chunks = plan_.chunking.chunks};
    const RoundExplorer order(rounds);
    for_each_rank(window(), [&](PlannedPhase& phase, const CallLayout& layout) {
      for (std::size_t k = 0; k < rounds.chunks; ++k) {
        phase.moves.push_back(contribute(layout, rounds.contribution_step(k), k));
        phase.moves.push_back(reduce(layout, rounds, k));
        phase.moves.push_back(gather(layout, rounds, k));
      }
      set_order(phase, order);
      // Every move acknowledges: the first one, what the call has exchanged before.
      phase.acks.insert(phase.acks.begin(), {rounds.first, {1, 0, 0}});
    });
    step_ = rounds.end_step();
  }
  PlannedMove reduce(const CallLayout& layout, const TwoShotRounds& rounds, std::size_t round) const {
    const StepNumber step = rounds.contribution_step(round);
    const CallLayout::Reduced part = layout.reduced(plan_, round);
    const auto operands = contributions(layout, step, part.input);
    return publish({.kind = MoveKind::reduce,
                    .round = round,
                    .polls = poll_sources(layout, step),
                    .parts = {{PlannedPart::own_slot, 0, part.bytes, operands},
                              {layout.ranks.rank, part.output, part.bytes, operands}},
                    .step = rounds.result_step(round)},
                   plan_.result_reservation());
  }
  PlannedMove gather(const CallLayout& layout, const TwoShotRounds& rounds, std::size_t round) const {
    const int rank = layout.ranks.rank;
    const StepNumber step = rounds.result_step(round);
    PlannedMove move{.kind = MoveKind::read, .round = round, .polls = poll_all(rank, step)};
    for (int r = 0; r < node_.size; ++r) {
      if (r == rank) continue;
      const CallLayout::Moved part = layout.gathered(plan_, r, round);
      move.parts.push_back(
          {rank, part.output, part.bytes, {{PlannedSource::published, r, step, part.input}}});
    }
    return move;
  }
  template <class Rounds>
  static void set_order(PlannedPhase& phase, const RoundExplorer<Rounds>& order) {
    for (PlannedMove& move : phase.moves) move.after = order.before(move.kind, move.round);
    phase.acks = order.acks();
  }

  // ---- zero_copy and single_copy: rounds of accesses; the last one publishes that they have ended

  void make_in_place(Protocol protocol, bool accesses) {
    const CallPlan plan = plan_in_place(protocol, case_.kind, case_.bytes, node_.size);
    const InPlaceRounds rounds{.first = step_, .chunks = accesses ? plan.chunking.chunks : 1};
    for_each_rank(0, [&](PlannedPhase& phase, const CallLayout& layout) {
      for (std::size_t k = 0; k < rounds.chunks; ++k) {
        phase.moves.push_back({.kind = MoveKind::read, .round = k, .after = {0, 0, k}});
        if (accesses) phase.moves.back().parts = access(layout, plan, k);
      }
      phase.moves.back().slots = 1;
      phase.moves.back().step = step_;
      phase.moves.back().reserves = false;
      phase.moves.push_back({.kind = MoveKind::read,
                             .round = rounds.chunks,
                             .after = {0, 0, rounds.chunks},
                             .polls = poll_all(layout.ranks.rank, step_)});
      phase.acks.push_back(
          {rounds.end_step(), {0, 0, rounds.chunks + 1}, accesses && protocol == Protocol::zero_copy});
    });
    step_ = rounds.end_step();
  }
  std::vector<PlannedPart> access(const CallLayout& layout, const CallPlan& plan, std::size_t round) const {
    std::vector<PlannedPart> parts;
    if (!layout.has_output()) return parts;
    if (traits(case_.kind).reduces) {
      const CallLayout::Reduced part = layout.reduced(plan, round);
      std::vector<PlannedSource> operands;
      for (int r = 0; r < node_.size; ++r) operands.push_back(input(r, part.input));
      const int to = case_.kind == Collective::all_reduce ? PlannedPart::all_outputs : layout.ranks.rank;
      parts.push_back({to, part.output, part.bytes, std::move(operands)});
      return parts;
    }
    for (int r = layout.first_moved(); r < layout.last_moved(); ++r) {
      const CallLayout::Moved part = layout.moved(plan, r, round);
      parts.push_back({layout.ranks.rank, part.output, part.bytes, {input(r, part.input)}});
    }
    return parts;
  }

  std::vector<RankPlan>& plans_;
  const NodeCase& node_;
  const CallCase& case_;
  const std::size_t number_;
  StepNumber step_;  // the next one
  const StagingLimits limits_;
  CallPlan plan_;  // staged
};

}  // namespace

std::vector<RankPlan> make_rank_plans(std::span<const CallCase> calls, const NodeCase& node) {
  std::vector<RankPlan> plans(static_cast<std::size_t>(node.size));
  StepNumber next = node.first_step;
  for (std::size_t i = 0; i < calls.size(); ++i) next = CallPlans(plans, node, calls[i], i, next).make();
  return plans;
}

}  // namespace rz::intranode
