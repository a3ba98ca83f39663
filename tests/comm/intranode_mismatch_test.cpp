// Detection of different calls on ranks of one node, and of a rank that does not call.

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/mailbox_rank.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using test::before_wrap;
using test::enough_spins;
using test::error_of;
using test::fifo_depth;
using test::Rank;
using test::run;
using test::run_ranks;
using test::signal_event;
using test::wait_event;

// ---- ranks that differ

void expect_mismatch(const Error& e, const std::string& part) {
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
}

// The root's call is complete at once: it waits for no rank.
void broadcast_from(Rank& me, int root, std::size_t count = 1) {
  std::uint64_t x[14] = {};
  const CollectiveCall op{.kind = Collective::broadcast, .in = {x, count}, .out = {x, count}, .root = root};
  me.call(op);
}
void barrier(Rank& me) {
  const CollectiveCall op{.kind = Collective::barrier};
  me.call(op);
}

TEST(IntranodeMismatch, DifferentRootsAreDetectedByTheNextCall) {
  for (const int times : {1, fifo_depth - 1, fifo_depth, fifo_depth + 36})
    run(2, before_wrap, [&](Rank& me, Store&) {
      for (int i = 0; i < times; ++i) broadcast_from(me, me.rank);
      const Error e = error_of([&] { barrier(me); });
      expect_mismatch(e, concat("rank ", 1 - me.rank, " called broadcast #"));
      expect_mismatch(e, concat("root ", me.rank));
    });
}

// The rank whose call uses fewer slots polls a later slot of the other rank.
TEST(IntranodeMismatch, AMismatchIsNamedByTheFirstOfSeveralSlots) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 9; ++i) broadcast_from(me, 0, 14), barrier(me);
    if (me.rank == 0) {
      float x[18] = {}, y[18];
      const CollectiveCall op{.kind = Collective::all_reduce, .in = {x, 18}, .out = {y, 18}};
      me.start(op);
      me.engine->advance();
      signal_event(store, "two slots");
      return wait_event(store, "seen");
    }
    wait_event(store, "two slots");
    broadcast_from(me, 1);
    const Error e = error_of([&] { barrier(me); });
    signal_event(store, "seen");
    expect_mismatch(e, "rank 0 called all_reduce #18 (18 f32");
    expect_mismatch(e, "rank 1 called broadcast #18 (1 u64");
  });
}

// The reverse: a rank that collects several slots finds slots of another call.
TEST(IntranodeMismatch, AReaderOfSeveralSlotsDetectsOtherCalls) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 9; ++i) broadcast_from(me, 0, 14), barrier(me);
    if (me.rank == 0) {
      broadcast_from(me, 0), broadcast_from(me, 0);
      signal_event(store, "two calls");
      return wait_event(store, "seen");
    }
    wait_event(store, "two calls");
    float x[18] = {}, y[18];
    const CollectiveCall op{.kind = Collective::all_reduce, .in = {x, 18}, .out = {y, 18}};
    const Error e = error_of([&] { me.call(op); });
    signal_event(store, "seen");
    expect_mismatch(e, "rank 0 called broadcast #18 (1 u64");
    expect_mismatch(e, "rank 1 called all_reduce #18 (18 f32");
  });
}

TEST(IntranodeMismatch, AMismatchIsDetectedAfterItsSlotsWereReused) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    broadcast_from(me, me.rank);
    signal_event(store, concat("made ", me.rank));
    wait_event(store, concat("made ", 1 - me.rank));
    if (me.rank == 0) {
      for (int i = 0; i < fifo_depth; ++i) broadcast_from(me, 0);
      signal_event(store, "gone");
      return;
    }
    wait_event(store, "gone");
    expect_mismatch(error_of([&] { broadcast_from(me, 0); }), "some time before broadcast #1");
  });
}

