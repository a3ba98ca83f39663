#include "tests/proof/move_graph.h"

#include <algorithm>

#include "comm/core/text.h"
#include "comm/intranode/mailbox/slot_protocol.h"

namespace rz::intranode {

namespace {

template <class... T>
[[noreturn]] void refuse_plan(const T&... parts) {
  throw RefusedPlan{concat(parts...)};
}

/// What a rank publishes in a phase, in the order of steps.
std::vector<const PlannedMove*> published(const PlannedPhase& phase) {
  std::vector<const PlannedMove*> found;
  for (const PlannedMove& m : phase.moves)
    if (m.slots) found.push_back(&m);
  std::sort(found.begin(), found.end(),
            [](const PlannedMove* a, const PlannedMove* b) { return is_after(b->step, a->step); });
  return found;
}

void check_same(const PlannedPhase& own, const PlannedPhase& first, int rank) {
  const auto a = published(own), b = published(first);
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= std::min(a.size(), b.size()) || a[i]->step != b[i]->step || a[i]->slots != b[i]->slots)
      refuse_plan("rank ", rank, ", step ", i < a.size() ? a[i]->step : b[i]->step,
                  ": rank 0 does not publish the same slots");
    if (a[i]->ring_bytes != b[i]->ring_bytes || own.window != first.window)
      refuse_plan("rank ", rank, ", step ", a[i]->step, ": reserves ", a[i]->ring_bytes, " bytes, rank 0 ",
                  b[i]->ring_bytes);
  }
}

}  // namespace

// ---- steps

StepTable::StepTable(std::span<const RankPlan> plans, const NodeCase& node) : first_(node.first_step) {
  StagingCursor cursor(node.ring_bytes, first_);
  for (std::size_t p = 0; p < plans[0].phases.size(); ++p) {
    const PlannedPhase& phase = plans[0].phases[p];
    for (std::size_t r = 1; r < plans.size(); ++r) check_same(plans[r].phases[p], phase, static_cast<int>(r));
    if (phase.window) cursor.set_window(phase.window);
    for (const PlannedMove* m : published(phase)) {
      if (number(m->step) != entries_.size())
        refuse_plan("rank 0, step ", m->step, ": the next step is ", step(entries_.size()));
      m->ring_bytes ? cursor.reserve(m->step, m->ring_bytes) : cursor.reserve_slots(m->step, m->slots);
      const Entry entry{cursor.offset(m->step), m->ring_bytes, cursor.needed_ack(m->step, false, m->slots),
                        cursor.needed_ack(m->step, true, m->slots)};
      if (entry.ring_offset + entry.ring_bytes > node.ring_bytes)
        refuse_plan("rank 0, step ", m->step, ": reserves bytes beyond the staging ring");
      entries_.insert(entries_.end(), m->slots, entry);
    }
  }
}

// ---- moves

MoveGraph::MoveGraph(std::span<const RankPlan> plans, const NodeCase& node, const StepTable& steps)
    : steps_(steps),
      lanes_(3 * index(node.size)),
      phases_(index(node.size)),
      publishers_(index(node.size), std::vector<Id>(steps.size(), none)),
      pollers_(index(node.size), std::vector<std::vector<Id>>(steps.size())),
      acks_(index(node.size)) {
  for (int r = 0; r < node.size; ++r) add_rank(r, plans[index(r)]);
  before_.resize(nodes_.size());
  for (int r = 0; r < node.size; ++r) add_acks(r, plans[index(r)]);
  for (int r = 0; r < node.size; ++r) order_rank(r, plans[index(r)]);
  for (Id id = 0; id < nodes_.size(); ++id) {
    wait_for_steps(id);
    if (nodes_[id].move->slots && nodes_[id].move->reserves) wait_for_acks(id);
  }
  run();
  for (const NeededAck& needed : needed_acks_) check_deferred(needed);
}

std::string MoveGraph::where(Id id) const {
  const PlannedMove& m = *nodes_[id].move;
  const StepNumber step = m.slots ? m.step : m.polls.empty() ? 0 : m.polls[0].step;
  return concat("rank ", nodes_[id].rank, ", step ", step, ": ");
}

void MoveGraph::add_rank(int rank, const RankPlan& plan) {
  std::array<std::size_t, 3> positions{};
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    Phase& phase = phases_[index(rank)].emplace_back();
    for (const PlannedMove& m : plan.phases[p].moves) {
      const Id id = nodes_.size();
      nodes_.push_back({&m, rank, p, positions[m.kind]++});
      phase[m.kind].push_back(id);
      for (std::uint32_t i = 0; i < m.slots; ++i) publishers_[index(rank)][steps_.number(m.step + i)] = id;
    }
  }
}

std::vector<MoveGraph::Id> MoveGraph::moves_of(int rank, std::size_t phase, const RoundCounts& c) const {
  std::vector<Id> moves;
  const std::array<std::size_t, 3> counts{c.contributed, c.reduced, c.read};
  for (std::size_t kind = 0; kind < counts.size(); ++kind)
    if (counts[kind]) moves.push_back(phases_[index(rank)][phase][kind].at(counts[kind] - 1));
  return moves;
}

