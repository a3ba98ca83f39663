// Runs: ci

#include "tensor/pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace {
std::atomic<long> news{0};
}

// Counts the allocations that the pool must avoid. Alignment variants are not replaced: nothing here uses
// them. When inlined, g++ would report malloc() with delete, or new with free(), as a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) {
  ++news;
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace rz {
namespace {

TEST(Pool, AFreeBlockIsHandedOutWithoutAnyAllocation) {
  const BufferPool pool;
  const std::byte* first = pool.empty({3, 50}).raw();
  { const Tensor a = pool.empty({2, 20}), b = pool.empty({2, 20}); }
  const long before = news;
  for (int i = 0; i < 100; ++i) {
    const Tensor t = pool.empty({50, 3});  // the size matters, not the shape
    EXPECT_EQ(t.raw(), first);
    const Tensor copy = t, a = pool.empty({40}), b = pool.empty({40});
    EXPECT_NE(a.raw(), b.raw());
  }
  EXPECT_EQ(news, before);
  EXPECT_EQ(pool.statistics().allocations, 3u);
}

TEST(Pool, StatisticsCountBytes) {
  const BufferPool pool;
  Tensor a = pool.empty({16});
  { const Tensor b = pool.empty({16}, DType::f64); }
  EXPECT_EQ(pool.statistics().bytes, 192u);
  EXPECT_EQ(pool.statistics().in_use, 64u);
  EXPECT_EQ(pool.statistics().peak, 192u);
  pool.trim();
  EXPECT_EQ(pool.statistics().bytes, 64u);
  a = {};
  EXPECT_EQ(pool.statistics().in_use, 0u);
  pool.trim();
  EXPECT_EQ(pool.statistics().bytes, 0u);
}

TEST(Pool, MemoryOutlivesThePoolAndItsAllocatorsMemoryEndsWithTheLast) {
  std::weak_ptr<std::byte> watched;
  Tensor t;
  {
    const BufferPool pool([&](std::size_t bytes) {
      auto memory = allocate_host(bytes);
      watched = memory;
      return memory;
    });
    t = pool.empty({8});
  }
  t.data<float>()[7] = 1;
  EXPECT_FALSE(watched.expired());
  t = {};
  EXPECT_TRUE(watched.expired());
}

TEST(Pool, AnErrorOfTheAllocatorIsThrown) {
  const BufferPool pool([](std::size_t bytes) -> std::shared_ptr<std::byte> {
    fail(Errc::system, "no memory: need ", bytes, ", have 0");
  });
  EXPECT_THROW(pool.empty({8}), Error);
  EXPECT_EQ(pool.statistics().in_use, 0u);
  EXPECT_EQ(pool.statistics().bytes, 0u);
}

/// Tensors whose sizes all differ, as ragged batches make them.
TEST(Pool, SizesThatNeverRecurAreReleased) {
  const BufferPool pool;
  std::size_t held = 0;
  for (std::size_t kibibytes = 1; kibibytes <= 2000; ++kibibytes) {
    { const Tensor t = pool.empty({kibibytes * 256}); }
    held = std::max(held, pool.statistics().bytes);
  }
  EXPECT_LE(held, 2 * pool.statistics().peak);
  EXPECT_LT(pool.statistics().peak, std::size_t{2200} << 10);
}

TEST(Pool, SizesAreRoundedUpByASixteenthAtMost) {
  for (std::size_t bytes = 1; bytes < 100'000'000; bytes += 1 + bytes / 7) {
    const BufferPool pool;
    const Tensor t = pool.empty({bytes}, DType::u8);
    EXPECT_GE(pool.statistics().bytes, bytes);
    EXPECT_LE(pool.statistics().bytes, std::max(bytes + 63, bytes + bytes / 16)) << bytes;
  }
  const BufferPool pool;
  const std::byte* const first = pool.empty({1000, 1000}).raw();
  EXPECT_EQ(pool.empty({1000, 990}).raw(), first);  // a batch that is a little shorter
}

/// Forty sizes, one after another: the sum over a pass is many times the use at any one time.
TEST(Pool, PassesThatAreAlikeAllocateNothingFromTheThirdOn) {
  const BufferPool pool;
  std::size_t before = 0;
  for (int pass = 0; pass < 5; ++pass) {
    for (std::size_t size = 40; size > 0; --size) {
      const Tensor t = pool.empty({(40 + size) << 10});
    }
    pool.next_pass();
    const std::size_t now = pool.statistics().allocations;
    EXPECT_TRUE(pass < 2 || now == before) << "pass " << pass;
    before = now;
  }
  EXPECT_GT(pool.statistics().bytes, 4 * pool.statistics().peak);
  // They are freed once passes of another kind run.
  for (int pass = 0; pass < 3; ++pass) {
    { const Tensor t = pool.empty({(90 + 10 * static_cast<std::size_t>(pass)) << 10}); }
    pool.next_pass();
  }
  EXPECT_LE(pool.statistics().bytes, 3 * pool.statistics().peak);
}

TEST(Pool, FreeBlocksAreReturnedBeforeAnErrorOfTheAllocatorIsThrown) {
  std::size_t left = 1 << 20;
  const BufferPool pool([&](std::size_t bytes) {
    require(bytes <= left, Errc::system, "no memory: need ", bytes, ", have ", left);
    left -= bytes;
    const auto memory = allocate_host(bytes);
    return std::shared_ptr<std::byte>(memory.get(), [&left, bytes, memory](std::byte*) { left += bytes; });
  });
  { const Tensor t = pool.empty({900 << 10}, DType::u8); }
  EXPECT_EQ(pool.empty({1000 << 10}, DType::u8).count(), 1000u << 10);
  EXPECT_THROW(pool.empty({2 << 20}, DType::u8), Error);
}

TEST(Pool, ThreadsShareIt) {
  const BufferPool pool;
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n)
    threads.emplace_back([&, n] {
      for (int i = 0; i < 500; ++i) {
        const Tensor t = pool.empty({64});
        for (std::size_t j = 0; j < 64; ++j) t.data<float>()[j] = static_cast<float>(n);
        for (std::size_t j = 0; j < 64; ++j) ASSERT_EQ(t.data<float>()[j], n);
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_LE(pool.statistics().allocations, 4u);
  EXPECT_EQ(pool.statistics().in_use, 0u);
}

}  // namespace
}  // namespace rz
