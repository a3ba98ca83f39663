// Runs: pure

#include "comm/tuning/select_cuda.h"

#include <gtest/gtest.h>

#include "comm/core/error.h"

namespace rz {
namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

tuning::CudaLaunchPlan all_reduce(std::size_t bytes, int size, const std::string& forced = {}) {
  return tuning::select_cuda_launch({.collective = Collective::all_reduce,
                                     .bytes = bytes,
                                     .size = size,
                                     .max_blocks = 64,
                                     .override_name = forced});
}

TEST(SelectCuda, SmallAllReducesAreOneShot) {
  EXPECT_FALSE(all_reduce(MiB, 2).two_shot);
  EXPECT_TRUE(all_reduce(MiB + 1, 2).two_shot);
  EXPECT_FALSE(all_reduce(512 * KiB, 3).two_shot);
  EXPECT_TRUE(all_reduce(512 * KiB + 1, 4).two_shot);
  EXPECT_FALSE(all_reduce(256 * KiB, 8).two_shot);
  EXPECT_TRUE(all_reduce(65 * KiB, 16).two_shot);
}

TEST(SelectCuda, AChoiceCanBeForced) {
  EXPECT_TRUE(all_reduce(4, 2, "two_shot").two_shot);
  EXPECT_FALSE(all_reduce(64 * MiB, 2, "one_shot").two_shot);
  try {
    all_reduce(4, 2, "ring");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
  }
}

// One-shot reads copies: in place, memory changes while peers read it.
TEST(SelectCuda, OneShotIsNeverZeroCopy) {
  for (const std::size_t bytes : {std::size_t{0}, KiB, MiB, 64 * MiB})
    for (const int size : {1, 2, 3, 8, 16})
      for (const char* forced : {"", "one_shot", "two_shot"}) {
        const tuning::CudaLaunchPlan c = all_reduce(bytes, size, forced);
        EXPECT_EQ(c.zero_copy, c.two_shot);
      }
}

TEST(SelectCuda, BlocksGrowWithTheBufferUpToTheCard) {
  EXPECT_EQ(all_reduce(0, 2).blocks, 1);
  EXPECT_EQ(all_reduce(64 * KiB, 2).blocks, 4);
  EXPECT_EQ(all_reduce(64 * MiB, 2).blocks, 64);
  EXPECT_EQ(tuning::select_cuda_launch({.collective = Collective::all_gather, .bytes = MiB, .max_blocks = 3})
                .blocks,
            3);
  EXPECT_EQ(all_reduce(KiB, 2).threads, 128);
  EXPECT_EQ(all_reduce(64 * MiB, 2).threads, 512);
}

TEST(SelectCuda, AllToAllVChoosesWithoutItsCounts) {
  const tuning::CudaSelectionQuery q{
      .collective = Collective::all_to_all_v, .bytes = 1, .size = 4, .max_blocks = 8};
  tuning::CudaSelectionQuery other = q;
  other.bytes = 64 * MiB;
  EXPECT_EQ(tuning::select_cuda_launch(q).blocks, tuning::select_cuda_launch(other).blocks);
  EXPECT_EQ(tuning::select_cuda_launch(q).zero_copy, tuning::select_cuda_launch(other).zero_copy);
}

}  // namespace
}  // namespace rz
