/// Meshes: sizes from "auto", places of ranks, and collectives along each dimension.
#include "sharding/parallel/mesh.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using Ranks = std::vector<std::int32_t>;

// ---- sizes

TEST(MeshSizes, AutoTakesWhatIsLeft) {
  EXPECT_EQ(resolved({}, 8, 0), (MeshSizes{1, 8, 1}));
  EXPECT_EQ(resolved({.replicate = 2}, 8, 0), (MeshSizes{2, 4, 1}));
  EXPECT_EQ(resolved({.replicate = 0, .shard = 4}, 8, 0), (MeshSizes{2, 4, 1}));
  EXPECT_EQ(resolved({.tp = 2}, 8, 0), (MeshSizes{1, 4, 2}));
  EXPECT_EQ(resolved({.shard = 2, .tp = 0}, 8, 0), (MeshSizes{1, 2, 4}));
  EXPECT_EQ(resolved({.shard = 8, .tp = 0}, 8, 0), (MeshSizes{1, 8, 1}));
  EXPECT_EQ(resolved({2, 2, 2}, 8, 0), (MeshSizes{2, 2, 2}));
}

TEST(MeshSizes, TheInnerOfTwoAutosFillsANode) {
  EXPECT_EQ(resolved({.shard = 0, .tp = 0}, 16, 8), (MeshSizes{1, 2, 8}));
  EXPECT_EQ(resolved({.replicate = 0, .shard = 0}, 16, 8), (MeshSizes{2, 8, 1}));
  EXPECT_EQ(resolved({.replicate = 0, .shard = 0, .tp = 2}, 16, 8), (MeshSizes{2, 4, 2}));
  EXPECT_EQ(resolved({.replicate = 2, .shard = 0, .tp = 0}, 16, 4), (MeshSizes{2, 2, 4}));
  EXPECT_EQ(resolved({.shard = 0, .tp = 0}, 4, 4), (MeshSizes{1, 1, 4}));
}

void expect_refused(const MeshSizes& sizes, int ranks, int ranks_per_node, const std::string& message) {
  const Error error = test::error_of([&] { resolved(sizes, ranks, ranks_per_node); });
  EXPECT_EQ(error.code(), Errc::config);
  EXPECT_EQ(std::string(error.what()), message);
}

TEST(MeshSizes, ErrorsHaveTheNumbersAndWhatWouldFit) {
  expect_refused({2, 3, 1}, 8, 0,
                 "mesh replicate 2 x shard 3 on 8 ranks: the product of the sizes is 6; what would fit: "
                 "shard 4");
  expect_refused(
      {1, 0, 3}, 8, 0,
      "mesh shard auto x tp 3 on 8 ranks: the product of the sizes is 3, which does not divide the "
      "ranks; what would fit: tp 1, 2, 4 or 8");
  expect_refused({4, 0, 3}, 64, 0,
                 "mesh replicate 4 x shard auto x tp 3 on 64 ranks: the product of the sizes is 12, which "
                 "does not divide the ranks; what would fit: tp 1, 2, 4, 8 or 16");
  expect_refused({1, 0, 7}, 720, 0,
                 "mesh shard auto x tp 7 on 720 ranks: the product of the sizes is 7, which does not divide "
                 "the ranks; what would fit: tp 6 or 8");
  expect_refused({1, 3, 3}, 8, 0, "mesh shard 3 x tp 3 on 8 ranks: the product of the sizes is 9");
  expect_refused({-2, 0, 1}, 8, 0,
                 "mesh replicate -2 x shard auto on 8 ranks: replicate is -2, expected 1 or more, or 0, "
                 "\"auto\"");
  expect_refused({0, 0, 0}, 8, 8,
                 "mesh replicate auto x shard auto x tp auto on 8 ranks: at most two sizes can be \"auto\"");
  expect_refused({1, 0, 0}, 8, 0,
                 "mesh shard auto x tp auto on 8 ranks: tp \"auto\" fills a node, but nodes have different "
                 "numbers of ranks; give it a number");
  expect_refused({0, 0, 3}, 8, 4,
                 "mesh replicate auto x shard auto x tp 3 on 8 ranks: shard \"auto\" fills a node, but the 4 "
                 "ranks of a node are not a multiple of 3");
  expect_refused(
      {2147483647, 2147483647, 2147483647}, 8, 0,
      "mesh replicate 2147483647 x shard 2147483647 x tp 2147483647 on 8 ranks: replicate 2147483647 "
      "is more than the ranks");
}

// ---- groups

/// The ranks of a group, in its order, as they gather their ranks of the whole mesh.
Ranks members(const Mesh& mesh, Communicator* group) {
  const std::int32_t mine = mesh.communicator().rank();
  if (!group) return {mine};
  Ranks all(static_cast<std::size_t>(group->size()));
  group->all_gather(ConstBuffer(&mine, 1), Buffer(all.data(), all.size())).wait();
  return all;
}

