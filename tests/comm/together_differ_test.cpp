// What ranks of one host learn of each other when their calls differ, and when one of them does not come.

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/meeting_rank.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using test::before_wrap;
using test::error_of;
using test::hear;
using test::kept;
using test::plenty;
using test::Rank;
using test::run;
using test::run_ranks;
using test::say;

// ---- ranks that differ

void expect_mismatch(const Error& e, const std::string& part) {
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
}

// Complete at once: who is the root waits for nobody.
void broadcast_from(Rank& me, int root, std::size_t count = 1) {
  std::uint64_t x[14] = {};
  const Operation op{.kind = Collective::broadcast, .in = {x, count}, .out = {x, count}, .root = root};
  me.call(op);
}
void barrier(Rank& me) {
  const Operation op{.kind = Collective::barrier};
  me.call(op);
}

TEST(Together, TwoRootsOfABroadcastAreFoundOutByTheNextThatLooks) {
  for (const int times : {1, kept - 1, kept, kept + 36})
    run(2, before_wrap, [&](Rank& me, Store&) {
      for (int i = 0; i < times; ++i) broadcast_from(me, me.rank);
      const Error e = error_of([&] { barrier(me); });
      expect_mismatch(e, str("rank ", 1 - me.rank, " called broadcast #"));
      expect_mismatch(e, str("root ", me.rank));
    });
}

// Who made the call of fewer letters looks at a later letter of the other's.
TEST(Together, AMismatchIsNamedByTheFirstOfSeveralLetters) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 9; ++i) broadcast_from(me, 0, 14), barrier(me);
    if (me.rank == 0) {
      float x[18] = {}, y[18];
      const Operation op{.kind = Collective::all_reduce, .in = {x, 18}, .out = {y, 18}};
      me.start(op);
      me.together->advance();
      say(store, "two letters");
      return hear(store, "seen");
    }
    hear(store, "two letters");
    broadcast_from(me, 1);
    const Error e = error_of([&] { barrier(me); });
    say(store, "seen");
    expect_mismatch(e, "rank 0 called all_reduce #18 (18 f32");
    expect_mismatch(e, "rank 1 called broadcast #18 (1 u64");
  });
}

// The other way round: a rank that collects several letters finds another call's in their place.
TEST(Together, WhoCollectsSeveralLettersFindsOtherCallsAmongThem) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 9; ++i) broadcast_from(me, 0, 14), barrier(me);
    if (me.rank == 0) {
      broadcast_from(me, 0), broadcast_from(me, 0);
      say(store, "two calls");
      return hear(store, "seen");
    }
    hear(store, "two calls");
    float x[18] = {}, y[18];
    const Operation op{.kind = Collective::all_reduce, .in = {x, 18}, .out = {y, 18}};
    const Error e = error_of([&] { me.call(op); });
    say(store, "seen");
    expect_mismatch(e, "rank 0 called broadcast #18 (1 u64");
    expect_mismatch(e, "rank 1 called all_reduce #18 (18 f32");
  });
}

TEST(Together, AMismatchWhoseLettersAreGoneIsStillFoundOut) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    broadcast_from(me, me.rank);
    say(store, str("made ", me.rank));
    hear(store, str("made ", 1 - me.rank));
    if (me.rank == 0) {
      for (int i = 0; i < kept; ++i) broadcast_from(me, 0);
      say(store, "gone");
      return;
    }
    hear(store, "gone");
    expect_mismatch(error_of([&] { broadcast_from(me, 0); }), "some time before broadcast #1");
  });
}

TEST(Together, DifferentCallsAndCountsAreNamed) {
  const auto differ = [](const char* what, const auto& make) {
    run(3, 0, [&](Rank& me, Store&) {
      std::vector<float> x(30000), y(30000);
      const Operation op = make(me, x.data(), y.data());
      const Error e = error_of([&] { me.call(op); });
      expect_mismatch(e, what);
    });
  };
  differ("all_reduce #0 (7 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 7 : 9;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (20000 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 20000 : 9;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (17 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 17 : 9;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (17 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 17 : 20;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("avg", [](Rank& me, float* x, float* y) {
    return Operation{.kind = Collective::all_reduce,
                     .in = {x, 3},
                     .out = {y, 3},
                     .op = me.rank == 2 ? ReduceOp::avg : ReduceOp::sum};
  });
  differ("barrier", [](Rank& me, float* x, float* y) {
    if (me.rank == 2) return Operation{.kind = Collective::barrier};
    return Operation{.kind = Collective::all_reduce, .in = {x, 3}, .out = {y, 3}};
  });
}

