/// Meshes of one, two and three dimensions: places of ranks, and collectives along each dimension.
#include "sharding/parallel/mesh.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using Body = std::function<void(Communicator&)>;

void on_ranks(int ranks, const Body& body) {
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(rank, ranks, std::move(store));
    body(comm);
  });
}

/// The ranks along a dimension, as they gather their ranks of the whole group.
std::vector<std::int32_t> line(const Mesh& mesh, std::string_view dimension) {
  Communicator& along = mesh.along(dimension);
  const std::int32_t mine = mesh.communicator().rank();
  std::vector<std::int32_t> all(static_cast<std::size_t>(along.size()));
  along.all_gather(ConstBuffer(&mine, 1), Buffer(all.data(), all.size())).wait();
  return all;
}

struct Grid {
  int ranks;
  std::vector<MeshDimension> dimensions;
};

std::ostream& operator<<(std::ostream& out, const Grid& grid) { return out << describe(grid.dimensions); }

class MeshGrid : public testing::TestWithParam<Grid> {};

/// Line of a rank, from the definition of row-major order.
std::vector<std::int32_t> expected_line(const Grid& grid, int rank, std::size_t dimension) {
  int stride = 1;
  for (std::size_t d = dimension + 1; d < grid.dimensions.size(); ++d) stride *= grid.dimensions[d].size;
  const int size = grid.dimensions[dimension].size;
  const int first = rank / (stride * size) * (stride * size) + rank % stride;
  std::vector<std::int32_t> out;
  for (int i = 0; i < size; ++i) out.push_back(first + i * stride);
  return out;
}

TEST_P(MeshGrid, RanksAreInRowMajorOrder) {
  const Grid& grid = GetParam();
  on_ranks(grid.ranks, [&](Communicator& comm) {
    const Mesh mesh(comm, grid.dimensions);
    int rank = 0;
    for (std::size_t d = 0; d < grid.dimensions.size(); ++d) {
      const auto& [name, size] = grid.dimensions[d];
      EXPECT_EQ(line(mesh, name), expected_line(grid, comm.rank(), d)) << name;
      EXPECT_EQ(mesh.along(name).rank(), mesh.coordinate(name));
      EXPECT_EQ(mesh.along(name).size(), size);
      EXPECT_EQ(mesh.size(name), size);
      rank = rank * size + mesh.coordinate(name);
    }
    EXPECT_EQ(rank, comm.rank());
  });
}

TEST_P(MeshGrid, ReductionsAlongAllDimensionsReduceOverAllRanks) {
  const Grid& grid = GetParam();
  on_ranks(grid.ranks, [&](Communicator& comm) {
    const Mesh mesh(comm, grid.dimensions);
    std::int64_t sum = std::int64_t{1} << comm.rank();
    for (const auto& [name, size] : grid.dimensions) mesh.along(name).all_reduce(Buffer(&sum, 1)).wait();
    EXPECT_EQ(sum, (std::int64_t{1} << grid.ranks) - 1);
  });
}

INSTANTIATE_TEST_SUITE_P(
    , MeshGrid,
    testing::Values(Grid{4, {{"data", 4}}}, Grid{4, {{"replicate", 2}, {"shard", 2}}},
                    Grid{6, {{"replicate", 2}, {"shard", 3}}}, Grid{6, {{"replicate", 3}, {"shard", 2}}},
                    Grid{6, {{"replicate", 1}, {"shard", 6}}}, Grid{8, {{"a", 2}, {"b", 2}, {"c", 2}}},
                    Grid{8, {{"replicate", 2}, {"shard", 4}}}, Grid{8, {{"a", 4}, {"b", 1}, {"c", 2}}}),
    [](const auto& test) {
      std::string name;
      for (const auto& d : test.param.dimensions) name += d.name + std::to_string(d.size);
      return name;
    });

TEST(Mesh, ACommunicatorIsAMeshOfOneDimension) {
  on_ranks(4, [](Communicator& comm) {
    const Mesh mesh = comm;
    ASSERT_EQ(mesh.dimensions().size(), 1u);
    EXPECT_EQ(describe(mesh.dimensions()), "data 4");
    EXPECT_EQ(&mesh.along("data"), &comm);
    EXPECT_EQ(mesh.coordinate("data"), comm.rank());
  });
}