class MeshGroups : public testing::TestWithParam<MeshSizes> {};

/// Those ranks of a grid whose coordinates satisfy a condition, from the definition of row-major order.
template <class Condition>
Ranks ranks_where(const MeshSizes& s, const Condition& condition) {
  Ranks out;
  for (int r = 0, rank = 0; r < s.replicate; ++r)
    for (int d = 0; d < s.shard; ++d)
      for (int t = 0; t < s.tp; ++t, ++rank)
        if (condition(r, d, t)) out.push_back(rank);
  return out;
}

TEST_P(MeshGroups, DifferInTheirOwnCoordinatesOnly) {
  const MeshSizes& sizes = GetParam();
  lab::group(sizes.ranks(), [&](Communicator& comm) {
    const Mesh mesh(comm, sizes);
    const int replica = mesh.replica().rank, shard = mesh.shard().rank(), part = mesh.part().rank;
    EXPECT_EQ((replica * sizes.shard + shard) * sizes.tp + part, comm.rank());
    EXPECT_EQ(mesh.replica().ranks, sizes.replicate);
    EXPECT_EQ(mesh.part().ranks, sizes.tp);
    EXPECT_EQ(members(mesh, &mesh.data()), ranks_where(sizes, [&](int, int, int t) { return t == part; }));
    EXPECT_EQ(members(mesh, &mesh.shard()),
              ranks_where(sizes, [&](int r, int, int t) { return r == replica && t == part; }));
    EXPECT_EQ(members(mesh, mesh.replicas()),
              ranks_where(sizes, [&](int, int d, int t) { return d == shard && t == part; }));
    EXPECT_EQ(members(mesh, mesh.tp()),
              ranks_where(sizes, [&](int r, int d, int) { return r == replica && d == shard; }));
    EXPECT_EQ(mesh.replicas() == nullptr, sizes.replicate == 1);
    EXPECT_EQ(mesh.tp() == nullptr, sizes.tp == 1);
  });
}

INSTANTIATE_TEST_SUITE_P(, MeshGroups,
                         testing::Values(MeshSizes{1, 4, 1}, MeshSizes{2, 2, 1}, MeshSizes{2, 3, 1},
                                         MeshSizes{3, 2, 1}, MeshSizes{4, 1, 1}, MeshSizes{1, 2, 2},
                                         MeshSizes{2, 1, 2}, MeshSizes{1, 1, 4}, MeshSizes{2, 2, 2}),
                         [](const auto& test) {
                           const MeshSizes& s = test.param;
                           return "replicate" + std::to_string(s.replicate) + "shard" +
                                  std::to_string(s.shard) + "tp" + std::to_string(s.tp);
                         });

TEST(Mesh, ACommunicatorIsAMeshOfShards) {
  lab::group(4, [](Communicator& comm) {
    const Mesh mesh = comm;
    EXPECT_EQ(describe(mesh.sizes()), "shard 4");
    EXPECT_EQ(&mesh.shard(), &comm);
    EXPECT_EQ(&mesh.data(), &comm);
    EXPECT_EQ(mesh.replica(), RankOf{});
    EXPECT_EQ(mesh.part(), RankOf{});
  });
}

TEST(Mesh, CopiesShareTheirCommunicators) {
  lab::group(4, [](Communicator& comm) {
    std::optional<Mesh> first(std::in_place, comm, MeshSizes{.replicate = 2});
    const Mesh copy = *first;
    EXPECT_EQ(&copy.shard(), &first->shard());
    first.reset();
    EXPECT_EQ(members(copy, &copy.shard()), (Ranks{comm.rank() / 2 * 2, comm.rank() / 2 * 2 + 1}));
  });
}

TEST(Mesh, SizesThatDifferOverTheRanksAreAMismatch) {
  lab::group(4, [](Communicator& comm) {
    const Error error = test::error_of([&] { Mesh(comm, {.tp = comm.rank() == 2 ? 4 : 2}); });
    EXPECT_EQ(error.code(), Errc::mismatch);
    EXPECT_EQ(error.culprit(), 2);
    EXPECT_NE(std::string(error.what()).find("shard 1 x tp 4"), std::string::npos) << error.what();
  });
}

/// Values after three updates.
std::vector<std::vector<float>> trained(StrategyKind kind, const Mesh& mesh) {
  test::Replica replica(kind, mesh);
  for (int i = 0; i < 3; ++i) replica.update();
  std::vector<std::vector<float>> out;
  for (const Parameter* p : replica.model.parameters()) out.push_back(test::values_of(*replica.strategy, *p));
  return out;
}

TEST(Mesh, AStrategyTrainsOnOneOfShards) {
  lab::group(4, [](Communicator& comm) {
    for (const StrategyKind kind : test::kinds)
      EXPECT_EQ(trained(kind, Mesh(comm, {.shard = 4})), trained(kind, comm)) << name(kind);
  });
}

}  // namespace
}  // namespace rz