TEST(IntranodeMismatch, DifferentCallsAndCountsAreNamed) {
  const auto differ = [](const char* what, const auto& make) {
    run(3, 0, [&](Rank& me, Store&) {
      std::vector<float> x(30000), y(30000);
      const CollectiveCall op = make(me, x.data(), y.data());
      const Error e = error_of([&] { me.call(op); });
      expect_mismatch(e, what);
    });
  };
  differ("all_reduce #0 (7 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 7 : 9;
    return CollectiveCall{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (20000 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 20000 : 9;
    return CollectiveCall{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (17 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 17 : 9;
    return CollectiveCall{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (17 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 17 : 20;
    return CollectiveCall{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("avg", [](Rank& me, float* x, float* y) {
    return CollectiveCall{.kind = Collective::all_reduce,
                          .in = {x, 3},
                          .out = {y, 3},
                          .op = me.rank == 2 ? ReduceOp::avg : ReduceOp::sum};
  });
  differ("barrier", [](Rank& me, float* x, float* y) {
    if (me.rank == 2) return CollectiveCall{.kind = Collective::barrier};
    return CollectiveCall{.kind = Collective::all_reduce, .in = {x, 3}, .out = {y, 3}};
  });
}

TEST(IntranodeMismatch, CountsOfAPairThatDifferAreNamed) {
  run(2, 0, [](Rank& me, Store&) {
    float x[4] = {}, y[8] = {};
    CollectiveCall op{.kind = Collective::all_to_all_v, .in = {x, 4}, .out = {y, 8}};
    const AllToAllVCounts counts{.send_counts = {2, 2},
                                 .send_offsets = {0, 2},
                                 .recv_counts = {me.rank == 1 ? 3u : 2u, 2},
                                 .recv_offsets = {0, 4}};
    op.counts = &counts;
    me.start(op);
    if (me.rank == 0) {
      EXPECT_FALSE(me.engine->spin(enough_spins));
    } else {
      expect_mismatch(error_of([&] { me.finish(); }), "(3 f32");
    }
  });
}

// ---- ranks waited for

TEST(IntranodeMismatch, NamesTheRankThatHasNotSent) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 3; ++i) {
      if (me.rank == 2 && i == 1) wait_event(store, "named");
      broadcast_from(me, 0);
    }
    const CollectiveCall op{.kind = Collective::barrier};
    if (me.rank == 1) signal_event(store, "three"), wait_event(store, "named");
    me.start(op);
    if (me.rank == 0) {
      wait_event(store, "three");
      EXPECT_FALSE(me.engine->spin(enough_spins));
      EXPECT_EQ(me.engine->waiting_on().waiting_on, RankSet(0b110));
      EXPECT_EQ(me.engine->waiting_on().suspect, 2) << "it is behind rank 1";
      EXPECT_EQ(me.engine->waiting_on().text, "rank 1 to send, rank 2 to send");
      signal_event(store, "named");
    }
    me.finish();
    EXPECT_EQ(me.engine->waiting_on().suspect, -1);
    EXPECT_EQ(me.engine->waiting_on().waiting_on, RankSet());
  });
}

TEST(IntranodeMismatch, NamesTheRankThatHasNotReceived) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    if (me.rank == 2) wait_event(store, "named");
    for (int i = 0; i < fifo_depth; ++i) broadcast_from(me, 0);
    std::uint64_t x = 1;
    const CollectiveCall op{.kind = Collective::broadcast, .in = {&x, 1}, .out = {&x, 1}, .root = 0};
    if (me.rank == 1) signal_event(store, "all kept"), wait_event(store, "named");
    me.start(op);
    if (me.rank == 0) {
      wait_event(store, "all kept");
      EXPECT_FALSE(me.engine->spin(enough_spins));
      EXPECT_EQ(me.engine->waiting_on().waiting_on, RankSet(0b100));
      EXPECT_EQ(me.engine->waiting_on().suspect, 2);
      EXPECT_EQ(me.engine->waiting_on().text, "rank 2 to receive");
      signal_event(store, "named");
    }
    me.finish();
  });
}

// The awaited slot, or the space for one, belongs to a departed rank.
TEST(IntranodeMismatch, ADepartedRankFailsOnlyCallsThatNeedIt) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    std::optional<Rank> me(std::in_place, rank, 2, *store, before_wrap);
    barrier(*me);
    if (rank == 1) {
      broadcast_from(*me, 1);  // rank 0 detects it after rank 1 has left
      me.reset();
      return signal_event(*store, "left");
    }
    wait_event(*store, "left");
    for (int i = 0; i < 3; ++i) me->transport->wait(milliseconds(1)), me->transport->progress(0);
    broadcast_from(*me, 1);
    for (int i = 0; i < fifo_depth - 1; ++i) broadcast_from(*me, 0);
    const Error e = error_of([&] {
      for (int i = 0; i < fifo_depth; ++i) broadcast_from(*me, 0);
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
  });
}

// Repeated calls in registered memory; one rank leaves during one, or before it.
TEST(IntranodeMismatch, ADepartureFailsAZeroCopyCall) {
  for (const bool in_the_middle : {false, true})
    run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
      std::optional<Rank> me(std::in_place, rank, 3, *store, before_wrap);
      me->turns = enough_spins;
      constexpr std::size_t n = 3000;
      const auto memory = me->transport->allocate(n * sizeof(float));
      CollectiveCall op{.kind = Collective::all_reduce};
      op.in = op.out = Buffer{reinterpret_cast<float*>(memory.get()), n};
      for (int i = 0; i < 5; ++i) me->call(op);
      EXPECT_EQ(me->repeated, 4);
      test::sync_all(*me->transport, rank, 3);
      if (rank == 2) {
        me->turns = 0;
        if (in_the_middle) me->start(op);  // publishes its buffer handles
        me.reset();
        return;
      }
      const Error e = error_of([&] {
        for (int i = 0; i < 3; ++i) me->call(op);
      });
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 2) << e.what();
    });
}

}  // namespace
}  // namespace rz
