// Runs: ci computes
// Not under sanitizers: Ranks/Groups[.].*/[0245]$
// Not under the thread sanitizer: AtEveryEdge SeveralChunks MoreChunksThanSlots LargeResults
// Not under the thread sanitizer: ASenderRunsAheadByTheFifoDepth NoDeadlockInAnyOrderOfProgress
// Not under the thread sanitizer: RandomSequencesOfCalls/[5-8] InSharedMemory/[5-8] EveryCountOfSlots/[5-8]

// Collectives among ranks of one node, driven call by call: steps that wrap around, ranks ahead of others,
// sizes at the boundaries of slots and chunks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/intranode/engine.h"
#include "comm/schedule/chunk_layout.h"
#include "comm/topology.h"
#include "comm/transport/shm_layout.h"
#include "tests/support/mailbox_rank.h"
#include "tests/support/random_call.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using test::at;
using test::before_wrap;
using test::Buffers;
using test::Call;
using test::enough_spins;
using test::fifo_depth;
using test::has_form_in_place;
using test::is_split;
using test::kinds;
using test::make_and_check;
using test::Memory;
using test::Rank;
using test::run;
using test::run_ranks;
using test::signal_event;
using test::wait_event;

// Slots without staged bytes, calls in registered memory between them, and staging rings that wrap: all ranks
// must compute the same offsets.
TEST(Intranode, ZeroCopyCallsKeepTheStagingRingConsistent) {
  run(4, before_wrap, [](Rank& me, Store&) {
    for (std::uint32_t i = 0; i < 12; ++i) {
      const std::size_t n = 5000 + 9000 * (i % 4);
      make_and_check<float>(me, {Collective::all_reduce, n, 0, ReduceOp::sum, false, Memory::shared, i + 1});
      make_and_check<float>(
          me, {Collective::all_gather, n + i, 0, ReduceOp::sum, false, Memory::ordinary, i + 50});
    }
  });
}

// ---- every collective at every boundary

class Groups : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Groups, testing::Values(2, 3, 4, 5, 6, 7, 8));

// Bytes of a shard: one slot, several slots, the thresholds of handle exchange, one chunk; and the same
// divided by the number of peers that share a slot or chunk.
template <class T>
std::vector<std::size_t> edges(Collective kind, int size) {
  std::vector<std::size_t> out{0, 1};
  const std::size_t parts = is_split(kind) ? at(size) - 1 : 1;
  for (const std::size_t bytes :
       {inline_bytes, intranode::max_inline_slots * inline_bytes, std::size_t{4 << 10}, std::size_t{16 << 10},
        std::size_t{32 << 10}, std::size_t{64 << 10}})
    for (const std::size_t count : {bytes / parts / sizeof(T)})
      for (const std::size_t n : {count - (count > 0), count, count + 1})
        if (n != out.back()) out.push_back(n);
  return out;
}

template <class T>
void check_edges(Rank& me) {
  std::uint32_t seed = 0;
  for (const Collective kind : kinds)
    for (const std::size_t n : edges<T>(kind, me.size))
      for (const Memory memory : {Memory::ordinary, Memory::shared, Memory::mixed})
        for (const bool in_place : {false, true}) {
          if (in_place && !has_form_in_place(kind)) continue;
          ++seed;
          constexpr ReduceOp::Kind ops[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max};
          make_and_check<T>(
              me, {kind, n, static_cast<int>(seed) % me.size, ops[seed % 3], in_place, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
}

TEST_P(Groups, BytesAtEveryEdge) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) { check_edges<std::uint8_t>(me); });
}

TEST_P(Groups, FloatsAtEveryEdge) {
  run(GetParam(), 0, [](Rank& me, Store&) { check_edges<float>(me); });
}

