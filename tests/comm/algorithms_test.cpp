// Runs: ci pure computes
// Not under sanitizers: EveryAlgorithm[.]IsVerified

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <set>

#include "comm/core/error.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/algorithms/node_map.h"
#include "tests/proof/verify.h"

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

/// Ranks on each node, node after node, as RankContext::node_of_rank.
std::vector<int> nodes_of(std::initializer_list<int> ranks) {
  std::vector<int> node;
  for (const int n : ranks)
    node.insert(node.end(), static_cast<std::size_t>(n), node.empty() ? 0 : node.back() + 1);
  return node;
}

/// Placements of a group's ranks: for most algorithms they make no difference.
std::vector<std::vector<int>> placements(const schedule::Algorithm& a, int size) {
  std::vector<std::vector<int>> all{{}};
  if (!a.is(schedule::hierarchical) || (size > 20 && size < 64)) return all;
  const auto each = [&](auto node_of_rank) {
    std::vector<int> node;
    for (int r = 0; r < size; ++r) node.push_back(node_of_rank(r));
    all.push_back(node);
  };
  for (const int per_node : {1, 2, 3, 4, 8, 32}) each([&](int r) { return r / per_node; });
  each([&](int r) { return r == size - 1 ? 1 : 0; });
  each([&](int r) { return r == 0 ? 0 : 1; });
  each([](int r) { return std::bit_width(static_cast<unsigned>(r + 1)) - 1; });  // 1, 2, 4, … ranks
  if (size == 1) all.resize(2);
  return all;
}

class EveryAlgorithm : public testing::TestWithParam<schedule::Algorithm> {};

/// Verifies every size, placement and root, with RankContext::order as given. The result is in an order if
/// all are: for up to 3 ranks there is only one.
schedule::Verification verify_all(const schedule::Algorithm& a, ReductionOrder order) {
  schedule::Verification all{.rank_order = true, .pairwise_order = true, .rounded_once = true};
  for (int size = 1; size <= largest_group; ++size)
    for (const std::vector<int>& node : placements(a, size))
      for (int root : roots(a.collective, size)) {
        const schedule::InPlace in_place =
            may_be_in_place(a.collective) ? schedule::InPlace::any : schedule::InPlace::none;
        const schedule::Verification proof =
            schedule::verify(a.schedule, a.collective, size, root, in_place, node, order);
        EXPECT_TRUE(proof) << "size " << size << ", root " << root << ", nodes "
                           << testing::PrintToString(node) << ": " << proof.error;
        if (!proof) return proof;
        all.rank_order &= proof.rank_order;
        all.pairwise_order &= proof.pairwise_order;
        all.rounded_once &= proof.rounded_once;
      }
  return all;
}

TEST_P(EveryAlgorithm, IsVerified) {
  const schedule::Algorithm& a = GetParam();
  const schedule::Verification proof = verify_all(a, ReductionOrder::rank);
  EXPECT_EQ(proof.rank_order, a.rank_order);
  EXPECT_EQ(proof.rounded_once, a.rank_order && !a.is(schedule::rounds_partials));
}

TEST_P(EveryAlgorithm, IsVerifiedInPairwiseOrder) {
  const schedule::Algorithm& a = GetParam();
  if (!traits(a.collective).reduces) return;
  const schedule::Verification proof = verify_all(a, ReductionOrder::pairwise);
  EXPECT_EQ(proof.pairwise_order, a.reduces_in(ReductionOrder::pairwise));
  EXPECT_EQ(proof.rounded_once, a.reduces_in(ReductionOrder::pairwise) && !a.is(schedule::rounds_partials));
}

const std::vector<int> taking_turns{0, 1, 0, 1, 0, 1}, by_threes_mixed{0, 0, 1, 1, 1, 0},
    three_nodes_mixed{0, 1, 1, 2, 0, 2, 2, 1, 2};

