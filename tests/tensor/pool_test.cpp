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

// Counts what the pool must not do. Alignment variants are not replaced: nothing here uses them.
// Inlined, g++ would take malloc() and delete, or new and free(), for a mismatched pair.
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
  const std::byte* first = pool.empty({3, 5}).raw();
  { const Tensor a = pool.empty({2, 2}), b = pool.empty({2, 2}); }
  const long before = news;
  for (int i = 0; i < 100; ++i) {
    const Tensor t = pool.empty({5, 3});  // the size counts, not the shape
    EXPECT_EQ(t.raw(), first);
    const Tensor copy = t, a = pool.empty({4}), b = pool.empty({4});
    EXPECT_NE(a.raw(), b.raw());
  }
  EXPECT_EQ(news, before);
  EXPECT_EQ(pool.statistics().allocations, 3u);
}

TEST(Pool, StatisticsCountBytes) {
  const BufferPool pool;
  Tensor a = pool.empty({10});
  { const Tensor b = pool.empty({20}, DType::f64); }
  EXPECT_EQ(pool.statistics().bytes, 200u);
  EXPECT_EQ(pool.statistics().in_use, 40u);
  EXPECT_EQ(pool.statistics().peak, 200u);
  pool.trim();
  EXPECT_EQ(pool.statistics().bytes, 40u);
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

TEST(Pool, AnErrorOfTheAllocatorPasses) {
  const BufferPool pool([](std::size_t bytes) -> std::shared_ptr<std::byte> {
    fail(Errc::system, "no memory: need ", bytes, ", have 0");
  });
  EXPECT_THROW(pool.empty({8}), Error);
  EXPECT_EQ(pool.statistics().in_use, 0u);
  EXPECT_EQ(pool.statistics().bytes, 0u);
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