/// Refuses an acknowledgement of a step that the rank may yet poll.
void MoveGraph::add_acks(int rank, const RankPlan& plan) {
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    for (const PlannedAck& ack : plan.phases[p].acks) {
      const std::array<std::size_t, 3> done{ack.after.contributed, ack.after.reduced, ack.after.read};
      for (const PlannedMove& m : plan.phases[p].moves)
        for (const PlannedPoll& poll : m.polls)
          if (m.round >= done[m.kind] && is_after(ack.before, poll.step))
            refuse_plan("rank ", rank, ", step ", poll.step, ": is acknowledged before rank ", rank,
                        " has read what rank ", poll.peer, " published");
      acks_[index(rank)].push_back({static_cast<std::int32_t>(ack.before - steps_.step(0)),
                                    moves_of(rank, p, ack.after), ack.deferred, p});
    }
}

void MoveGraph::order_rank(int rank, const RankPlan& plan) {
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    for (const auto& lane : phases_[index(rank)][p])
      for (std::size_t i = 0; i < lane.size(); ++i) {
        if (i > 0) wait_for(lane[i], lane[i - 1]);
        for (const Id id : moves_of(rank, p, nodes_[lane[i]].move->after)) wait_for(lane[i], id);
        if (i > 0 || p == 0) continue;
        for (const auto& earlier : phases_[index(rank)][p - 1])
          if (!earlier.empty()) wait_for(lane[i], earlier.back());
      }
}

void MoveGraph::wait_for_steps(Id id) {
  for (const PlannedPoll& poll : nodes_[id].move->polls) {
    const std::size_t number = steps_.number(poll.step);
    if (number >= steps_.size())
      refuse_plan(where(id), "polls step ", poll.step, ", which is never published");
    pollers_[index(poll.peer)][number].push_back(id);
    wait_for(id, publisher(poll.peer, number));
  }
}

/// A slot of a peer in this call implies that it has acknowledged all earlier calls. That peer has then run
/// all moves that the acknowledgement, which is the weaker condition, stands for.
void MoveGraph::wait_for_acks(Id id) {
  const PlannedMove& m = *nodes_[id].move;
  const StepTable::Entry& entry = steps_.at(steps_.number(m.step));
  const StepNumber needed = m.writes_ring ? entry.needed_to_write : entry.needed;
  const std::int64_t before = static_cast<std::int32_t>(needed - steps_.step(0));
  if (before <= 0) return;
  for (std::size_t r = 0; r < acks_.size(); ++r) {
    if (r == index(nodes_[id].rank)) continue;
    const auto ack =
        std::find_if(acks_[r].begin(), acks_[r].end(), [&](const Ack& a) { return a.before >= before; });
    if (ack == acks_[r].end())
      refuse_plan(where(id), "waits for ever: rank ", r, " never acknowledges the steps before ", needed);
    for (const Id after : ack->after) wait_for(id, after);
    needed_acks_.push_back({id, static_cast<int>(r), before});
  }
}

/// A rank that blocks writes its deferred acknowledgement, but one that makes no further call leaves less
/// than 16 steps unacknowledged. No move of its last call may need those, unless the rank waits for the move.
void MoveGraph::check_deferred(const NeededAck& needed) const {
  const Node& node = nodes_[needed.by];
  const auto& acks = acks_[index(needed.rank)];
  const bool is_written = std::any_of(acks.begin(), acks.end(), [&](const Ack& a) {
    return !a.deferred && a.before >= needed.before && a.phase <= node.phase;
  });
  std::int64_t end = 0;  // number of the step after that call
  bool is_awaited = false;
  for (const auto& lane : phases_[index(needed.rank)][node.phase])
    for (const Id own : lane) {
      const PlannedMove& m = *nodes_[own].move;
      if (m.slots) end = std::max(end, static_cast<std::int64_t>(steps_.number(m.step) + m.slots));
      is_awaited |= happens_before(needed.by, own);
    }
  if (!is_written && !is_awaited && needed.before + DeferredAck::period > end + 1)
    refuse_plan(where(needed.by), "waits for ever: rank ", needed.rank,
                " may defer its acknowledgement of step ", steps_.step(index(needed.before) - 1));
}

void MoveGraph::wait_for(Id id, Id before) { before_[id].push_back(before); }

void MoveGraph::run() {
  std::vector<std::vector<Id>> behind(nodes_.size());
  std::vector<std::size_t> pending(nodes_.size());
  clocks_.resize(nodes_.size() * lanes_);
  for (Id id = 0; id < nodes_.size(); ++id) {
    for (const Id before : before_[id]) behind[before].push_back(id);
    if ((pending[id] = before_[id].size()) == 0) order_.push_back(id);
  }
  for (std::size_t next = 0; next < order_.size(); ++next) {
    const Id id = order_[next];
    std::uint32_t* const mine = clocks_.data() + id * lanes_;
    for (const Id before : before_[id])
      if (mine[lane(before)] <= nodes_[before].position)  // else its clock is included
        for (std::size_t i = 0; i < lanes_; ++i) mine[i] = std::max(mine[i], clock(before)[i]);
    mine[lane(id)] = static_cast<std::uint32_t>(nodes_[id].position + 1);
    for (const Id later : behind[id])
      if (--pending[later] == 0) order_.push_back(later);
  }
  for (Id id = 0; id < nodes_.size(); ++id)
    if (pending[id]) refuse_plan(where(id), "waits for ever, for moves that wait for it");
}

}  // namespace rz::intranode