TEST_P(EveryAlgorithm, IsVerifiedOrRefusedWhereNodesHoldNoConsecutiveRanks) {
  const schedule::Algorithm& a = GetParam();
  for (const std::vector<int>& node : {taking_turns, by_threes_mixed, three_nodes_mixed})
    for (int root : roots(a.collective, static_cast<int>(node.size()))) {
      const schedule::Verification proof = schedule::verify(
          a.schedule, a.collective, static_cast<int>(node.size()), root, schedule::InPlace::none, node);
      if (a.is(schedule::contiguous_nodes)) {
        EXPECT_NE(proof.error.find("consecutive ranks"), std::string::npos) << proof.error;
      } else {
        EXPECT_TRUE(proof) << proof.error;
      }
    }
}

/// A schedule function has no state, so the step to break is a global.
struct Mutant {
  const schedule::Algorithm* algorithm;
  int rank, step;
} mutant;
schedule::Schedule without_a_step(schedule::RankContext context) {
  schedule::Schedule s = mutant.algorithm->schedule(context);
  if (context.rank == mutant.rank) s.steps.erase(s.steps.begin() + mutant.step);
  return s;
}
schedule::Schedule with_a_step_twice(schedule::RankContext context) {
  schedule::Schedule s = mutant.algorithm->schedule(context);
  if (context.rank == mutant.rank) s.steps.insert(s.steps.begin() + mutant.step, s.steps[mutant.step]);
  return s;
}

TEST_P(EveryAlgorithm, NeedsEachOfItsSteps) {
  const schedule::Algorithm& a = GetParam();
  for (int size : {2, 3, 6})
    for (int rank = 0; rank < size; ++rank) {
      std::vector<int> node;
      for (int r = 0; r < size && a.is(schedule::hierarchical); ++r) node.push_back(r / 2);
      const schedule::Schedule whole = a.schedule({rank, size, 0, node});
      for (int step = 0; step < static_cast<int>(whole.steps.size()); ++step) {
        mutant = {&a, rank, step};
        ASSERT_FALSE(schedule::verify(without_a_step, a.collective, size, 0, schedule::InPlace::none, node))
            << rank << ' ' << step;
        const bool receives =
            std::any_of(whole.steps[step].operands.begin(), whole.steps[step].operands.end(),
                        [](const schedule::Operand& t) { return t.peer >= 0; });
        if (receives || whole.steps[step].kind == schedule::Step::send) {
          ASSERT_FALSE(
              schedule::verify(with_a_step_twice, a.collective, size, 0, schedule::InPlace::none, node))
              << rank << ' ' << step;
        }
      }
    }
}

std::string title(const testing::TestParamInfo<schedule::Algorithm>& info) {
  return std::string(name(info.param.collective)) + "_" + info.param.name;
}
INSTANTIATE_TEST_SUITE_P(List, EveryAlgorithm, testing::ValuesIn(schedule::algorithms()), title);

TEST(Algorithms, EveryCollectiveHasOne) {
  std::set<Collective> served;
  for (const schedule::Algorithm& a : schedule::algorithms()) served.insert(a.collective);
  EXPECT_EQ(served.size(), static_cast<std::size_t>(collective_count - 2));
  EXPECT_FALSE(served.contains(Collective::send));
}

// Without a partial sum, so for 8- and 16-bit floats, too.
TEST(Algorithms, EveryReductionHasOneInEachOrder) {
  for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise}) {
    for (Collective c : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce}) {
      const auto list = schedule::algorithms();
      EXPECT_TRUE(std::any_of(list.begin(), list.end(), [&](const schedule::Algorithm& a) {
        return a.collective == c && a.reduces_in(order) && !a.is(schedule::rounds_partials);
      })) << name(c);
    }
    for (const schedule::Algorithm& a : schedule::algorithms())
      EXPECT_TRUE(traits(a.collective).reduces || !a.reduces_in(order)) << a.name;
  }
}

int depth(Collective c, const char* algorithm, int size) {
  return schedule::verify(schedule::find_algorithm(c, algorithm).schedule, c, size, 0,
                          schedule::InPlace::none)
      .depth;
}

