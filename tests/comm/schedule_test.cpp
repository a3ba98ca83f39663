// Runs: pure

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/dependency_plan.h"
#include "tests/proof/verify.h"

namespace rz {
namespace {

constexpr auto all_reduce = Collective::all_reduce;

schedule::Schedule ring(schedule::RankContext context) {
  return schedule::find_algorithm(all_reduce, "ring").schedule(context);
}

void expect_refused(schedule::ScheduleFunction broken, Collective c, int size, schedule::InPlace in_place,
                    const char* place, const char* why) {
  const schedule::Verification proof = schedule::verify(broken, c, size, 0, in_place);
  EXPECT_FALSE(proof);
  EXPECT_NE(proof.error.find(place), std::string::npos) << proof.error;
  EXPECT_NE(proof.error.find(why), std::string::npos) << proof.error;
}

TEST(Verifier, RefusesSwappedChunksInARing) {
  const auto swapped = [](schedule::RankContext context) {
    schedule::Schedule s = ring(context);
    if (context.rank == 1) std::swap(s.steps[2].chunk, s.steps[4].chunk);
    return s;
  };
  expect_refused(swapped, all_reduce, 4, schedule::InPlace::none, "rank 2, step 3, chunk 3",
                 "rank 1 sends chunk 2 for it (its step 2)");
}

// Ranks 0 and 1 agree, since x0 + x1 is x1 + x0; rank 2 starts from x2.
schedule::Schedule from_own_data(schedule::RankContext context) {
  schedule::Schedule s;
  std::vector<schedule::Operand> operands{schedule::local(schedule::input(0))};
  for (int r = 0; r < context.size; ++r)
    if (r != context.rank)
      s.steps.push_back(schedule::send(r, schedule::input(0))), operands.push_back(schedule::from(r));
  s.steps.push_back(schedule::reduce_step(schedule::output(0), operands, true));
  return s;
}

TEST(Verifier, RefusesASumThatStartsFromOwnData) {
  EXPECT_TRUE(schedule::verify(from_own_data, all_reduce, 2, 0, schedule::InPlace::none));
  expect_refused(from_own_data, all_reduce, 3, schedule::InPlace::none, "rank 2, step 2, chunk 0",
                 "another order");
}

TEST(Verifier, RefusesOverwritingUnsentInput) {
  expect_refused(from_own_data, all_reduce, 2, schedule::InPlace::all,
                 "deadlock: rank 0, step 0 (send to 1), chunk 0 waits for rank 1, step 1",
                 "waits for rank 1, step 0 (send to 0), chunk 0 waits for rank 0, step 1");
}

TEST(Verifier, RefusesReuseOfScratchBeingSent) {
  const auto one_cell = [](schedule::RankContext context) {
    schedule::Schedule s = schedule::find_algorithm(Collective::reduce_scatter, "ring").schedule(context);
    s.scratch_cells = 1;
    for (schedule::Step& step : s.steps) step.chunk.cell = 0;
    return s;
  };
  EXPECT_TRUE(schedule::verify(one_cell, Collective::reduce_scatter, 3, 0, schedule::InPlace::none));
  expect_refused(one_cell, Collective::reduce_scatter, 4, schedule::InPlace::none, "deadlock",
                 "rank 1, step 3, chunk 2 waits for rank 1, step 2 (send to 2)");
}

TEST(Verifier, RefusesTwoRanksThatWaitForEachOther) {
  const auto both_receive_first = [](schedule::RankContext context) {
    const int peer = 1 - context.rank;
    return schedule::Schedule{
        .steps = {schedule::reduce_step(schedule::output(0),
                                        {schedule::local(schedule::input(0)), schedule::from(peer)}, true),
                  schedule::send(peer, schedule::output(0))}};
  };
  expect_refused(both_receive_first, all_reduce, 2, schedule::InPlace::none,
                 "deadlock: rank 0, step 0, chunk 0", "waits for rank 1, step 1 (send to 0)");
}

TEST(Verifier, NeedsNoBufferAtAll) {
  // A message must not overtake the previous one, which is received only later.
  const auto overtaking = [](schedule::RankContext context) {
    if (context.rank == 0)
      return schedule::Schedule{
          .chunks = 2,
          .steps = {schedule::copy(schedule::output(0), schedule::input(0)),
                    schedule::copy(schedule::output(1), schedule::input(1)),
                    schedule::send(1, schedule::input(0)), schedule::send(1, schedule::input(1))}};
    return schedule::Schedule{
        .chunks = 2,
        .scratch_cells = 1,
        .steps = {schedule::recv(schedule::output(0), 0), schedule::recv(schedule::output(1), 0)}};
  };
  EXPECT_TRUE(schedule::verify(overtaking, Collective::broadcast, 2, 0, schedule::InPlace::none));
  const auto both_at_once = [](schedule::RankContext context) {
    if (context.rank == 0)
      return schedule::Schedule{.steps = {schedule::send(1, schedule::input(0)),
                                          schedule::send(1, schedule::input(0)),
                                          schedule::recv(schedule::output(0), 1)}};
    return schedule::Schedule{
        .steps = {schedule::reduce_step(schedule::output(0), {schedule::from(0), schedule::from(0)}, true),
                  schedule::send(0, schedule::output(0))}};
  };
  expect_refused(both_at_once, all_reduce, 2, schedule::InPlace::none, "rank 0, step 1 (send to 1), chunk 0",
                 "deadlock");
}

TEST(Verifier, RefusesAMissingFinalStep) {
  const auto never_final = [](schedule::RankContext context) {
    schedule::Schedule s = ring(context);
    if (context.rank == 2)
      for (schedule::Step& step : s.steps) step.final = false;
    return s;
  };
  expect_refused(never_final, all_reduce, 3, schedule::InPlace::none, "rank 0, step 5, chunk 2",
                 "no final step");
}

TEST(Verifier, RefusesASecondFinalStep) {
  const auto twice_final = [](schedule::RankContext context) {
    schedule::Schedule s = ring(context);
    s.steps.push_back(
        schedule::reduce_step(schedule::output(0), {schedule::local(schedule::output(0))}, true));
    return s;
  };
  expect_refused(twice_final, all_reduce, 3, schedule::InPlace::none, "step 8, chunk 0", "reduced again");
}

TEST(Verifier, RefusesADoubleCount) {
  const auto counted_twice = [](schedule::RankContext context) {
    if (context.rank == 1)
      return schedule::Schedule{.steps = {schedule::send(0, schedule::input(0)),
                                          schedule::send(0, schedule::input(0)),
                                          schedule::recv(schedule::output(0), 0)}};
    return schedule::Schedule{
        .scratch_cells = 1,
        .steps = {schedule::reduce_step(schedule::scratch(0, 0),
                                        {schedule::local(schedule::input(0)), schedule::from(1)}),
                  schedule::reduce_step(schedule::output(0),
                                        {schedule::local(schedule::scratch(0, 0)), schedule::from(1)}, true),
                  schedule::send(1, schedule::output(0))}};
  };
  expect_refused(counted_twice, all_reduce, 2, schedule::InPlace::none, "rank 0, step 1, chunk 0",
                 "rank 1 would count twice");
}

// An average would scale x0 + x1 again, or leave x2 unscaled.
TEST(Verifier, RefusesASumThatIsTakenForAContribution) {
  const auto unmarked = [](schedule::RankContext context) {
    schedule::Schedule s = schedule::find_algorithm(all_reduce, "chain").schedule(context);
    for (schedule::Step& step : s.steps)
      for (schedule::Operand& operand : step.operands) operand.partial = false;
    return s;
  };
  EXPECT_TRUE(schedule::verify(unmarked, all_reduce, 2, 0, schedule::InPlace::any));
  expect_refused(unmarked, all_reduce, 3, schedule::InPlace::any, "rank 2, step 0, chunk 0",
                 "operand 0 is a sum, but not marked as one");
  const auto marked = [](schedule::RankContext context) {
    schedule::Schedule s = schedule::find_algorithm(all_reduce, "chain").schedule(context);
    if (context.rank == 2) s.steps[0].operands[1].partial = true;
    return s;
  };
  expect_refused(marked, all_reduce, 3, schedule::InPlace::any, "rank 2, step 0, chunk 0",
                 "operand 1 is marked as a sum, but is the contribution of one rank");
}

TEST(Verifier, RefusesAnUnreceivedMessage) {
  const auto one_more = [](schedule::RankContext context) {
    schedule::Schedule s = ring(context);
    if (context.rank == 1) s.steps.push_back(schedule::send(2, schedule::output(1)));
    return s;
  };
  expect_refused(one_more, all_reduce, 3, schedule::InPlace::none, "rank 1, step 8, chunk 1",
                 "rank 2 never receives");
}

TEST(Verifier, RefusesAnUnmatchedReceive) {
  const auto one_more = [](schedule::RankContext context) {
    schedule::Schedule s = ring(context);
    if (context.rank == 1) s.steps.push_back(schedule::recv(schedule::output(1), 0));
    return s;
  };
  expect_refused(one_more, all_reduce, 3, schedule::InPlace::none, "rank 1, step 8, chunk 1",
                 "rank 0 sends no message");
}

TEST(Verifier, RefusesAMissingContribution) {
  const auto alone = [](schedule::RankContext) {
    return schedule::Schedule{
        .steps = {schedule::reduce_step(schedule::output(0), {schedule::local(schedule::input(0))}, true)}};
  };
  expect_refused(alone, all_reduce, 2, schedule::InPlace::all, "rank 0, step 0, chunk 0",
                 "lacks the contribution of rank 1");
}

TEST(Verifier, RefusesAnOutputThatIsNotWritten) {
  const auto omits_the_root = [](schedule::RankContext context) {
    if (context.rank == 0) return schedule::Schedule{.steps = {schedule::send(1, schedule::input(0))}};
    return schedule::Schedule{.steps = {schedule::recv(schedule::output(0), 0)}};
  };
  EXPECT_TRUE(schedule::verify(omits_the_root, Collective::broadcast, 2, 0, schedule::InPlace::all));
  expect_refused(omits_the_root, Collective::broadcast, 2, schedule::InPlace::none,
                 "rank 0, no step, chunk 0", "never written");
}

// The same sum, but a 16-bit float is rounded once on one rank and twice on the other.
TEST(Verifier, RefusesRanksThatRoundDifferently) {
  const auto roundings = [](schedule::RankContext context) {
    const int a = (context.rank + 1) % 3, b = (context.rank + 2) % 3;
    schedule::Schedule s{
        .scratch_cells = 1,
        .steps = {schedule::send(a, schedule::input(0)), schedule::send(b, schedule::input(0))}};
    const auto term = [&](int r) {
      return r == context.rank ? schedule::local(schedule::input(0)) : schedule::from(r);
    };
    if (context.rank < 2) {
      s.steps.push_back(schedule::reduce_step(schedule::output(0), {term(0), term(1), term(2)}, true));
    } else {
      s.steps.push_back(schedule::reduce_step(schedule::scratch(0, 0), {term(0), term(1)}));
      s.steps.push_back(schedule::reduce_step(schedule::output(0),
                                              {schedule::local(schedule::scratch(0, 0)), term(2)}, true));
    }
    return s;
  };
  expect_refused(roundings, all_reduce, 3, schedule::InPlace::none, "rank 2, step 3, chunk 0",
                 "summed or rounded in another order");
}

TEST(Verifier, RefusesABarrierThatLetsARankGoEarly) {
  const auto one_round = [](schedule::RankContext context) {
    schedule::Schedule s = schedule::find_algorithm(Collective::barrier, "dissemination").schedule(context);
    s.steps.resize(2);
    return s;
  };
  EXPECT_TRUE(schedule::verify(one_round, Collective::barrier, 2, 0, schedule::InPlace::none));
  expect_refused(one_round, Collective::barrier, 3, schedule::InPlace::none, "rank 0, step 2",
                 "without rank 1");
}

/// One step of a group of 2, after which verification stops.
template <auto make>
schedule::Schedule only(schedule::RankContext) {
  return {.chunks = 2, .scratch_cells = 1, .steps = {make()}};
}
void expect_refused_step(schedule::ScheduleFunction function, Collective c, const char* why) {
  expect_refused(function, c, 2, schedule::InPlace::none, "rank 0, step 0, chunk", why);
}

TEST(Verifier, RefusesStepsThatMakeNoSense) {
  expect_refused_step(only<[] { return schedule::copy(schedule::input(1), schedule::input(1)); }>, all_reduce,
                      "writes its input");
  expect_refused_step(only<[] { return schedule::send(0, schedule::input(1)); }>, all_reduce,
                      "rank 0 is no peer");
  expect_refused_step(only<[] { return schedule::recv(schedule::output(1), 2); }>, all_reduce,
                      "rank 2 is no peer");
  expect_refused_step(only<[] { return schedule::copy(schedule::output(1), schedule::input(0)); }>,
                      all_reduce, "takes chunk 0 for it");
  expect_refused_step(only<[] { return schedule::copy(schedule::output(2), schedule::input(2)); }>,
                      all_reduce, "does not hold it");
  expect_refused_step(only<[] { return schedule::copy(schedule::scratch(0, 2), schedule::input(0)); }>,
                      all_reduce, "there are 2 chunks");
  expect_refused_step(only<[] { return schedule::copy(schedule::scratch(1, 0), schedule::input(0)); }>,
                      all_reduce, "scratch cell 1 of 1");
  expect_refused_step(only<[] { return schedule::copy(schedule::output(0), schedule::scratch(0, 0)); }>,
                      all_reduce, "before it was written");
  expect_refused_step(only<[] { return schedule::reduce_step(schedule::output(0), {}); }>, all_reduce,
                      "combines nothing");
  expect_refused_step(only<[] { return schedule::copy(schedule::output(1), schedule::input(0)); }>,
                      Collective::reduce_scatter, "does not hold it");
  expect_refused_step(only<[] { return schedule::copy(schedule::output(0), schedule::input(1)); }>,
                      Collective::all_gather, "does not hold it");
  expect_refused_step(only<[] {
                        return schedule::reduce_step(
                            schedule::output(0), {schedule::local(schedule::input(0)), schedule::from(1)});
                      }>,
                      Collective::broadcast, "does not reduce");
  expect_refused_step(only<[] {
                        return schedule::reduce_step(schedule::output(0),
                                                     {schedule::local(schedule::input(0))}, true);
                      }>,
                      Collective::broadcast, "nothing is reduced");
}

TEST(Verifier, RefusesScratchThatHoldsAnotherChunk) {
  const auto mistaken = [](schedule::RankContext) {
    return schedule::Schedule{.chunks = 2,
                              .scratch_cells = 1,
                              .steps = {schedule::copy(schedule::scratch(0, 0), schedule::input(0)),
                                        schedule::copy(schedule::output(1), schedule::scratch(0, 1))}};
  };
  expect_refused(mistaken, all_reduce, 1, schedule::InPlace::none, "rank 0, step 1, chunk 1",
                 "its cell holds chunk 0");
}

TEST(Verifier, RefusesDifferentNumbersOfChunks) {
  const auto by_rank = [](schedule::RankContext context) {
    return schedule::Schedule{.chunks = context.rank + 1};
  };
  expect_refused(by_rank, all_reduce, 2, schedule::InPlace::none, "rank 1", "2 chunks, rank 0 into 1");
  expect_refused(by_rank, Collective::all_gather, 2, schedule::InPlace::none, "rank 0", "instead of 2");
}

TEST(Verifier, RefusesInvalidQueries) {
  EXPECT_FALSE(schedule::verify(ring, Collective::send, 2, 0, schedule::InPlace::none));
  EXPECT_FALSE(schedule::verify(ring, all_reduce, 0, 0, schedule::InPlace::none));
  EXPECT_FALSE(schedule::verify(ring, all_reduce, 2, 2, schedule::InPlace::none));
  EXPECT_FALSE(schedule::verify(schedule::find_algorithm(Collective::all_to_all, "pairwise").schedule,
                                Collective::all_to_all, 2, 0, schedule::InPlace::all));
}

// Out of place all ranks add x0 and x1, in place x1 and x0. If only one is in place, it sends x1 to a rank
// that adds x1.
schedule::Schedule right_if_all_are_alike(schedule::RankContext context) {
  if (context.rank == 0)
    return {.steps = {schedule::send(1, schedule::input(0)), schedule::recv(schedule::output(0), 1),
                      schedule::send(1, schedule::input(0)), schedule::recv(schedule::output(0), 1)}};
  return {.scratch_cells = 1,
          .steps = {schedule::recv(schedule::scratch(0, 0), 0), schedule::send(0, schedule::input(0)),
                    schedule::copy(schedule::output(0), schedule::scratch(0, 0)),
                    schedule::reduce_step(schedule::output(0),
                                          {schedule::from(0), schedule::local(schedule::input(0))}, true),
                    schedule::send(0, schedule::output(0))}};
}

TEST(Verifier, RefusesRanksInPlaceBesideOthersWhereTheySendOtherValues) {
  EXPECT_EQ(schedule::verify(right_if_all_are_alike, all_reduce, 2, 0, schedule::InPlace::none).error, "");
  EXPECT_EQ(schedule::verify(right_if_all_are_alike, all_reduce, 2, 0, schedule::InPlace::all).error, "");
  expect_refused(right_if_all_are_alike, all_reduce, 2, schedule::InPlace::any, "rank 0, step 2, chunk 0",
                 "sends another value in place than out of place");
}

TEST(Verifier, ProvesEachKindOfCallWhereAnyIsPossible) {
  EXPECT_TRUE(schedule::verify(from_own_data, all_reduce, 2, 0, schedule::InPlace::none));
  expect_refused(from_own_data, all_reduce, 2, schedule::InPlace::any, "deadlock",
                 "rank 1, step 0 (send to 0)");
  const auto only_in_place = [](schedule::RankContext context) {
    return context.rank == 0 ? schedule::Schedule{.steps = {schedule::send(1, schedule::input(0))}}
                             : schedule::Schedule{.steps = {schedule::recv(schedule::output(0), 0)}};
  };
  EXPECT_TRUE(schedule::verify(only_in_place, Collective::broadcast, 2, 0, schedule::InPlace::all));
  expect_refused(only_in_place, Collective::broadcast, 2, schedule::InPlace::any, "rank 0, no step",
                 "never written");
}

// Elision of copies keeps each copy that another step needs: a scratch chunk that is also sent, or an output
// that is read before.
TEST(Verifier, ProvesSchedulesAsTheyRun) {
  const auto sends_the_cell = [](schedule::RankContext context) {
    if (context.rank == 0)
      return schedule::Schedule{
          .steps = {schedule::send(1, schedule::input(0)), schedule::recv(schedule::output(0), 1)}};
    return schedule::Schedule{
        .scratch_cells = 1,
        .steps = {schedule::reduce_step(schedule::scratch(0, 0),
                                        {schedule::from(0), schedule::local(schedule::input(0))}, true),
                  schedule::copy(schedule::output(0), schedule::scratch(0, 0)),
                  schedule::send(0, schedule::scratch(0, 0))}};
  };
  EXPECT_EQ(schedule::verify(sends_the_cell, all_reduce, 2, 0, schedule::InPlace::any).error, "");
  const auto reads_the_output = [](schedule::RankContext context) {
    if (context.rank == 0)
      return schedule::Schedule{
          .steps = {schedule::send(1, schedule::input(0)),
                    schedule::reduce_step(schedule::output(0),
                                          {schedule::local(schedule::input(0)), schedule::from(1)}, true)}};
    return schedule::Schedule{
        .scratch_cells = 1,
        .steps = {schedule::copy(schedule::output(0), schedule::input(0)),
                  schedule::reduce_step(schedule::scratch(0, 0),
                                        {schedule::from(0), schedule::local(schedule::input(0))}, true),
                  schedule::send(0, schedule::output(0)),
                  schedule::copy(schedule::output(0), schedule::scratch(0, 0))}};
  };
  EXPECT_EQ(schedule::verify(reads_the_output, all_reduce, 2, 0, schedule::InPlace::none).error, "");
}

TEST(Verifier, ElidesScratchCopies) {
  schedule::Schedule s{
      .scratch_cells = 1,
      .steps = {schedule::reduce_step(schedule::scratch(0, 0),
                                      {schedule::local(schedule::input(0)), schedule::from(1)}, true),
                schedule::send(1, schedule::input(0)),
                schedule::copy(schedule::output(0), schedule::scratch(0, 0))}};
  schedule::elide_scratch_copies(s);
  ASSERT_EQ(s.steps.size(), 2u);
  EXPECT_EQ(s.steps[0].chunk, schedule::output(0));
  EXPECT_TRUE(s.steps[0].final);
}

TEST(Verifier, ReportsDepthAndRankOrder) {
  const auto chain = [](schedule::RankContext context) {
    if (context.rank < 2) {
      schedule::Schedule s;
      if (context.rank == 1)
        s.steps.push_back(schedule::reduce_step(schedule::output(0),
                                                {schedule::local(schedule::input(0)), schedule::from(0)}));
      s.steps.push_back(
          schedule::send(context.rank + 1, context.rank == 0 ? schedule::input(0) : schedule::output(0)));
      s.steps.push_back(schedule::recv(schedule::output(0), 2));
      return s;
    }
    return schedule::Schedule{
        .steps = {schedule::reduce_step(schedule::output(0),
                                        {schedule::local(schedule::input(0)), schedule::from(1, true)}, true),
                  schedule::send(0, schedule::output(0)), schedule::send(1, schedule::output(0))}};
  };
  const schedule::Verification proof = schedule::verify(chain, all_reduce, 3, 0, schedule::InPlace::all);
  EXPECT_EQ(proof.error, "");
  EXPECT_TRUE(proof.rank_order);  // x2 + (x1 + x0)
  EXPECT_EQ(proof.depth, 3);
  EXPECT_FALSE(schedule::verify(ring, all_reduce, 3, 0, schedule::InPlace::all).rank_order);
}

/// Every rank reduces all contributions in one step.
template <ReductionOrder order>
schedule::Schedule in_one_step(schedule::RankContext context) {
  schedule::Schedule s{.scratch_cells = 1};
  std::vector<schedule::Operand> operands;
  for (int r = 0; r < context.size; ++r) {
    if (r != context.rank) s.steps.push_back(schedule::send(r, schedule::input(0)));
    operands.push_back(r == context.rank ? schedule::local(schedule::input(0)) : schedule::from(r));
  }
  s.steps.push_back(schedule::reduce_step(schedule::scratch(0, 0), operands, true, order));
  s.steps.push_back(schedule::copy(schedule::output(0), schedule::scratch(0, 0)));
  return s;
}

TEST(Verifier, ReportsTheOrderOfSums) {
  for (const int size : {2, 3, 4, 5, 8, 9}) {
    const auto left =
        schedule::verify(in_one_step<ReductionOrder::rank>, all_reduce, size, 0, schedule::InPlace::any);
    const auto tree =
        schedule::verify(in_one_step<ReductionOrder::pairwise>, all_reduce, size, 0, schedule::InPlace::any);
    EXPECT_TRUE(left && left.rank_order && left.rounded_once) << left.error;
    EXPECT_TRUE(tree && tree.pairwise_order && tree.rounded_once) << tree.error;
    EXPECT_EQ(left.pairwise_order, size <= 3);
    EXPECT_EQ(tree.rank_order, size <= 3);
  }
}

}  // namespace
}  // namespace rz
