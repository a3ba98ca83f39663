// Runs: pure

#include "comm/tuning/select.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "comm/core/error.h"
#include "tests/proof/verify.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

std::vector<tuning::SelectionQuery> queries() {
  std::vector<tuning::SelectionQuery> all;
  for (int c = 0; c < collective_count; ++c) {
    if (Collective(c) == Collective::send || Collective(c) == Collective::recv) continue;
    for (std::size_t bytes :
         {0ul, 1ul, 8ul, 1000ul, 1ul << 14, (1ul << 16) + 1, 1ul << 20, 3ul << 20, 1ul << 28, ~0ul})
      for (int size : {1, 2, 3, 8, 9, 65, 100000})
        for (bool one_node : {false, true})
          for (bool deterministic : {false, true})
            for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise}) {
              all.push_back({Collective(c), bytes, size, one_node, deterministic, ""});
              all.back().order = order;
            }
  }
  return all;
}

TEST(Select, SelectsAnAlgorithmForEveryQuery) {
  for (const tuning::SelectionQuery& q : queries()) EXPECT_EQ(tuning::select(q).collective, q.collective);
}

TEST(Select, DeterministicSumsInTheGroupsOrder) {
  for (const tuning::SelectionQuery& q : queries())
    if (q.deterministic && traits(q.collective).reduces) {
      EXPECT_TRUE(tuning::select(q).reduces_in(q.order))
          << name(q.collective) << ' ' << q.bytes << ' ' << q.size << ' ' << name(q.order);
    }
}

// A sum in one step rounds small floats once, so their results do not depend on the size of a bucket either.
TEST(Select, DeterministicRoundsOnce) {
  for (tuning::SelectionQuery q : queries()) {
    if (!q.deterministic || !traits(q.collective).reduces || q.size > 65) continue;
    q.rounds_partials = true;
    for (const schedule::Step& step : tuning::select(q).schedule({0, q.size, 0}).steps)
      if (step.kind == schedule::Step::reduce && (step.final || step.operands.size() > 1)) {
        EXPECT_TRUE(step.final);
        EXPECT_EQ(step.operands.size(), static_cast<std::size_t>(q.size));
      }
  }
}

TEST(Select, EveryChoiceIsProvedForItsGroup) {
  for (const tuning::SelectionQuery& q : queries())
    if (q.size <= 9) {
      const schedule::Verification proof =
          schedule::verify(tuning::select(q).schedule, q.collective, q.size, 0, schedule::InPlace::none);
      ASSERT_TRUE(proof) << proof.error;
    }
}

TEST(Select, IsAPureFunction) {
  for (const tuning::SelectionQuery& q : queries()) EXPECT_EQ(&tuning::select(q), &tuning::select(q));
}

TEST(Select, SmallAndLargeBuffersUseDifferentAlgorithms) {
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 8, 2}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 25 << 20, 2}).name, "two_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 64 << 10, 2, false}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 1 << 20, 2, false}).name, "two_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 32 << 10, 4, false}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 64 << 10, 3, false}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 64 << 10, 4, false}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 48 << 10, 5, false}).name, "one_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 256 << 10, 4, false}).name, "two_shot");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 8, 64, false, false}).name, "tree");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 1 << 20, 64, false, false}).name, "halving_doubling");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 25 << 20, 64, false, false}).name, "ring");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 25 << 20, 64, false, true}).name, "two_shot");
  EXPECT_STREQ(tuning::select({Collective::broadcast, 1 << 20, 4}).name, "scatter_all_gather");
}

TEST(Select, AForcedNameWins) {
  for (const schedule::Algorithm& a : schedule::algorithms())
    for (std::size_t bytes : {8, 1 << 28}) {
      const tuning::SelectionQuery q{a.collective, bytes, 4, true, a.rank_order, a.name};
      EXPECT_EQ(&tuning::select(q), &a) << a.name;
    }
}

void expect_config_error(const tuning::SelectionQuery& q, std::initializer_list<std::string> parts) {
  test::expect_refused([&] { tuning::select(q); }, Errc::config, parts);
}

TEST(Select, AForcedNameThatDoesNotExistListsTheChoices) {
  expect_config_error({Collective::all_reduce, 8, 2, true, true, "rnig"},
                      {"'rnig'", "ring", "two_shot", "chain"});
}

TEST(Select, AForcedNameOutOfRankOrderIsRefusedWhenDeterministic) {
  expect_config_error({Collective::all_reduce, 8, 2, true, true, "ring"},
                      {"'ring'", "rank order", "choose one of one_shot, two_shot, chain,", "deterministic"});
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 8, 2, true, false, "ring"}).name, "ring");
}

