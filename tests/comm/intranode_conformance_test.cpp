// Runs: ci
// Not under sanitizers: Ranks/Conformance[.].*/[02]$
// Not under the thread sanitizer: Ranks/Conformance[.]

// The engines of a node beside their proved plans. One thread drives all ranks in random order. After every
// turn a rank has published and acknowledged what its plan permits: it reserves and polls what the plan says.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "comm/intranode/engine.h"
#include "tests/proof/move_graph.h"
#include "tests/proof/rank_plans.h"
#include "tests/support/mailbox_rank.h"
#include "tests/support/random_call.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using intranode::CallCase;
using intranode::is_after;
using intranode::NodeCase;
using intranode::PlannedMove;
using intranode::PlannedPhase;
using intranode::RankPlan;
using intranode::RoundCounts;
using intranode::StepNumber;
using test::at;
using test::Rank;

/// Runs the plans of a node: a move runs once its rank has the turn and all that the move waits for has
/// happened.
class PlannedNode {
 public:
  PlannedNode(const std::vector<CallCase>& calls, const NodeCase& node)
      : plans_(intranode::make_rank_plans(calls, node)),
        steps_(plans_, node),
        ranks_(at(node.size), {.published = node.first_step, .acked = node.first_step}) {}

  struct State {
    std::size_t started = 0, phase = 0;   ///< calls and phases
    RoundCounts done;                     ///< of the phase
    StepNumber published = 0, acked = 0;  ///< all steps before these
  };
  const State& operator[](int rank) const { return ranks_[at(rank)]; }
  void start(int rank) { ++ranks_[at(rank)].started; }
  /// All calls that were started.
  bool complete(int rank) const {
    const State& s = ranks_[at(rank)];
    const auto& phases = plans_[at(rank)].phases;
    return s.phase == phases.size() || phases[s.phase].call >= s.started;
  }
  /// Runs all moves of the rank that need no other rank.
  void turn(int rank) {
    while (!complete(rank) && run_move(rank)) continue;
  }

 private:
  static std::array<std::size_t, 3> by_kind(const RoundCounts& c) {
    return {c.contributed, c.reduced, c.read};
  }
  static bool covers(const RoundCounts& done, const RoundCounts& needed) {
    return done.contributed >= needed.contributed && done.reduced >= needed.reduced &&
           done.read >= needed.read;
  }
  bool run_move(int rank) {
    State& s = ranks_[at(rank)];
    const PlannedPhase& phase = plans_[at(rank)].phases[s.phase];
    const auto m = std::find_if(phase.moves.begin(), phase.moves.end(),
                                [&](const PlannedMove& move) { return is_possible(rank, move); });
    if (m == phase.moves.end()) return false;
    ++(m->kind == PlannedMove::contribute ? s.done.contributed
       : m->kind == PlannedMove::reduce   ? s.done.reduced
                                          : s.done.read);
    if (m->slots) s.published = m->step + m->slots;
    for (const intranode::PlannedAck& ack : phase.acks)
      if (covers(s.done, ack.after) && is_after(ack.before, s.acked)) s.acked = ack.before;
    const auto done = by_kind(s.done);
    if (done[0] + done[1] + done[2] == phase.moves.size()) ++s.phase, s.done = {};
    return true;
  }
  bool is_possible(int rank, const PlannedMove& m) const {
    const State& s = ranks_[at(rank)];
    return by_kind(s.done)[m.kind] == m.round && covers(s.done, m.after) &&
           std::all_of(
               m.polls.begin(), m.polls.end(),
               [&](const auto& poll) { return is_after(ranks_[at(poll.peer)].published, poll.step); }) &&
           (m.slots == 0 || !m.reserves || is_granted(rank, m));
  }
  bool is_granted(int rank, const PlannedMove& m) const {
    const auto& entry = steps_.at(steps_.number(m.step));
    const StepNumber needed = m.writes_ring ? entry.needed_to_write : entry.needed;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (r != at(rank) && is_after(needed, ranks_[r].acked)) return false;
    return true;
  }

  const std::vector<RankPlan> plans_;
  const intranode::StepTable steps_;
  std::vector<State> ranks_;
};

