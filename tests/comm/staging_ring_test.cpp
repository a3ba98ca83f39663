#include <gtest/gtest.h>

#include "comm/transport/shm_layout.h"

namespace rz {
namespace {

constexpr std::size_t KiB = 1 << 10, MiB = 1 << 20;

TEST(StagingRing, IsTwiceTheSecondLevelCache) {
  EXPECT_EQ(staging_ring_bytes({.l2 = MiB, .l3 = 32 * MiB, .l3_processors = 16}, 2), 2 * MiB);
  EXPECT_EQ(staging_ring_bytes({.l2 = 2 * MiB, .l3 = 100 * MiB, .l3_processors = 2}, 2), 4 * MiB);
  EXPECT_EQ(staging_ring_bytes({.l2 = 1280 * KiB, .l3 = 100 * MiB, .l3_processors = 2}, 2), 2560 * KiB);
}

TEST(StagingRing, LeavesTheThirdLevelCacheToOthers) {
  EXPECT_EQ(staging_ring_bytes({.l2 = 2 * MiB, .l3 = 48 * MiB, .l3_processors = 64}, 4), 3 * MiB);
  EXPECT_EQ(staging_ring_bytes({.l2 = 2 * MiB, .l3 = 48 * MiB, .l3_processors = 4}, 64), 3 * MiB)
      << "only ranks on processors of one cache share it";
}

TEST(StagingRing, HasAMinimum) {
  EXPECT_EQ(staging_ring_bytes({}, 2), MiB) << "nothing is known of the caches";
  EXPECT_EQ(staging_ring_bytes({.l2 = 256 * KiB, .l3 = 8 * MiB, .l3_processors = 8}, 2), MiB);
  EXPECT_EQ(staging_ring_bytes({.l2 = 2 * MiB, .l3 = 105 * MiB, .l3_processors = 112}, 112), MiB);
}

}  // namespace
}  // namespace rz
