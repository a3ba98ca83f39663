// Runs: pure

// The choice of "auto" on devices, as a pure function. tests/emulated_gpu/auto_backend_test.cpp tests that
// groups follow it.

#include "comm/backends/auto_backend.h"

#include <gtest/gtest.h>

namespace rz {
namespace {

/// That many ranks of one node, each with a card of its own and with NCCL.
std::vector<DeviceRank> one_node(int size) {
  std::vector<DeviceRank> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back({"host", "card " + std::to_string(r), 22809, -1});
  return ranks;
}

void expect_choice(const std::vector<DeviceRank>& ranks, const std::string& backend, const std::string& why,
                   bool deterministic = true) {
  const BackendChoice choice = choose_backend(ranks, deterministic);
  EXPECT_EQ(choice.backend, backend);
  EXPECT_EQ(choice.reason, why);
}

TEST(AutoBackend, ARankAloneNeedsNoLibrary) {
  expect_choice(one_node(1), "peer_cuda", "a rank alone");
  expect_choice({{"host", "card", 0, -1}}, "peer_cuda", "a rank alone");
}

TEST(AutoBackend, NcclWhereEveryRankHasItAndAGpu) {
  expect_choice(one_node(2), "nccl", "every rank has a GPU of its own");
  expect_choice(one_node(200), "nccl", "every rank has a GPU of its own");
}

TEST(AutoBackend, NcclNeedsNeitherOneNodeNorPeerAccess) {
  auto ranks = one_node(4);
  ranks[2].node = ranks[3].node = "another";
  ranks[0].unreachable_rank = 1;
  expect_choice(ranks, "nccl", "every rank has a GPU of its own");
}

TEST(AutoBackend, RanksThatShareACardUsePeerCuda) {
  auto ranks = one_node(4);
  ranks[3].gpu_uuid = ranks[1].gpu_uuid;
  expect_choice(ranks, "peer_cuda", "ranks 1 and 3 share a GPU");
}

TEST(AutoBackend, WithoutNcclOnOneRankAllUsePeerCuda) {
  auto ranks = one_node(3);
  ranks[1].nccl_version = 0;
  expect_choice(ranks, "peer_cuda", "rank 1 has no NCCL that serves");
}

TEST(AutoBackend, DifferentVersionsOfNcclDoNotMix) {
  auto ranks = one_node(3);
  ranks[2].nccl_version = 22703;
  expect_choice(ranks, "peer_cuda", "rank 0 has NCCL 2.28.9 and rank 2 2.27.3");
}

TEST(AutoBackend, SumsInRankOrderHaveALimitThatOtherSumsLack) {
  auto ranks = one_node(257);
  expect_choice(ranks, "native",
                "sums in rank order over NCCL serve at most 256 ranks, and the kernels of peer_cuda serve at "
                "most 16 ranks");
  expect_choice(ranks, "nccl", "every rank has a GPU of its own", false);
}

TEST(AutoBackend, HostStagedBetweenNodesWithoutNccl) {
  auto ranks = one_node(2);
  ranks[1].node = "another";
  ranks[0].nccl_version = 0;
  expect_choice(ranks, "native", "rank 0 has no NCCL that serves, and rank 1 is on another node than rank 0");
}

// Only the card's identity distinguishes ranks, whatever the names of their nodes: NCCL rejects two ranks on
// one card.
TEST(AutoBackend, HostStagedWhereRanksOfTwoNodesShareACard) {
  auto ranks = one_node(2);
  ranks[1].node = "another";
  ranks[1].gpu_uuid = ranks[0].gpu_uuid;
  expect_choice(ranks, "native", "ranks 0 and 1 share a GPU, and rank 1 is on another node than rank 0");
}

TEST(AutoBackend, HostStagedWithoutPeerAccess) {
  auto ranks = one_node(3);
  ranks[2].nccl_version = 0;
  ranks[1].unreachable_rank = 2;
  expect_choice(ranks, "native",
                "rank 2 has no NCCL that serves, and rank 1's GPU does not reach the memory of rank 2's");
}

TEST(AutoBackend, HostStagedForMoreRanksThanPeerCudaServes) {
  auto ranks = one_node(17);
  ranks[16].gpu_uuid = ranks[0].gpu_uuid;
  expect_choice(ranks, "native",
                "ranks 0 and 16 share a GPU, and the kernels of peer_cuda serve at most 16 ranks");
  ranks.pop_back();
  ranks[15].gpu_uuid = ranks[0].gpu_uuid;
  expect_choice(ranks, "peer_cuda", "ranks 0 and 15 share a GPU");
}

}  // namespace
}  // namespace rz