TEST_P(Groups, SeveralChunks) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) {
    std::uint32_t seed = 100;
    for (const Collective kind : kinds)
      for (const std::size_t n : {20000u, 65537u, 100003u})
        for (const Memory memory : {Memory::ordinary, Memory::shared, Memory::only_input_shared}) {
          ++seed;
          make_and_check<float>(me, {kind, is_split(kind) ? n / at(me.size) : n,
                                     static_cast<int>(seed) % me.size, ReduceOp::sum, false, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
  });
}

// More chunks than slots: a rank that only reads must not send slots so far ahead that it loses the staging
// offsets of unread chunks.
TEST(Intranode, MoreChunksThanSlots) {
  constexpr Collective kinds[] = {Collective::broadcast, Collective::reduce, Collective::all_gather};
  constexpr std::size_t chunk = 4 << 10;
  std::vector<tuning::Rule> cut;
  for (const Collective kind : kinds)
    cut.push_back(
        {.collective = kind, .scope = tuning::Scope::intra_node, .algorithm = "staged", .chunk = chunk});
  run(4, 0, [&](Rank& me, Store&) {
    me.engine.emplace(*me.transport, me.rank, me.size, tuning::IntranodeTable(me.size, cut, "", {}, true));
    std::uint32_t seed = 800;
    for (int i = 0; i < 4; ++i)
      for (const Collective kind : kinds)
        make_and_check<std::uint64_t>(me, {kind, 2 * mailbox_depth * chunk / sizeof(std::uint64_t) + 3, i % 4,
                                           ReduceOp::sum, false, Memory::ordinary, ++seed});
  });
}

// Every number of bytes that fits into one slot or several, and a few more. Each call runs twice, since the
// second takes the fast path. Sequences of several slots begin at every step around the wrap.
template <class T>
void check_slots(Rank& me) {
  std::uint32_t seed = 5000;
  for (const Collective kind : kinds)
    for (std::size_t n = 0; n <= intranode::max_inline_slots * inline_bytes / sizeof(T) + 2; ++n)
      for (const bool in_place : {false, true})
        for (int again = 0; again < 2; ++again) {
          if (in_place && !has_form_in_place(kind)) continue;
          ++seed;
          const auto op = seed % 5 < 3 ? ReduceOp::sum : ReduceOp::max;
          make_and_check<T>(me,
                            {kind, n, static_cast<int>(n) % me.size, op, in_place, Memory::ordinary, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
}

TEST_P(Groups, EveryCountOfSlots) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) { check_slots<std::uint8_t>(me); });
  run(GetParam(), before_wrap + 1, [](Rank& me, Store&) { check_slots<std::int32_t>(me); });
  run(GetParam(), before_wrap - 200, [](Rank& me, Store&) { check_slots<float>(me); });
  run(GetParam(), before_wrap - 1, [](Rank& me, Store&) { check_slots<double>(me); });
}

// A call of several slots across the wrap itself, with each of them as the first one behind it.
TEST(Intranode, SeveralSlotsAcrossTheWrap) {
  for (std::uint32_t before = 0; before < 4; ++before)
    run(3, 0u - before, [](Rank& me, Store&) {
      for (std::uint32_t i = 0; i < 4; ++i) {
        make_and_check<float>(
            me, {Collective::all_reduce, 20, 0, ReduceOp::sum, i % 2 == 1, Memory::ordinary, i + 1});
        make_and_check<float>(me,
                              {Collective::all_gather, 28, 0, ReduceOp::sum, false, Memory::ordinary, i + 9});
      }
    });
}

// So many bytes that results use non-temporal stores, in every protocol.
TEST(Intranode, LargeResultsUseNontemporalStores) {
  run(2, 0, [](Rank& me, Store&) {
    constexpr std::size_t n = (25 << 20) / sizeof(std::uint64_t) + 5;
    std::uint32_t seed = 900;
    for (const Collective kind :
         {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::broadcast})
      for (const Memory memory : {Memory::ordinary, Memory::shared})
        make_and_check<std::uint64_t>(me, {kind, kind == Collective::reduce_scatter ? n / 2 : n, 1,
                                           ReduceOp::sum, false, memory, ++seed});
    make_and_check<std::uint64_t>(
        me, {Collective::all_reduce, n, 0, ReduceOp::sum, true, Memory::shared, ++seed});
  });
}

// With so many ranks and so few bytes the last ranks' shards are empty, in either protocol.
TEST(Intranode, LastRanksMayHaveAnEmptyShard) {
  run(48, 0, [](Rank& me, Store&) {
    make_and_check<float>(me, {Collective::all_reduce, 8193, 0, ReduceOp::sum, false, Memory::ordinary});
    make_and_check<float>(me, {Collective::all_reduce, 8193, 0, ReduceOp::sum, true, Memory::shared});
    make_and_check<float>(me, {Collective::all_reduce, 4096, 0, ReduceOp::sum, false, Memory::shared});
  });
}

// ---- any sequence

TEST_P(Groups, RandomSequencesOfCalls) {
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    run(GetParam(), 0u - 100 * seed, [&](Rank& me, Store&) {
      std::mt19937 common(seed), own(seed * 100 + static_cast<std::uint32_t>(me.rank));
      for (std::uint32_t i = 0; i < 400; ++i) {
        const auto draw = [&](std::size_t n) { return std::size_t{common()} % n; };
        Call c{kinds[draw(std::size(kinds))], draw(draw(8) ? 60 : 30000)};
        c.root = static_cast<int>(draw(at(me.size)));
        c.in_place = draw(2) && has_form_in_place(c.kind);
        c.memory = static_cast<Memory>(draw(4));
        c.seed = seed * 1000 + i;
        if (own() % 16 == 0)  // some are late at times
          for (unsigned k = own() % 64; k > 0; --k) std::this_thread::yield();
        make_and_check<float>(me, c);
        if (testing::Test::HasFatalFailure()) return;
      }
    });
  }
}