CallCase case_of(const intranode::Engine& engine, const test::Call& c, int size) {
  const tuning::IntranodeAlgorithm& entry = engine.table().find(c.kind, message_bytes(c.kind, c.count, size));
  const bool exchanges = entry.try_zero_copy || entry.single_copy != tuning::SingleCopyPolicy::never;
  CallCase plan{
      .kind = c.kind,
      .bytes = c.kind == Collective::all_to_all_v ? 0 : c.count,
      .root = c.root,
      .access = exchanges ? intranode::MemoryAccess::staged_after_exchange : intranode::MemoryAccess::staged,
      .algorithm = entry};
  return plan;
}

NodeCase node_of(Rank& me, StepNumber first) {
  return {.size = me.size,
          .ring_bytes = me.transport->shared_memory()->mailboxes()[0].staging_bytes,
          .oversubscribed = me.transport->oversubscribed(),
          .first_step = first};
}

/// The ranks of a node, each in its call.
class DrivenNode {
 public:
  DrivenNode(std::vector<Rank*> ranks, std::vector<test::Call> calls, StepNumber first)
      : ranks_(std::move(ranks)),
        calls_(std::move(calls)),
        plan_(cases(), node_of(*ranks_[0], first)),
        made_(ranks_.size()),
        buffers_(ranks_.size()),
        ops_(ranks_.size()) {}

  /// Gives turns to random ranks until all calls have ended. In each span of turns one rank has none.
  void run(std::uint32_t seed, int span) {
    std::minstd_rand random(seed);
    const auto draw = [&](std::size_t n) { return static_cast<int>(random() / 16 % n); };
    int late = -1;
    for (int turns = 0; !complete() && !testing::Test::HasFailure(); ++turns) {
      if (turns % span == 0) late = draw(ranks_.size() + 1);
      if (const int rank = draw(ranks_.size()); rank != late) turn(rank);
      ASSERT_LT(turns, 1'000'000);
    }
  }

 private:
  std::vector<CallCase> cases() const {
    std::vector<CallCase> all;
    for (const test::Call& c : calls_) {
      all.push_back(case_of(*ranks_[0]->engine, c, ranks_[0]->size));
      if (c.kind != Collective::all_to_all_v) continue;
      for (Rank* rank : ranks_) all.back().counts.push_back(test::Buffers<std::uint8_t>(*rank, c).pairs());
    }
    return all;
  }
  bool complete() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](Rank* rank) {
      return made_[at(rank->rank)] == calls_.size() && rank->engine->complete();
    });
  }
  void turn(int r) {
    Rank& rank = *ranks_[at(r)];
    auto& buffers = buffers_[at(r)];
    if (!buffers && made_[at(r)] == calls_.size()) return;
    if (!buffers) {
      buffers.emplace(rank, calls_[made_[at(r)]++]);
      ops_[at(r)] = buffers->operation();
      plan_.start(r);
      rank.start(ops_[at(r)]);
    }
    rank.engine->spin(1);
    rank.engine->check_peer_alive();  // writes an acknowledgement that was deferred
    plan_.turn(r);
    compare(rank);
    if (rank.engine->complete()) buffers->check(), buffers.reset();
  }
  void compare(const Rank& rank) const {
    const test::Call& call = calls_[made_[at(rank.rank)] - 1];
    const Mailbox& own = *rank.transport->shared_memory()->mailboxes()[at(rank.rank)].mailbox;
    SCOPED_TRACE(testing::Message() << "call " << made_[at(rank.rank)] << ", " << name(call.kind) << " of "
                                    << call.count << " bytes, rank " << rank.rank << " of " << rank.size);
    EXPECT_EQ(own.produced.load(), plan_[rank.rank].published);
    EXPECT_EQ(own.acked.load(), plan_[rank.rank].acked);
    EXPECT_EQ(rank.engine->complete(), plan_.complete(rank.rank));
  }

  const std::vector<Rank*> ranks_;
  const std::vector<test::Call> calls_;
  PlannedNode plan_;
  std::vector<std::size_t> made_;  // calls, by rank
  std::vector<std::optional<test::Buffers<std::uint8_t>>> buffers_;
  std::vector<CollectiveCall> ops_;
};

/// Runs the calls on engines with that table, in several orders of turns.
void expect_as_planned(int size, const tuning::IntranodeTable& table, const std::vector<test::Call>& calls,
                       int span = 40) {
  for (std::uint32_t seed = 1; seed < 3; ++seed) {
    std::vector<Rank*> ranks(at(size));
    test::run_ranks(size, [&](int r, std::shared_ptr<Store> store) {
      Rank me(r, size, *store, test::before_wrap);
      me.engine.emplace(*me.transport, r, size, table, test::before_wrap);
      ranks[at(r)] = &me;
      test::sync_all(*me.transport, r, size);
      if (r > 0) return test::wait_event(*store, "all calls have ended");
      DrivenNode(ranks, calls, test::before_wrap).run(seed, span);
      test::signal_event(*store, "all calls have ended");
    });
  }
}

