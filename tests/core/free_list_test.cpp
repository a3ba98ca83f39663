// Runs: ci

#include "comm/core/free_list.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace rz {
namespace {

TEST(FreeList, TakesTheSmallestRangeThatIsLargeEnough) {
  FreeList list(1000);
  EXPECT_EQ(list.acquire(300), 0u);
  EXPECT_EQ(list.acquire(100), 300u);
  EXPECT_EQ(list.acquire(200), 400u);
  EXPECT_EQ(list.acquire(100), 600u);
  list.release(0, 300);
  list.release(400, 200);
  EXPECT_EQ(list.acquire(150), 400u) << "free: 300 bytes at 0, 200 at 400, 300 at 700";
  EXPECT_EQ(list.acquire(301), std::nullopt);
}

TEST(FreeList, AdjacentRangesAreMergedInEveryOrderOfRelease) {
  for (const std::vector<std::size_t>& order :
       {std::vector<std::size_t>{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}) {
    FreeList list(300);
    for (std::size_t i = 0; i < 3; ++i) ASSERT_EQ(list.acquire(100), i * 100);
    EXPECT_EQ(list.acquire(1), std::nullopt);
    for (const std::size_t i : order) {
      EXPECT_FALSE(list.all_free());
      list.release(i * 100, 100);
    }
    EXPECT_TRUE(list.all_free());
    EXPECT_EQ(list.acquire(300), 0u);
  }
}

TEST(FreeList, RangesInUseNeverOverlap) {
  constexpr std::size_t bytes = 512;
  FreeList list(bytes);
  std::vector<bool> used(bytes);
  std::vector<std::pair<std::size_t, std::size_t>> held;
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 && !held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const auto [offset, size] = held.back();
      held.pop_back();
      list.release(offset, size);
      for (std::size_t b = offset; b < offset + size; ++b) used[b] = false;
    } else {
      const std::size_t size = 1 + random() % 40;
      const auto offset = list.acquire(size);
      if (!offset) continue;
      held.emplace_back(*offset, size);
      for (std::size_t b = *offset; b < *offset + size; ++b) {
        ASSERT_LT(b, bytes);
        ASSERT_FALSE(used[b]);
        used[b] = true;
      }
    }
  }
  for (const auto& [offset, size] : held) list.release(offset, size);
  EXPECT_TRUE(list.all_free());
}

}  // namespace
}  // namespace rz