// ---- ranks that run ahead

// `calls` calls that wait for no rank, made by rank `first` before the other rank begins.
void run_ahead(Collective kind, int first, std::size_t bytes, unsigned calls) {
  SCOPED_TRACE(testing::Message() << name(kind) << " of " << bytes << " bytes");
  run(2, before_wrap, [&](Rank& me, Store& store) {
    // The larger calls exchange handles at calls 1, 3, 7, 15 and 31; then none does for a while.
    for (unsigned i = 0; i < 31; ++i)
      make_and_check<std::uint8_t>(me, {.kind = kind, .count = bytes, .seed = i});
    make_and_check<std::uint8_t>(me, {Collective::barrier, 0});  // now all ranks have acknowledged
    test::sync_all(*me.transport, me.rank, me.size);
    if (me.rank != first) wait_event(store, "ran ahead");
    for (unsigned i = 0; i < calls + 30; ++i) {
      const Buffers<std::uint8_t> buffers(me, {.kind = kind, .count = bytes, .seed = 31u + i});
      const CollectiveCall op = buffers.operation();
      me.start(op);
      if (me.rank == first && i <= calls) {
        EXPECT_EQ(me.engine->spin(enough_spins), i < calls) << "call " << i;
        if (i == calls) signal_event(store, "ran ahead");
      }
      me.finish();
      buffers.check();
    }
  });
}

// Calls like the previous one take the fast path: with other memory and other values each time, ranks that
// come late in turn, and staging rings that wrap.
TEST_P(Groups, RepeatedCalls) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) {
    std::uint32_t seed = 0;
    int calls = 0;
    for (const Collective kind : kinds)
      for (const std::size_t n : {0, 1, 7, 15, 28, 300, 2500})
        for (int i = 0; i < 12; ++i, ++calls) {
          if (++seed % static_cast<std::uint32_t>(me.size) == static_cast<std::uint32_t>(me.rank))
            std::this_thread::yield();
          const bool in_place = i % 2 && has_form_in_place(kind);
          make_and_check<float>(me, {kind, n, 0, ReduceOp::avg, in_place, Memory::ordinary, seed});
        }
    EXPECT_GT(me.repeated, calls / 2);
  });
}