TEST(Algorithms, RoundsAreThoseOfTheLiterature) {
  EXPECT_EQ(depth(Collective::all_reduce, "one_shot", 8), 1);
  EXPECT_EQ(depth(Collective::all_reduce, "two_shot", 8), 2);
  EXPECT_EQ(depth(Collective::all_reduce, "ring", 8), 14);
  EXPECT_EQ(depth(Collective::all_reduce, "chain", 8), 14);
  EXPECT_EQ(depth(Collective::all_reduce, "halving_doubling", 8), 6);
  EXPECT_EQ(depth(Collective::all_reduce, "halving_doubling", 64), 12);
  EXPECT_EQ(depth(Collective::all_reduce, "tree", 16), 8);
  EXPECT_EQ(depth(Collective::reduce, "tree", 16), 4);
  EXPECT_EQ(depth(Collective::all_reduce, "recursive_doubling", 64), 6);
  EXPECT_EQ(depth(Collective::all_reduce, "recursive_doubling", 65), 7);
  EXPECT_EQ(depth(Collective::all_reduce, "distance_doubling", 64), 12);
  EXPECT_EQ(depth(Collective::reduce_scatter, "distance_doubling", 64), 6);
  EXPECT_EQ(depth(Collective::broadcast, "tree", 32), 5);
  EXPECT_EQ(depth(Collective::broadcast, "scatter_all_gather", 33), 2);
  EXPECT_EQ(depth(Collective::barrier, "dissemination", 65), 7);
}

/// Chunk-sized messages that a rank sends: the algorithm's traffic.
int messages_sent(Collective c, const char* algorithm, schedule::RankContext context) {
  int sent = 0;
  for (const schedule::Step& step : schedule::find_algorithm(c, algorithm).schedule(context).steps)
    sent += step.kind == schedule::Step::send;
  return sent;
}

TEST(Algorithms, LargeBufferAlgorithmsSendNoMoreThanTheyMust) {
  for (int size : {2, 3, 7, 8, 65})
    for (const char* algorithm : {"ring", "halving_doubling", "two_shot"})
      for (int rank = 0; rank < size; ++rank)
        EXPECT_EQ(messages_sent(Collective::all_reduce, algorithm, {rank, size}), 2 * (size - 1))
            << algorithm;
  for (int size : {2, 8, 64})
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(messages_sent(Collective::all_reduce, "distance_doubling", {rank, size}), 2 * (size - 1));
      EXPECT_EQ(messages_sent(Collective::reduce_scatter, "distance_doubling", {rank, size}), size - 1);
    }
  EXPECT_EQ(messages_sent(Collective::broadcast, "scatter_all_gather", {0, 9}), 8);
  EXPECT_EQ(messages_sent(Collective::broadcast, "scatter_all_gather", {4, 9}), 7);
}

/// Bytes that the ranks of one node send to other nodes, in units of the whole buffer, as a fraction.
double out_of_a_node(Collective c, const char* algorithm, const std::vector<int>& node, int which) {
  double sent = 0;
  const int size = static_cast<int>(node.size());
  for (int r = 0; r < size; ++r) {
    const schedule::Schedule s = schedule::find_algorithm(c, algorithm).schedule({r, size, 0, node});
    for (const schedule::Step& step : s.steps)
      if (step.kind == schedule::Step::send && node[static_cast<std::size_t>(r)] == which &&
          node[static_cast<std::size_t>(step.peer)] != which)
        sent += 1.0 / s.chunks;
  }
  return sent;
}

