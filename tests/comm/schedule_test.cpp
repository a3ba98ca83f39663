#include "comm/schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/schedule/algorithms/algorithm.h"

namespace rz {
namespace {

constexpr auto all_reduce = Collective::all_reduce;

Schedule ring(RankContext context) { return find_algorithm(all_reduce, "ring").schedule(context); }

void expect_refused(ScheduleFunction broken, Collective c, int size, InPlace in_place, const char* place,
                    const char* why) {
  const Verification proof = verify(broken, c, size, 0, in_place);
  EXPECT_FALSE(proof);
  EXPECT_NE(proof.error.find(place), std::string::npos) << proof.error;
  EXPECT_NE(proof.error.find(why), std::string::npos) << proof.error;
}

TEST(Verifier, RefusesSwappedChunksInARing) {
  const auto swapped = [](RankContext context) {
    Schedule s = ring(context);
    if (context.rank == 1) std::swap(s.steps[2].chunk, s.steps[4].chunk);
    return s;
  };
  expect_refused(swapped, all_reduce, 4, InPlace::none, "rank 2, step 3, chunk 3",
                 "rank 1 sends chunk 2 for it (its step 2)");
}

// Ranks 0 and 1 agree, since x0 + x1 is x1 + x0; rank 2 starts from x2.
Schedule from_own_data(RankContext context) {
  Schedule s;
  std::vector<Operand> operands{local(input(0))};
  for (int r = 0; r < context.size; ++r)
    if (r != context.rank) s.steps.push_back(send(r, input(0))), operands.push_back(from(r));
  s.steps.push_back(reduce_step(output(0), operands, true));
  return s;
}

TEST(Verifier, RefusesASumThatStartsFromOwnData) {
  EXPECT_TRUE(verify(from_own_data, all_reduce, 2, 0, InPlace::none));
  expect_refused(from_own_data, all_reduce, 3, InPlace::none, "rank 2, step 2, chunk 0", "another order");
}

TEST(Verifier, RefusesOverwritingUnsentInput) {
  expect_refused(from_own_data, all_reduce, 2, InPlace::all,
                 "deadlock: rank 0, step 0 (send to 1), chunk 0 waits for rank 1, step 1",
                 "waits for rank 1, step 0 (send to 0), chunk 0 waits for rank 0, step 1");
}

TEST(Verifier, RefusesReuseOfScratchBeingSent) {
  const auto one_cell = [](RankContext context) {
    Schedule s = find_algorithm(Collective::reduce_scatter, "ring").schedule(context);
    s.scratch_cells = 1;
    for (Step& step : s.steps) step.chunk.cell = 0;
    return s;
  };
  EXPECT_TRUE(verify(one_cell, Collective::reduce_scatter, 3, 0, InPlace::none));
  expect_refused(one_cell, Collective::reduce_scatter, 4, InPlace::none, "deadlock",
                 "rank 1, step 3, chunk 2 waits for rank 1, step 2 (send to 2)");
}

TEST(Verifier, RefusesTwoRanksThatWaitForEachOther) {
  const auto both_receive_first = [](RankContext context) {
    const int peer = 1 - context.rank;
    return Schedule{
        .steps = {reduce_step(output(0), {local(input(0)), from(peer)}, true), send(peer, output(0))}};
  };
  expect_refused(both_receive_first, all_reduce, 2, InPlace::none, "deadlock: rank 0, step 0, chunk 0",
                 "waits for rank 1, step 1 (send to 0)");
}

TEST(Verifier, NeedsNoBufferAtAll) {
  // A message must not overtake the previous one, which is received only later.
  const auto overtaking = [](RankContext context) {
    if (context.rank == 0)
      return Schedule{.chunks = 2,
                      .steps = {copy(output(0), input(0)), copy(output(1), input(1)), send(1, input(0)),
                                send(1, input(1))}};
    return Schedule{.chunks = 2, .scratch_cells = 1, .steps = {recv(output(0), 0), recv(output(1), 0)}};
  };
  EXPECT_TRUE(verify(overtaking, Collective::broadcast, 2, 0, InPlace::none));
  const auto both_at_once = [](RankContext context) {
    if (context.rank == 0)
      return Schedule{.steps = {send(1, input(0)), send(1, input(0)), recv(output(0), 1)}};
    return Schedule{.steps = {reduce_step(output(0), {from(0), from(0)}, true), send(0, output(0))}};
  };
  expect_refused(both_at_once, all_reduce, 2, InPlace::none, "rank 0, step 1 (send to 1), chunk 0",
                 "deadlock");
}

TEST(Verifier, RefusesAMissingFinalStep) {
  const auto never_final = [](RankContext context) {
    Schedule s = ring(context);
    if (context.rank == 2)
      for (Step& step : s.steps) step.final = false;
    return s;
  };
  expect_refused(never_final, all_reduce, 3, InPlace::none, "rank 0, step 5, chunk 2", "no final step");
}

TEST(Verifier, RefusesASecondFinalStep) {
  const auto twice_final = [](RankContext context) {
    Schedule s = ring(context);
    s.steps.push_back(reduce_step(output(0), {local(output(0))}, true));
    return s;
  };
  expect_refused(twice_final, all_reduce, 3, InPlace::none, "step 8, chunk 0", "reduced again");
}

TEST(Verifier, RefusesADoubleCount) {
  const auto counted_twice = [](RankContext context) {
    if (context.rank == 1)
      return Schedule{.steps = {send(0, input(0)), send(0, input(0)), recv(output(0), 0)}};
    return Schedule{
        .scratch_cells = 1,
        .steps = {reduce_step(scratch(0, 0), {local(input(0)), from(1)}),
                  reduce_step(output(0), {local(scratch(0, 0)), from(1)}, true), send(1, output(0))}};
  };
  expect_refused(counted_twice, all_reduce, 2, InPlace::none, "rank 0, step 1, chunk 0",
                 "rank 1 would count twice");
}

TEST(Verifier, RefusesAnUnreceivedMessage) {
  const auto one_more = [](RankContext context) {
    Schedule s = ring(context);
    if (context.rank == 1) s.steps.push_back(send(2, output(1)));
    return s;
  };
  expect_refused(one_more, all_reduce, 3, InPlace::none, "rank 1, step 8, chunk 1", "rank 2 never receives");
}

TEST(Verifier, RefusesAnUnmatchedReceive) {
  const auto one_more = [](RankContext context) {
    Schedule s = ring(context);
    if (context.rank == 1) s.steps.push_back(recv(output(1), 0));
    return s;
  };
  expect_refused(one_more, all_reduce, 3, InPlace::none, "rank 1, step 8, chunk 1",
                 "rank 0 sends no message");
}

TEST(Verifier, RefusesAMissingContribution) {
  const auto alone = [](RankContext) {
    return Schedule{.steps = {reduce_step(output(0), {local(input(0))}, true)}};
  };
  expect_refused(alone, all_reduce, 2, InPlace::all, "rank 0, step 0, chunk 0",
                 "lacks the contribution of rank 1");
}

TEST(Verifier, RefusesAnOutputThatIsNotWritten) {
  const auto omits_the_root = [](RankContext context) {
    if (context.rank == 0) return Schedule{.steps = {send(1, input(0))}};
    return Schedule{.steps = {recv(output(0), 0)}};
  };
  EXPECT_TRUE(verify(omits_the_root, Collective::broadcast, 2, 0, InPlace::all));
  expect_refused(omits_the_root, Collective::broadcast, 2, InPlace::none, "rank 0, no step, chunk 0",
                 "never written");
}

// The same sum, but a 16-bit float is rounded once on one rank and twice on the other.
TEST(Verifier, RefusesRanksThatRoundDifferently) {
  const auto roundings = [](RankContext context) {
    const int a = (context.rank + 1) % 3, b = (context.rank + 2) % 3;
    Schedule s{.scratch_cells = 1, .steps = {send(a, input(0)), send(b, input(0))}};
    const auto term = [&](int r) { return r == context.rank ? local(input(0)) : from(r); };
    if (context.rank < 2) {
      s.steps.push_back(reduce_step(output(0), {term(0), term(1), term(2)}, true));
    } else {
      s.steps.push_back(reduce_step(scratch(0, 0), {term(0), term(1)}));
      s.steps.push_back(reduce_step(output(0), {local(scratch(0, 0)), term(2)}, true));
    }
    return s;
  };
  expect_refused(roundings, all_reduce, 3, InPlace::none, "rank 2, step 3, chunk 0",
                 "summed or rounded in another order");
}

TEST(Verifier, RefusesABarrierThatLetsARankGoEarly) {
  const auto one_round = [](RankContext context) {
    Schedule s = find_algorithm(Collective::barrier, "dissemination").schedule(context);
    s.steps.resize(2);
    return s;
  };
  EXPECT_TRUE(verify(one_round, Collective::barrier, 2, 0, InPlace::none));
  expect_refused(one_round, Collective::barrier, 3, InPlace::none, "rank 0, step 2", "without rank 1");
}

/// One step of a group of 2, after which verification stops.
template <auto make>
Schedule only(RankContext) {
  return {.chunks = 2, .scratch_cells = 1, .steps = {make()}};
}
void expect_refused_step(ScheduleFunction function, Collective c, const char* why) {
  expect_refused(function, c, 2, InPlace::none, "rank 0, step 0, chunk", why);
}

TEST(Verifier, RefusesStepsThatMakeNoSense) {
  expect_refused_step(only<[] { return copy(input(1), input(1)); }>, all_reduce, "writes its input");
  expect_refused_step(only<[] { return send(0, input(1)); }>, all_reduce, "rank 0 is no peer");
  expect_refused_step(only<[] { return recv(output(1), 2); }>, all_reduce, "rank 2 is no peer");
  expect_refused_step(only<[] { return copy(output(1), input(0)); }>, all_reduce, "takes chunk 0 for it");
  expect_refused_step(only<[] { return copy(output(2), input(2)); }>, all_reduce, "does not hold it");
  expect_refused_step(only<[] { return copy(scratch(0, 2), input(0)); }>, all_reduce, "there are 2 chunks");
  expect_refused_step(only<[] { return copy(scratch(1, 0), input(0)); }>, all_reduce, "scratch cell 1 of 1");
  expect_refused_step(only<[] { return copy(output(0), scratch(0, 0)); }>, all_reduce,
                      "before it was written");
  expect_refused_step(only<[] { return reduce_step(output(0), {}); }>, all_reduce, "combines nothing");
  expect_refused_step(only<[] { return copy(output(1), input(0)); }>, Collective::reduce_scatter,
                      "does not hold it");
  expect_refused_step(only<[] { return copy(output(0), input(1)); }>, Collective::all_gather,
                      "does not hold it");
  expect_refused_step(only<[] {
                        return reduce_step(output(0), {local(input(0)), from(1)});
                      }>,
                      Collective::broadcast, "does not reduce");
  expect_refused_step(only<[] { return reduce_step(output(0), {local(input(0))}, true); }>,
                      Collective::broadcast, "nothing is reduced");
}

TEST(Verifier, RefusesScratchThatHoldsAnotherChunk) {
  const auto mistaken = [](RankContext) {
    return Schedule{.chunks = 2,
                    .scratch_cells = 1,
                    .steps = {copy(scratch(0, 0), input(0)), copy(output(1), scratch(0, 1))}};
  };
  expect_refused(mistaken, all_reduce, 1, InPlace::none, "rank 0, step 1, chunk 1", "its cell holds chunk 0");
}

TEST(Verifier, RefusesDifferentNumbersOfChunks) {
  const auto by_rank = [](RankContext context) { return Schedule{.chunks = context.rank + 1}; };
  expect_refused(by_rank, all_reduce, 2, InPlace::none, "rank 1", "2 chunks, rank 0 into 1");
  expect_refused(by_rank, Collective::all_gather, 2, InPlace::none, "rank 0", "instead of 2");
}

TEST(Verifier, RefusesInvalidQueries) {
  EXPECT_FALSE(verify(ring, Collective::send, 2, 0, InPlace::none));
  EXPECT_FALSE(verify(ring, all_reduce, 0, 0, InPlace::none));
  EXPECT_FALSE(verify(ring, all_reduce, 2, 2, InPlace::none));
  EXPECT_FALSE(verify(find_algorithm(Collective::all_to_all, "pairwise").schedule, Collective::all_to_all, 2,
                      0, InPlace::all));
}

// Out of place all ranks add x0 and x1, in place x1 and x0. If only one is in place, it sends x1 to a rank
// that adds x1.
Schedule right_if_all_are_alike(RankContext context) {
  if (context.rank == 0)
    return {.steps = {send(1, input(0)), recv(output(0), 1), send(1, input(0)), recv(output(0), 1)}};
  return {.scratch_cells = 1,
          .steps = {recv(scratch(0, 0), 0), send(0, input(0)), copy(output(0), scratch(0, 0)),
                    reduce_step(output(0), {from(0), local(input(0))}, true), send(0, output(0))}};
}

TEST(Verifier, RefusesRanksInPlaceBesideOthersWhereTheySendOtherValues) {
  EXPECT_EQ(verify(right_if_all_are_alike, all_reduce, 2, 0, InPlace::none).error, "");
  EXPECT_EQ(verify(right_if_all_are_alike, all_reduce, 2, 0, InPlace::all).error, "");
  expect_refused(right_if_all_are_alike, all_reduce, 2, InPlace::any, "rank 0, step 2, chunk 0",
                 "sends another value in place than out of place");
}

TEST(Verifier, ProvesEachKindOfCallWhereAnyIsPossible) {
  EXPECT_TRUE(verify(from_own_data, all_reduce, 2, 0, InPlace::none));
  expect_refused(from_own_data, all_reduce, 2, InPlace::any, "deadlock", "rank 1, step 0 (send to 0)");
  const auto only_in_place = [](RankContext context) {
    return context.rank == 0 ? Schedule{.steps = {send(1, input(0))}}
                             : Schedule{.steps = {recv(output(0), 0)}};
  };
  EXPECT_TRUE(verify(only_in_place, Collective::broadcast, 2, 0, InPlace::all));
  expect_refused(only_in_place, Collective::broadcast, 2, InPlace::any, "rank 0, no step", "never written");
}

// Elision of copies keeps each copy that another step needs: a scratch chunk that is also sent, or an output
// that is read before.
TEST(Verifier, ProvesSchedulesAsTheyRun) {
  const auto sends_the_cell = [](RankContext context) {
    if (context.rank == 0) return Schedule{.steps = {send(1, input(0)), recv(output(0), 1)}};
    return Schedule{.scratch_cells = 1,
                    .steps = {reduce_step(scratch(0, 0), {from(0), local(input(0))}, true),
                              copy(output(0), scratch(0, 0)), send(0, scratch(0, 0))}};
  };
  EXPECT_EQ(verify(sends_the_cell, all_reduce, 2, 0, InPlace::any).error, "");
  const auto reads_the_output = [](RankContext context) {
    if (context.rank == 0)
      return Schedule{.steps = {send(1, input(0)), reduce_step(output(0), {local(input(0)), from(1)}, true)}};
    return Schedule{
        .scratch_cells = 1,
        .steps = {copy(output(0), input(0)), reduce_step(scratch(0, 0), {from(0), local(input(0))}, true),
                  send(0, output(0)), copy(output(0), scratch(0, 0))}};
  };
  EXPECT_EQ(verify(reads_the_output, all_reduce, 2, 0, InPlace::none).error, "");
}

TEST(Verifier, ElidesScratchCopies) {
  Schedule s{.scratch_cells = 1,
             .steps = {reduce_step(scratch(0, 0), {local(input(0)), from(1)}, true), send(1, input(0)),
                       copy(output(0), scratch(0, 0))}};
  elide_scratch_copies(s);
  ASSERT_EQ(s.steps.size(), 2u);
  EXPECT_EQ(s.steps[0].chunk, output(0));
  EXPECT_TRUE(s.steps[0].final);
}

TEST(Verifier, ReportsDepthAndRankOrder) {
  const auto chain = [](RankContext context) {
    if (context.rank < 2) {
      Schedule s;
      if (context.rank == 1) s.steps.push_back(reduce_step(output(0), {local(input(0)), from(0)}));
      s.steps.push_back(send(context.rank + 1, context.rank == 0 ? input(0) : output(0)));
      s.steps.push_back(recv(output(0), 2));
      return s;
    }
    return Schedule{.steps = {reduce_step(output(0), {local(input(0)), from(1)}, true), send(0, output(0)),
                              send(1, output(0))}};
  };
  const Verification proof = verify(chain, all_reduce, 3, 0, InPlace::all);
  EXPECT_EQ(proof.error, "");
  EXPECT_TRUE(proof.rank_order);  // x2 + (x1 + x0)
  EXPECT_EQ(proof.depth, 3);
  EXPECT_FALSE(verify(ring, all_reduce, 3, 0, InPlace::all).rank_order);
}

}  // namespace
}  // namespace rz