// The same in registered memory: it stays where it was, or moves on one rank alone, or one rank uses other
// memory for a while.
TEST_P(Groups, RepeatedCallsInSharedMemory) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) {
    std::uint32_t seed = 0;
    int calls = 0;
    for (const Collective kind : kinds)
      for (const std::size_t n : {600, 5001, 16000})
        for (int i = 0; i < 24; ++i, ++calls) {
          me.turns = i % 3 ? enough_spins : 0;
          const int late = static_cast<int>(++seed % static_cast<std::uint32_t>(me.size));
          if (late == me.rank) std::this_thread::yield();
          const auto elsewhere = i % 4 == 3 && late == me.rank ? me.transport->allocate(1000) : nullptr;
          const bool in_place = i / 4 % 2 && has_form_in_place(kind);
          const Memory memory = i % 12 == 10 ? Memory::mixed : Memory::shared;
          make_and_check<float>(me, {kind, n, i / 8 % me.size, ReduceOp::sum, in_place, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
    EXPECT_GT(me.repeated, calls / 2);
  });
}

TEST(Intranode, ASenderRunsAheadByTheFifoDepth) {
  // 256 slots, and the staging ring, of which an oversubscribed rank uses 256 KiB. That many calls of these
  // sizes fit.
  const bool oversubscribed = usable_processors() < 2;
  const std::size_t room = oversubscribed ? 256 << 10 : staging_ring_bytes(caches(), 2);
  const unsigned many = oversubscribed ? 5 : 21, few = oversubscribed ? 2 : 8;
  const auto fits = [&](unsigned calls) { return room / calls / 4096 * 4096; };
  run_ahead(Collective::broadcast, 0, 56, 256);
  run_ahead(Collective::broadcast, 0, 57, 256);
  run_ahead(Collective::broadcast, 0, fits(many), many);
  run_ahead(Collective::broadcast, 0, fits(few), few);
  run_ahead(Collective::scatter, 0, 28, 256);
  run_ahead(Collective::scatter, 0, fits(many), many);
  run_ahead(Collective::gather, 1, 56, 256);
  run_ahead(Collective::gather, 1, fits(few), few);
  run_ahead(Collective::reduce, 1, 56, 256);
}
TEST(Intranode, ASlowRankFindsTheSlotsOfReceivers) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    const Buffers<std::uint8_t> gathered(me, {.kind = Collective::all_gather, .count = 8});
    const CollectiveCall op = gathered.operation();
    if (me.rank != 2) wait_event(store, "offered");
    me.start(op);
    if (me.rank == 2) {
      me.engine->advance();
      EXPECT_FALSE(me.engine->complete());
      signal_event(store, "offered");
      wait_event(store, "far ahead");
    }
    me.finish();
    gathered.check();
    for (int i = 0; i < fifo_depth + 40; ++i) {
      const Buffers<std::uint8_t> b(
          me, {.kind = Collective::broadcast, .count = 8, .seed = 2u + static_cast<unsigned>(i)});
      const CollectiveCall broadcast = b.operation();
      me.start(broadcast);
      if (me.rank == 1 && i == fifo_depth - 1) {
        EXPECT_FALSE(me.engine->spin(enough_spins));
        signal_event(store, "far ahead");
      }
      me.finish();
      b.check();
    }
  });
}

// ---- any order of the ranks' turns

// One thread advances all ranks, a few moves at a time, in random order; a rank that has ended a call begins
// its next. A state in which no rank can move is detected at once, not by a deadline.
void progress_in_random_order(const std::vector<Rank*>& ranks,
                              const std::vector<std::vector<CollectiveCall>>& calls, std::uint32_t seed) {
  std::mt19937 lot(seed);
  std::vector<std::size_t> begun(ranks.size());
  std::vector<std::size_t> order(ranks.size());
  for (std::size_t r = 0; r < order.size(); ++r) order[r] = r;
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(order.begin(), order.end(), lot);
    for (const std::size_t r : order)
      for (unsigned moves = lot() % 6; moves > 0; --moves) {
        intranode::Engine& engine = *ranks[r]->engine;
        if (engine.complete() && begun[r] < calls[r].size()) ranks[r]->start(calls[r][begun[r]++]);
        engine.advance();
      }
    for (std::size_t r = 0; r < ranks.size(); ++r)  // a rank that was not drawn may still move
      moved |= ranks[r]->engine->advance() || (ranks[r]->engine->complete() && begun[r] < calls[r].size());
  }
  for (std::size_t r = 0; r < ranks.size(); ++r)
    ASSERT_TRUE(ranks[r]->engine->complete() && begun[r] == calls[r].size())
        << "rank " << r << " waits in its call " << begun[r] << " for "
        << ranks[r]->engine->waiting_on().text;
}

