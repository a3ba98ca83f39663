#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "comm/algorithms/algorithm.h"
#include "comm/core/error.h"

namespace rz {
namespace {

constexpr int largest_group = 65;

bool rooted(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather ||
         c == Collective::scatter;
}
bool may_be_in_place(Collective c) {
  return c != Collective::all_to_all && c != Collective::all_to_all_v && c != Collective::barrier;
}
std::set<int> roots(Collective c, int size) {
  if (!rooted(c)) return {0};
  return {0, size > 1 ? 1 : 0, size - 1};
}

class EveryAlgorithm : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryAlgorithm, IsProved) {
  const Algorithm& a = GetParam();
  bool rank_order = true;  // at every size: up to 3 ranks, a tree has no other
  for (int size = 1; size <= largest_group; ++size)
    for (int root : roots(a.collective, size))
      for (bool in_place : {false, true}) {
        if (in_place && !may_be_in_place(a.collective)) continue;
        const Proof proof = verify(a.schedule, a.collective, size, root, in_place);
        ASSERT_TRUE(proof) << "size " << size << ", root " << root << (in_place ? ", in place: " : ": ")
                           << proof.error;
        rank_order &= proof.rank_order;
      }
  EXPECT_EQ(rank_order, a.rank_order);
}

/// A schedule function has no state of its own, so what to break stands beside it.
struct Mutant {
  const Algorithm* algorithm;
  int rank, step;
} mutant;
Schedule without_a_step(Seat seat) {
  Schedule s = mutant.algorithm->schedule(seat);
  if (seat.rank == mutant.rank) s.steps.erase(s.steps.begin() + mutant.step);
  return s;
}
Schedule with_a_step_twice(Seat seat) {
  Schedule s = mutant.algorithm->schedule(seat);
  if (seat.rank == mutant.rank) s.steps.insert(s.steps.begin() + mutant.step, s.steps[mutant.step]);
  return s;
}

TEST_P(EveryAlgorithm, NeedsEachOfItsSteps) {
  const Algorithm& a = GetParam();
  for (int size : {2, 3, 6})
    for (int rank = 0; rank < size; ++rank) {
      const Schedule whole = a.schedule({rank, size, 0});
      for (int step = 0; step < static_cast<int>(whole.steps.size()); ++step) {
        mutant = {&a, rank, step};
        ASSERT_FALSE(verify(without_a_step, a.collective, size, 0, false)) << rank << ' ' << step;
        const bool talks = std::any_of(whole.steps[step].terms.begin(), whole.steps[step].terms.end(),
                                       [](const Term& t) { return t.peer >= 0; });
        if (talks || whole.steps[step].kind == Step::send) {
          ASSERT_FALSE(verify(with_a_step_twice, a.collective, size, 0, false)) << rank << ' ' << step;
        }
      }
    }
}

std::string title(const testing::TestParamInfo<Algorithm>& info) {
  return std::string(name(info.param.collective)) + "_" + info.param.name;
}
INSTANTIATE_TEST_SUITE_P(List, EveryAlgorithm, testing::ValuesIn(algorithms()), title);

TEST(Algorithms, EveryCollectiveHasOne) {
  std::set<Collective> served;
  for (const Algorithm& a : algorithms()) served.insert(a.collective);
  EXPECT_EQ(served.size(), static_cast<std::size_t>(collective_count - 2));
  EXPECT_FALSE(served.contains(Collective::send));
}

TEST(Algorithms, EveryReductionHasOneInRankOrder) {
  for (Collective c : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce}) {
    const auto list = algorithms();
    EXPECT_TRUE(std::any_of(list.begin(), list.end(), [&](const Algorithm& a) {
      return a.collective == c && a.rank_order;
    })) << name(c);
  }
  for (const Algorithm& a : algorithms()) EXPECT_TRUE(reduces(a.collective) || !a.rank_order) << a.name;
}

int rounds(Collective c, const char* algorithm, int size) {
  return verify(find_algorithm(c, algorithm).schedule, c, size, 0, false).rounds;
}

TEST(Algorithms, RoundsAreThoseOfTheLiterature) {
  EXPECT_EQ(rounds(Collective::all_reduce, "one_shot", 8), 1);
  EXPECT_EQ(rounds(Collective::all_reduce, "two_shot", 8), 2);
  EXPECT_EQ(rounds(Collective::all_reduce, "ring", 8), 14);
  EXPECT_EQ(rounds(Collective::all_reduce, "chain", 8), 14);
  EXPECT_EQ(rounds(Collective::all_reduce, "halving_doubling", 8), 6);
  EXPECT_EQ(rounds(Collective::all_reduce, "halving_doubling", 64), 12);
  EXPECT_EQ(rounds(Collective::all_reduce, "tree", 16), 8);
  EXPECT_EQ(rounds(Collective::broadcast, "tree", 32), 5);
  EXPECT_EQ(rounds(Collective::broadcast, "scatter_all_gather", 33), 2);
  EXPECT_EQ(rounds(Collective::barrier, "dissemination", 65), 7);
}

/// Chunk-sized messages that a rank sends: the traffic that an algorithm promises.
int messages_sent(Collective c, const char* algorithm, Seat seat) {
  int sent = 0;
  for (const Step& step : find_algorithm(c, algorithm).schedule(seat).steps) sent += step.kind == Step::send;
  return sent;
}

TEST(Algorithms, LargeBufferAlgorithmsSendNoMoreThanTheyMust) {
  for (int size : {2, 3, 7, 8, 65})
    for (const char* algorithm : {"ring", "halving_doubling", "two_shot"})
      for (int rank = 0; rank < size; ++rank)
        EXPECT_EQ(messages_sent(Collective::all_reduce, algorithm, {rank, size}), 2 * (size - 1))
            << algorithm;
  EXPECT_EQ(messages_sent(Collective::broadcast, "scatter_all_gather", {0, 9}), 8);
  EXPECT_EQ(messages_sent(Collective::broadcast, "scatter_all_gather", {4, 9}), 7);
}

TEST(Algorithms, AnUnknownNameListsTheChoices) {
  try {
    find_algorithm(Collective::all_reduce, "rign");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_STREQ(e.what(),
                 "all_reduce has no algorithm 'rign'; choose one of one_shot, two_shot, chain, ring, "
                 "halving_doubling, tree");
  }
}

TEST(Algorithms, SendHasNone) { EXPECT_THROW(find_algorithm(Collective::send, "direct"), Error); }

}  // namespace
}  // namespace rz
