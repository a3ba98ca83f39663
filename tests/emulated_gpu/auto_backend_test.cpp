// The choice of "auto" for groups on devices, and that every rank makes the same.
// tests/comm/auto_backend_test.cpp tests the decision itself.

#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/emulated_gpu/nccl.h"
#include "tests/lab/group.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::run_ranks;

CommOptions on(int device) {
  CommOptions o;
  o.backend = "auto";
  o.device = {Device::cuda, device};
  o.timeout = std::chrono::seconds(30);
  return o;
}

/// The sum of every rank's 1s is the group's size.
void expect_sums(Communicator& comm) {
  const Stream s = Stream::create(comm.options().device);
  constexpr std::size_t n = 300;
  std::vector<float> values(n, 1);
  const auto memory = comm.allocate_array<float>(n);
  memcpy_async(memory.get(), values.data(), n * sizeof(float), s);
  comm.all_reduce(Buffer(memory.get(), n, s.device()), ReduceOp::sum, s).wait_on(s);
  memcpy_async(values.data(), memory.get(), n * sizeof(float), s);
  EXPECT_EQ(values, std::vector<float>(n, static_cast<float>(comm.size())));
}

class AutoBackend : public testing::Test {
 protected:
  /// Ranks with these options get a backend whose description begins with this, and it works.
  template <class F>
  void expect_picked(int size, const std::string& description, const F& options) {
    lab::group(size, options, [&](Communicator& comm) {
      EXPECT_EQ(comm.describe().find(description), 0u) << "rank " << comm.rank() << ": " << comm.describe();
      expect_sums(comm);
      comm.barrier().wait();
    });
  }
  static std::string ends(const std::string& picked, const std::string& why) {
    return picked + " (chosen: " + why + "), host memory native over ";
  }

  emulated::Schedule schedule;
  emulated::Nccl nccl;
};

TEST_F(AutoBackend, IsNcclWhereEveryRankHasAGpu) {
  lab::group(3, on, [&](Communicator& comm) {
    EXPECT_EQ(comm.describe().find(ends(concat("NCCL 2.28.9 on cuda:", comm.rank(), ", sums in rank order"),
                                        "every rank has a GPU of its own")),
              0u)
        << comm.describe();
    expect_sums(comm);
    // A sub-group decides for itself.
    auto half = comm.split(comm.rank() == 0, 0);
    EXPECT_EQ(half->describe().find(comm.rank() == 0 ? "peer_cuda on cuda:0" : "NCCL"), 0u)
        << half->describe();
    expect_sums(*half);
    comm.barrier().wait();
  });
}

TEST_F(AutoBackend, IsPeerCudaForARankAlone) {
  expect_picked(1, ends("peer_cuda on cuda:2, 2 blocks", "a rank alone"), [](int) { return on(2); });
  EXPECT_EQ(nccl.communicators(), 0);
}

TEST_F(AutoBackend, ARankAloneRunsNoKernelWithoutEffect) {
  Communicator comm = Communicator::connect(0, 1, memory_store(), on(2));
  const Stream s = Stream::create(comm.options().device);
  const std::vector<float> values{1, 2, 3};
  const auto a = comm.allocate_array<float>(3), b = comm.allocate_array<float>(3);
  const Buffer in(a.get(), 3, s.device()), out(b.get(), 3, s.device());
  const auto result = [&](const auto& memory) {
    std::vector<float> now(3);
    memcpy_async(now.data(), memory.get(), 12, s);
    return now;
  };
  memcpy_async(a.get(), values.data(), 12, s);
  const std::size_t before = emulated::launches();
  comm.all_reduce(in, ReduceOp::avg, s).wait();
  comm.all_gather(in, in, s).wait();
  comm.all_reduce(in, out, ReduceOp::sum, s).wait();
  EXPECT_EQ(result(a), values);
  EXPECT_EQ(result(b), values);
  EXPECT_EQ(emulated::launches(), before);
  comm.all_reduce(in, out, ReduceOp::premul(0.5), s).wait();
  EXPECT_EQ(result(b), (std::vector<float>{0.5, 1, 1.5}));
  EXPECT_EQ(emulated::launches(), before + 1);
}

/// Streams share the hardware queues of a card (tests/emulated_gpu/machine.h), and ranks may share the card.
TEST_F(AutoBackend, PeerCudaMakesThreeStreamsARank) {
  const std::size_t before = emulated::streams(2);
  Communicator comm = Communicator::connect(0, 1, memory_store(), on(2));
  EXPECT_EQ(comm.describe().find("peer_cuda"), 0u) << comm.describe();
  static_cast<void>(comm.allocate_symmetric(100));
  EXPECT_EQ(emulated::streams(2) - before, 3u);
}

TEST_F(AutoBackend, IsPeerCudaWhereRanksShareACard) {
  expect_picked(3, ends("peer_cuda on cuda:1, 1 blocks", "ranks 0 and 1 share a GPU"),
                [](int) { return on(1); });
}

TEST_F(AutoBackend, IsPeerCudaWithoutAnNcclThatServes) {
  nccl.version(21000);
  expect_picked(2, "peer_cuda on cuda:", [](int rank) { return on(rank); });
  expect_picked(2, ends("peer_cuda on cuda:3, 1 blocks", "ranks 0 and 1 share a GPU"),
                [](int) { return on(3); });
}

TEST_F(AutoBackend, IsHostStagedBetweenNodesWithoutNccl) {
  nccl.version(21000);
  run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options = on(rank);
    options.host_id = concat("host ", rank);
    Communicator comm = Communicator::connect(rank, 2, store, options);
    const std::string description = comm.describe();
    EXPECT_EQ(description.find(concat("cuda:", rank, " staged through pinned memory over ")), 0u)
        << description;
    EXPECT_NE(description.find(
                  "(chosen: rank 0 has no NCCL that serves, and rank 1 is on another node than rank 0)"),
              std::string::npos)
        << description;
    expect_sums(comm);
    comm.barrier().wait();
  });
}

TEST_F(AutoBackend, IsNcclBetweenNodes) {
  expect_picked(2, "NCCL ", [](int rank) {
    CommOptions options = on(rank);
    options.host_id = concat("host ", rank);
    return options;
  });
}

TEST_F(AutoBackend, LeavesANamedAlgorithmToTheHost) {
  expect_picked(2, "peer_cuda on cuda:0", [](int) {
    CommOptions options = on(0);
    options.algorithm = "ring";
    options.deterministic = false;
    return options;
  });
}

TEST_F(AutoBackend, IsNotUsedOnTheHost) {
  auto options = on(0);
  options.device = {};
  const Communicator comm = Communicator::connect(0, 1, nullptr, options);
  EXPECT_EQ(comm.describe().find("native over "), 0u) << comm.describe();
}

}  // namespace
}  // namespace rz