// In two-shot calls each rank has two contributions and two results in its ring before any is read; the table
// may request chunks of any size.
TEST(Intranode, NoDeadlockInAnyOrderOfProgress) {
  for (const int size : {2, 3, 5, 8})
    for (const std::size_t chunk : {std::size_t{0}, std::size_t{20} << 10, std::size_t{1} << 30}) {
      std::vector<Rank*> ranks(at(size));
      std::vector<std::vector<CollectiveCall>> calls(at(size));
      run(size, 0, [&](Rank& me, Store& store) {
        const tuning::Rule two_shot{.collective = Collective::all_reduce,
                                    .scope = tuning::Scope::intra_node,
                                    .algorithm = "two_shot",
                                    .chunk = chunk};
        me.engine.emplace(*me.transport, me.rank, size,
                          tuning::IntranodeTable(size, {two_shot}, "", {}, true));
        std::vector<std::unique_ptr<Buffers<float>>> buffers;
        for (std::uint32_t i = 0; i < 6; ++i) {
          const Collective kind = i % 3 == 2 ? Collective::reduce_scatter : Collective::all_reduce;
          const std::size_t count = kind == Collective::all_reduce ? 150'001 - 9'973 * i : 40'000 / at(size);
          buffers.push_back(
              std::make_unique<Buffers<float>>(me, Call{.kind = kind, .count = count, .seed = i + 1}));
          calls[at(me.rank)].push_back(buffers.back()->operation());
        }
        ranks[at(me.rank)] = &me;
        signal_event(store, concat("ready ", me.rank));
        if (me.rank != 0) {
          wait_event(store, "over");
        } else {
          for (int r = 1; r < size; ++r) wait_event(store, concat("ready ", r));
          progress_in_random_order(
              ranks, calls, static_cast<std::uint32_t>(size) * 100 + static_cast<std::uint32_t>(chunk % 97));
          signal_event(store, "over");
        }
        for (const auto& b : buffers) b->check();
      });
    }
}

// A rank that computes keeps its core for milliseconds: a rank that yields to it must not be limited by its
// number of turns.
TEST(Intranode, AnOversubscribedRankStopsSpinningByTime) {
  const int size = usable_processors() + 1;
  if (size > 33) GTEST_SKIP() << "so many processors that it would take " << size << " ranks to crowd them";
  run(size, before_wrap, [](Rank& me, Store& store) {
    const CollectiveCall barrier{.kind = Collective::barrier};
    ASSERT_TRUE(me.transport->oversubscribed());
    if (me.rank != 0) wait_event(store, "gave up");
    me.start(barrier);
    if (me.rank == 0) {
      EXPECT_FALSE(me.engine->spin(std::numeric_limits<int>::max()));  // so many turns take minutes
      signal_event(store, "gave up");
    }
    me.finish();
  });
}

TEST(Intranode, AZeroCopyCallCompletesWhenPeersHaveWrittenTheirShards) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    const Buffers<float> buffers(me,
                                 {.kind = Collective::all_reduce, .count = 5000, .memory = Memory::shared});
    const CollectiveCall op = buffers.operation();
    me.start(op);
    me.engine->advance();  // publishes its buffer handles
    signal_event(store, concat("event ", me.rank));
    wait_event(store, concat("event ", 1 - me.rank));
    if (me.rank == 0) {
      EXPECT_FALSE(me.engine->spin(enough_spins));
      signal_event(store, "tried");
    } else {
      wait_event(store, "tried");
    }
    me.finish();
    buffers.check();
  });
}

// So that the progress engine checks failures and deadlines in between.
TEST(Intranode, ALargeZeroCopyCallMovesInBoundedChunks) {
  run(2, 0, [](Rank& me, Store& store) {
    constexpr std::size_t n =
        3 * intranode::Engine::max_spin_bytes / sizeof(float);  // half of it is more than one spin moves
    const auto in = me.transport->allocate(n * sizeof(float)),
               out = me.transport->allocate(n * sizeof(float));
    auto* const x = reinterpret_cast<float*>(in.get());
    const auto* const sums = reinterpret_cast<const float*>(out.get());
    std::fill_n(x, n, 1.0f);
    CollectiveCall op{.kind = Collective::all_reduce};
    op.in = {x, n}, op.out = {out.get(), n, DType::f32};
    me.start(op);
    if (me.rank == 1) {
      while (me.engine->advance()) {
      }  // its slot
      test::signal_event(store, "first_call");
      test::wait_event(store, "looked");
    } else {
      test::wait_event(store, "first_call");
      EXPECT_FALSE(me.engine->spin(enough_spins));
      EXPECT_TRUE(me.engine->busy());
      EXPECT_EQ(sums[0], 2.0f);
      EXPECT_EQ(sums[n / 2 - 1], 0.0f) << "the end of its half";
      test::signal_event(store, "looked");
    }
    me.finish();
    EXPECT_FALSE(me.engine->busy());
    EXPECT_EQ(sums[n / 2 - 1] + sums[n - 1], 4.0f);
  });
}

}  // namespace
}  // namespace rz