TEST(Mesh, CopiesShareTheirCommunicators) {
  on_ranks(4, [](Communicator& comm) {
    std::optional<Mesh> first(std::in_place, comm, std::vector<MeshDimension>{{"a", 2}, {"b", 2}});
    const Mesh copy = *first;
    EXPECT_EQ(&copy.along("a"), &first->along("a"));
    first.reset();
    EXPECT_EQ(line(copy, "b"), (std::vector<std::int32_t>{comm.rank() / 2 * 2, comm.rank() / 2 * 2 + 1}));
  });
}

void expect_refused(Communicator& comm, std::vector<MeshDimension> dimensions, const std::string& what) {
  const Error error = test::error_of([&] { Mesh(comm, std::move(dimensions)); });
  EXPECT_EQ(error.code(), Errc::invalid_argument);
  EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
}

TEST(Mesh, WrongDimensionsAreRefusedWithTheirNumbers) {
  on_ranks(4, [](Communicator& comm) {
    expect_refused(comm, {}, "no dimensions");
    expect_refused(comm, {{"a", 2}, {"b", 3}}, "a 2 x b 3 has 6 ranks, but the communicator has 4");
    expect_refused(comm, {{"a", 2147483647}, {"b", 2147483647}, {"c", 4}}, "but the communicator has 4");
    expect_refused(comm, {{"a", 2}, {"", 2}}, "dimension 1 of 2 has no name");
    expect_refused(comm, {{"a", 2}, {"b", 1}, {"a", 2}}, "dimensions 0 and 2 are both named \"a\"");
    expect_refused(comm, {{"a", 4}, {"b", 0}}, "\"b\" has size 0, expected 1 or more");
    const Mesh mesh(comm, {{"a", 2}, {"b", 2}});
    const Error unknown = test::error_of([&] { mesh.along("shard"); });
    EXPECT_EQ(unknown.code(), Errc::invalid_argument);
    EXPECT_STREQ(unknown.what(), "Mesh: no dimension is named \"shard\"; the mesh is a 2 x b 2");
  });
}

TEST(Mesh, DimensionsThatDifferOverTheRanksAreAMismatch) {
  on_ranks(4, [](Communicator& comm) {
    const int first = comm.rank() == 2 ? 4 : 2;
    const Error error = test::error_of([&] { Mesh(comm, {{"a", first}, {"b", 4 / first}}); });
    EXPECT_EQ(error.code(), Errc::mismatch);
    EXPECT_EQ(error.culprit(), 2);
    EXPECT_NE(std::string(error.what()).find("a 4 x b 1"), std::string::npos) << error.what();
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

TEST(Mesh, AStrategyTrainsAlongTheLastDimension) {
  on_ranks(4, [](Communicator& comm) {
    for (const StrategyKind kind : test::kinds) {
      const auto expected = trained(kind, comm);
      EXPECT_EQ(trained(kind, Mesh(comm, {{"replicate", 1}, {"shard", 4}})), expected) << name(kind);
      EXPECT_EQ(trained(kind, Mesh(comm, {{"shard", 4}})), expected) << name(kind);
    }
  });
}

TEST(Mesh, AStrategyOnSeveralDimensionsIsUnsupported) {
  on_ranks(4, [](Communicator& comm) {
    const Mesh mesh(comm, {{"replicate", 2}, {"shard", 2}});
    for (const StrategyKind kind : test::kinds) {
      const Error error = test::error_of([&] { test::Replica(kind, mesh); });
      EXPECT_EQ(error.code(), Errc::unsupported);
      EXPECT_STREQ(error.what(),
                   "a strategy on the mesh replicate 2 x shard 2: it trains along the last dimension, and "
                   "dimension \"replicate\" has 2 ranks, expected 1; hybrid sharding is not supported");
      // Each line trains alone.
      EXPECT_EQ(trained(kind, mesh.along("shard")), trained(kind, mesh.along("replicate"))) << name(kind);
    }
  });
}

}  // namespace
}  // namespace rz