TEST(Together, CountsOfAPairThatDifferAreNamed) {
  run(2, 0, [](Rank& me, Store&) {
    float x[4] = {}, y[8] = {};
    Operation op{.kind = Collective::all_to_all_v, .in = {x, 4}, .out = {y, 8}};
    op.pairs = std::make_shared<PairCounts>(PairCounts{.send_counts = {2, 2},
                                                       .send_offsets = {0, 2},
                                                       .recv_counts = {me.rank == 1 ? 3u : 2u, 2},
                                                       .recv_offsets = {0, 4}});
    me.start(op);
    if (me.rank == 0) {
      EXPECT_FALSE(me.together->spin(plenty));
    } else {
      expect_mismatch(error_of([&] { me.finish(); }), "(3 f32");
    }
  });
}

// ---- who is waited for

TEST(Together, NamesWhoHasNotSent) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 3; ++i) {
      if (me.rank == 2 && i == 1) hear(store, "named");
      broadcast_from(me, 0);
    }
    const Operation op{.kind = Collective::barrier};
    if (me.rank == 1) say(store, "three"), hear(store, "named");
    me.start(op);
    if (me.rank == 0) {
      hear(store, "three");
      EXPECT_FALSE(me.together->spin(plenty));
      EXPECT_EQ(me.together->debtors(), RankSet(0b110));
      EXPECT_EQ(me.together->culprit(), 2) << "it is behind rank 1";
      EXPECT_EQ(me.together->waiting_for(), "rank 1 to send, rank 2 to send");
      say(store, "named");
    }
    me.finish();
    EXPECT_EQ(me.together->culprit(), -1);
    EXPECT_EQ(me.together->debtors(), RankSet());
  });
}

TEST(Together, NamesWhoHasNotReceived) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    if (me.rank == 2) hear(store, "named");
    for (int i = 0; i < kept; ++i) broadcast_from(me, 0);
    std::uint64_t x = 1;
    const Operation op{.kind = Collective::broadcast, .in = {&x, 1}, .out = {&x, 1}, .root = 0};
    if (me.rank == 1) say(store, "all kept"), hear(store, "named");
    me.start(op);
    if (me.rank == 0) {
      hear(store, "all kept");
      EXPECT_FALSE(me.together->spin(plenty));
      EXPECT_EQ(me.together->debtors(), RankSet(0b100));
      EXPECT_EQ(me.together->culprit(), 2);
      EXPECT_EQ(me.together->waiting_for(), "rank 2 to receive");
      say(store, "named");
    }
    me.finish();
  });
}

// A letter, or room for one, of a rank that is gone.
TEST(Together, ARankThatLeftIsAFailureOnlyForWhoNeedsIt) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    std::optional<Rank> me(std::in_place, rank, 2, *store, before_wrap);
    barrier(*me);
    if (rank == 1) {
      broadcast_from(*me, 1);  // rank 0 finds it when rank 1 has left
      me.reset();
      return say(*store, "left");
    }
    hear(*store, "left");
    for (int i = 0; i < 3; ++i) me->transport->wait(milliseconds(1)), me->transport->progress();
    broadcast_from(*me, 1);
    for (int i = 0; i < kept - 1; ++i) broadcast_from(*me, 0);
    const Error e = error_of([&] {
      for (int i = 0; i < kept; ++i) broadcast_from(*me, 0);
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
  });
}

// Calls like the last one in memory that all reach; one rank leaves in the middle of one, or before it.
TEST(Together, ARankThatLeavesADirectCallIsItsFailure) {
  for (const bool in_the_middle : {false, true})
    run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
      std::optional<Rank> me(std::in_place, rank, 3, *store, before_wrap);
      me->turns = plenty;
      constexpr std::size_t n = 3000;
      const auto memory = me->transport->allocate(n * sizeof(float));
      Operation op{.kind = Collective::all_reduce};
      op.in = op.out = Buffer{reinterpret_cast<float*>(memory.get()), n};
      for (int i = 0; i < 5; ++i) me->call(op);
      EXPECT_EQ(me->repeated, 4);
      test::meet_all(*me->transport, rank, 3);
      if (rank == 2) {
        me->turns = 0;
        if (in_the_middle) me->start(op);  // says where its memory lies
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