TEST(Algorithms, HierarchicalAlgorithmsSendABufferOncePerNode) {
  const auto two = nodes_of({4, 4}), four = nodes_of({2, 2, 2, 2}), unequal = nodes_of({1, 2, 4});
  constexpr auto all_reduce = Collective::all_reduce;
  EXPECT_EQ(out_of_a_node(all_reduce, "two_shot", two, 0), 4);
  EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical", two, 0), 1);
  for (const int node : {0, 1}) EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain", two, node), 1);
  EXPECT_EQ(out_of_a_node(all_reduce, "two_shot", four, 1), 3);
  EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical", four, 1), 1.5);
  for (const int node : {0, 3}) EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain", four, node), 1);
  for (const int node : {1, 2}) EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain", four, node), 2);
  for (const int node : {0, 1, 2, 3})
    EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain_all_gather", four, node), 1.5) << node;
  EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain_all_gather", two, 1), 1);
  EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain", unequal, 1), 2);
  EXPECT_EQ(out_of_a_node(all_reduce, "hierarchical_chain", unequal, 2), 1);
  EXPECT_EQ(out_of_a_node(all_reduce, "distance_doubling", two, 1), 1);
  for (const int node : {0, 1, 2, 3}) {
    EXPECT_EQ(out_of_a_node(all_reduce, "distance_doubling", four, node), 1.5) << node;
    EXPECT_EQ(out_of_a_node(Collective::reduce_scatter, "distance_doubling", four, node), 0.75) << node;
  }

  EXPECT_EQ(out_of_a_node(Collective::reduce_scatter, "linear", two, 0), 2);
  EXPECT_EQ(out_of_a_node(Collective::reduce_scatter, "hierarchical_chain", two, 0), 1);
  EXPECT_EQ(out_of_a_node(Collective::reduce_scatter, "hierarchical_chain", two, 1), 0.5);
  EXPECT_EQ(out_of_a_node(Collective::reduce_scatter, "hierarchical", two, 0), 0.5);
  EXPECT_EQ(out_of_a_node(Collective::all_gather, "linear", two, 0), 2);
  EXPECT_EQ(out_of_a_node(Collective::all_gather, "hierarchical", two, 0), 0.5);
  EXPECT_EQ(out_of_a_node(Collective::broadcast, "hierarchical_chain", four, 0), 1);
  EXPECT_EQ(out_of_a_node(Collective::broadcast, "hierarchical_chain", four, 3), 0);
  EXPECT_EQ(out_of_a_node(Collective::reduce, "hierarchical_chain", four, 2), 1);
  EXPECT_EQ(out_of_a_node(Collective::reduce, "two_shot", two, 1), 2.5);
}

// The relay sends the last chunk of a lane when the other links are idle, so it must be small. Each chunk is
// a message, so there must not be too many.
TEST(Algorithms, TheLastChunkOfALaneBetweenNodesIsSmall) {
  for (int nodes = 3; nodes <= 8; ++nodes) {
    std::vector<int> node;
    for (int h = 0; h < nodes; ++h) node.insert(node.end(), 2, h);
    const schedule::Schedule s =
        schedule::find_algorithm(Collective::all_reduce, "hierarchical_chain_all_gather")
            .schedule({0, 2 * nodes, 0, node});
    EXPECT_GE(s.chunks, 2 * 28) << nodes;
    EXPECT_LE(s.chunks, 2 * 32) << nodes;
  }
}

TEST(Algorithms, NodesAreNumberedWithoutGaps) {
  const std::vector<int> gap{0, 2, 2};
  const schedule::Verification proof =
      schedule::verify(schedule::find_algorithm(Collective::all_gather, "hierarchical").schedule,
                       Collective::all_gather, 3, 0, schedule::InPlace::none, gap);
  EXPECT_EQ(proof.error, "rank 1 is on node 2, but only 1 nodes come before it");
  EXPECT_FALSE(schedule::verify(schedule::find_algorithm(Collective::all_gather, "linear").schedule,
                                Collective::all_gather, 4, 0, schedule::InPlace::none, gap));
}

TEST(Algorithms, AnUnknownNameListsTheChoices) {
  try {
    schedule::find_algorithm(Collective::all_reduce, "rign");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_STREQ(e.what(),
                 "all_reduce has no algorithm 'rign'; choose one of one_shot, two_shot, chain, ring, "
                 "halving_doubling, tree, recursive_doubling, distance_doubling, hierarchical_chain, "
                 "hierarchical_chain_all_gather, hierarchical");
  }
}

TEST(Algorithms, SendHasNone) { EXPECT_THROW(schedule::find_algorithm(Collective::send, "linear"), Error); }

}  // namespace
}  // namespace rz