/// Every collective of these sizes, in random order, each call `repeats` times in a row.
std::vector<test::Call> random_calls(const std::vector<std::size_t>& sizes, int size, int repeats) {
  std::vector<test::Call> calls;
  for (const std::size_t bytes : sizes)
    for (const Collective kind : test::kinds)
      calls.push_back({kind, kind == Collective::barrier ? 0 : bytes, size / 2});
  std::shuffle(calls.begin(), calls.end(), std::minstd_rand(static_cast<unsigned>(size)));
  std::vector<test::Call> all;
  for (const test::Call& c : calls) all.insert(all.end(), at(repeats), c);
  return all;
}

class Conformance : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Conformance, testing::Values(2, 3, 5));

// A call that may exchange handles does so when it is made for the first time.
TEST_P(Conformance, CallsOfTheBuiltInTable) {
  expect_as_planned(GetParam(), tuning::IntranodeTable(GetParam()),
                    random_calls({8, 100, 1000, 150'000, 400'000}, GetParam(), 1));
}

/// A table without exchanges of handles: `all_reduce` by that algorithm, and chunks of that size.
tuning::IntranodeTable staged_table(int size, const char* all_reduce, const char* chunk) {
  std::string text;
  for (const Collective kind : test::kinds) {
    if (kind == Collective::barrier || kind == Collective::all_to_all_v) continue;
    const bool reduces_all = kind == Collective::all_reduce;
    text += concat(name(kind), " intra_node bytes<=1K ", reduces_all ? "one_shot" : "staged", "\n");
    text += concat(name(kind), " intra_node ", reduces_all ? all_reduce : "staged", " chunk=", chunk, "\n");
    for (const char* scope : {"intra_node_registered", "intra_node_cma"})
      text += concat(name(kind), " ", scope, " staged\n");
  }
  return {size, tuning::parse_tuning(text, "test").rules, "test", {}, true};
}

// Repeated calls take the fast path.
TEST_P(Conformance, ChunkedAndRepeatedCalls) {
  for (const char* all_reduce : {"one_shot", "two_shot"})
    expect_as_planned(GetParam(), staged_table(GetParam(), all_reduce, "4K"),
                      random_calls({0, 8, 100, 700, 3000, 60'000}, GetParam(), 3));
}

// A rank waits for acknowledgements of bytes in the staging ring.
TEST_P(Conformance, LargestChunks) {
  std::vector<test::Call> calls;
  for (int i = 0; i < 2; ++i)
    for (const test::Call& call : {test::Call{Collective::all_reduce, 1'900'000},
                                   {Collective::all_gather, 500'000},
                                   {Collective::broadcast, 900'000},
                                   {Collective::all_to_all, 300'000}})
      calls.push_back(call);
  expect_as_planned(GetParam(), staged_table(GetParam(), "two_shot", "1M"), calls);
}

// A sender of rooted calls waits for acknowledgements of slots: a reader has no turn for more than 256 calls.
TEST_P(Conformance, SendersThatRunAhead) {
  std::vector<test::Call> calls;
  for (const std::size_t bytes : {8, 3000})
    for (const Collective kind : {Collective::broadcast, Collective::gather, Collective::scatter})
      calls.insert(calls.end(), 600, {kind, bytes, GetParam() / 2});
  expect_as_planned(GetParam(), staged_table(GetParam(), "one_shot", "4K"), calls, 400 * GetParam());
}

// A reader has acknowledged none of 255 or 256 slots when a call begins that reserves two slots, or one for a
// handle.
TEST_P(Conformance, CallsBehindASenderThatRanAhead) {
  std::vector<test::Call> calls;
  for (std::size_t i = 0; i < 6; ++i)
    for (const std::size_t bytes : {std::size_t{100}, 150'000 + 1000 * i}) {
      calls.insert(calls.end(), bytes == 100 ? 255 : 256, {Collective::broadcast, 8, GetParam() / 2});
      calls.push_back({Collective::all_gather, bytes});
    }
  expect_as_planned(GetParam(), tuning::IntranodeTable(GetParam()), calls, 1000 * GetParam());
}

}  // namespace
}  // namespace rz
