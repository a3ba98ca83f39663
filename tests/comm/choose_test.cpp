// What "auto" comes to on devices, as far as it is a pure function. That groups come to it:
// tests/emulated_gpu/auto_backend_test.cpp.

#include "comm/backends/choose.h"

#include <gtest/gtest.h>

namespace rz {
namespace {

/// As many ranks, each on a card of its own and with NCCL, all on one host.
std::vector<RankOnDevice> one_host(int size) {
  std::vector<RankOnDevice> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back({"host", "card " + std::to_string(r), 22809, -1});
  return ranks;
}

void expect_choice(const std::vector<RankOnDevice>& ranks, const std::string& backend, const std::string& why,
                   bool deterministic = true) {
  const BackendChoice choice = choose_backend(ranks, deterministic);
  EXPECT_EQ(choice.backend, backend);
  EXPECT_EQ(choice.why, why);
}

TEST(Choose, ARankAloneNeedsNoLibrary) {
  expect_choice(one_host(1), "peer_cuda", "a rank alone");
  expect_choice({{"host", "card", 0, -1}}, "peer_cuda", "a rank alone");
}

TEST(Choose, NcclWhereEveryRankHasItAndAGpu) {
  expect_choice(one_host(2), "nccl", "every rank has a GPU of its own");
  expect_choice(one_host(200), "nccl", "every rank has a GPU of its own");
}

TEST(Choose, NcclNeedsNeitherOneHostNorPeerAccess) {
  auto ranks = one_host(4);
  ranks[2].host = ranks[3].host = "another";
  ranks[0].out_of_reach = 1;
  expect_choice(ranks, "nccl", "every rank has a GPU of its own");
}

TEST(Choose, RanksThatShareACardHaveOurKernels) {
  auto ranks = one_host(4);
  ranks[3].card = ranks[1].card;
  expect_choice(ranks, "peer_cuda", "ranks 1 and 3 share a GPU");
}

TEST(Choose, WithoutNcclOnOneOfThemAllHaveOurKernels) {
  auto ranks = one_host(3);
  ranks[1].nccl = 0;
  expect_choice(ranks, "peer_cuda", "rank 1 has no NCCL that serves");
}

TEST(Choose, DifferentVersionsOfNcclDoNotMix) {
  auto ranks = one_host(3);
  ranks[2].nccl = 22703;
  expect_choice(ranks, "peer_cuda", "rank 0 has NCCL 2.28.9 and rank 2 2.27.3");
}

TEST(Choose, SumsInRankOrderHaveALimitThatOtherSumsLack) {
  auto ranks = one_host(257);
  expect_choice(ranks, "ring",
                "sums in rank order over NCCL serve at most 256 ranks, and the kernels of peer_cuda serve at "
                "most 16 ranks");
  expect_choice(ranks, "nccl", "every rank has a GPU of its own", false);
}

TEST(Choose, StagedBetweenHostsWithoutNccl) {
  auto ranks = one_host(2);
  ranks[1].host = "another";
  ranks[0].nccl = 0;
  expect_choice(ranks, "ring", "rank 0 has no NCCL that serves, and rank 1 is on another host than rank 0");
}

// The card's number alone tells ranks apart, whatever their hosts are called: NCCL would refuse them.
TEST(Choose, StagedWhereRanksOfTwoHostsShareACard) {
  auto ranks = one_host(2);
  ranks[1].host = "another";
  ranks[1].card = ranks[0].card;
  expect_choice(ranks, "ring", "ranks 0 and 1 share a GPU, and rank 1 is on another host than rank 0");
}

TEST(Choose, StagedWhereACardDoesNotReachAnother) {
  auto ranks = one_host(3);
  ranks[2].nccl = 0;
  ranks[1].out_of_reach = 2;
  expect_choice(ranks, "ring",
                "rank 2 has no NCCL that serves, and rank 1's GPU does not reach the memory of rank 2's");
}

TEST(Choose, StagedForMoreRanksThanOurKernelsServe) {
  auto ranks = one_host(17);
  ranks[16].card = ranks[0].card;
  expect_choice(ranks, "ring",
                "ranks 0 and 16 share a GPU, and the kernels of peer_cuda serve at most 16 ranks");
  ranks.pop_back();
  ranks[15].card = ranks[0].card;
  expect_choice(ranks, "peer_cuda", "ranks 0 and 15 share a GPU");
}

}  // namespace
}  // namespace rz