TEST(Select, AForcedNameOutOfPairwiseOrderIsRefused) {
  tuning::SelectionQuery q{Collective::all_reduce, 8, 4, true, true, "chain"};
  q.order = ReductionOrder::pairwise;
  expect_config_error(q,
                      {"'chain'", "pairwise order",
                       "choose one of one_shot, two_shot, tree, recursive_doubling, distance_doubling, or"});
  q.override_name = "tree";
  EXPECT_STREQ(tuning::select(q).name, "tree");
}

// Placements of eight ranks: on two nodes, on eight nodes, and all on one.
tuning::SelectionQuery over_nodes(Collective c, std::size_t bytes, int nodes) {
  tuning::SelectionQuery q{c, bytes, 8, nodes == 1};
  q.nodes = nodes;
  return q;
}

TEST(Select, MultiRankNodesUseAHierarchicalAlgorithm) {
  EXPECT_STREQ(tuning::select(over_nodes(Collective::all_reduce, 1 << 16, 4)).name, "hierarchical_chain");
  EXPECT_STREQ(tuning::select(over_nodes(Collective::all_reduce, 64 << 20, 4)).name,
               "hierarchical_chain_all_gather");
  for (const std::size_t bytes : {std::size_t{1} << 16, std::size_t{64} << 20}) {
    EXPECT_STREQ(tuning::select(over_nodes(Collective::all_gather, bytes, 2)).name, "hierarchical");
    for (const int nodes : {1, 8})
      for (const Collective c : {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                                 Collective::broadcast, Collective::reduce})
        EXPECT_FALSE(tuning::select(over_nodes(c, bytes, nodes)).is(schedule::hierarchical))
            << name(c) << ' ' << nodes;
  }
}

TEST(Select, PairwiseOrderHasAlgorithmsForSmallAndLargeBuffersBetweenNodes) {
  const auto selected = [](Collective c, std::size_t bytes, int ranks, int nodes) {
    tuning::SelectionQuery q{c, bytes, ranks, false};
    q.nodes = nodes, q.order = ReductionOrder::pairwise;
    return std::string(tuning::select(q).name);
  };
  EXPECT_EQ(selected(Collective::all_reduce, 8, 8, 4), "recursive_doubling");
  EXPECT_EQ(selected(Collective::all_reduce, 64 << 20, 8, 4), "distance_doubling");
  EXPECT_EQ(selected(Collective::all_reduce, 8, 4, 4), "one_shot");
  EXPECT_EQ(selected(Collective::all_reduce, 64 << 20, 4, 4), "two_shot");
  EXPECT_EQ(selected(Collective::all_reduce, 8, 64, 64), "tree");
  EXPECT_EQ(selected(Collective::all_reduce, 1 << 20, 64, 64), "distance_doubling");
  EXPECT_EQ(selected(Collective::reduce_scatter, 64 << 20, 8, 4), "distance_doubling");
  EXPECT_EQ(selected(Collective::reduce_scatter, 1 << 20, 64, 64), "distance_doubling");
  EXPECT_EQ(selected(Collective::reduce, 8, 64, 64), "tree");
  EXPECT_EQ(selected(Collective::reduce, 64 << 20, 8, 4), "distance_doubling");
}

TEST(Select, RankOrderedHierarchyNeedsContiguousNodes) {
  for (int c = 0; c < collective_count; ++c) {
    if (Collective(c) == Collective::send || Collective(c) == Collective::recv) continue;
    for (const bool deterministic : {false, true})
      for (std::size_t bytes = 1; bytes < std::size_t{1} << 30; bytes *= 8) {
        tuning::SelectionQuery q = over_nodes(Collective(c), bytes, 2);
        q.contiguous_nodes = false, q.deterministic = deterministic;
        EXPECT_FALSE(tuning::select(q).is(schedule::contiguous_nodes)) << name(q.collective) << ' ' << bytes;
      }
  }
}

TEST(Select, PartialSumsAreNotRounded) {
  for (const Collective c : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce})
    for (std::size_t bytes = 1; bytes < std::size_t{1} << 30; bytes *= 8) {
      tuning::SelectionQuery q = over_nodes(c, bytes, 2);
      q.rounds_partials = true;
      EXPECT_FALSE(tuning::select(q).is(schedule::rounds_partials)) << name(c) << ' ' << bytes;
    }
}

TEST(Select, AForcedNameThatThePlacementForbidsIsRefused) {
  tuning::SelectionQuery q = over_nodes(Collective::all_reduce, 8, 2);
  q.override_name = "hierarchical_chain";
  EXPECT_STREQ(tuning::select(q).name, "hierarchical_chain");
  q.contiguous_nodes = false;
  expect_config_error(q, {"'hierarchical_chain'", "consecutive ranks"});
}

TEST(Select, SendHasNoAlgorithm) {
  EXPECT_THROW(tuning::select({Collective::send, 8, 2}), Error);
  EXPECT_THROW(tuning::select({Collective::all_reduce, 8, 0}), Error);
}

}  // namespace
}  // namespace rz
