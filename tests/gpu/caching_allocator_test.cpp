#include "comm/device/caching_allocator.h"

#include <map>
#include <random>

#include "comm/device/graph.h"
#include "tensor/pool.h"
#include "tests/gpu/on_device.h"

namespace rz::test {
namespace {

using Caching = OnDevice;
constexpr std::size_t mebibyte = std::size_t{1} << 20;

TEST_F(Caching, FreedBlocksAreReused) {
  const CachingAllocator allocator(allocator_on(device));
  std::byte* first = nullptr;
  for (int i = 0; i < 3; ++i) {
    const auto memory = allocator.allocate(5 * mebibyte, stream);
    if (i == 0) first = memory.get();
    EXPECT_EQ(memory.get(), first);
  }
  const auto s = allocator.statistics();
  EXPECT_EQ(s.segments, 1u);
  EXPECT_EQ(s.reserved, 20 * mebibyte);
  EXPECT_EQ(s.requests, 3u);
  EXPECT_EQ(s.reused, 2u);
  EXPECT_EQ(s.in_use, 0u);
  EXPECT_EQ(s.peak, 5 * mebibyte);
  allocator.trim();
  EXPECT_EQ(allocator.statistics().reserved, 0u);
}

TEST_F(Caching, StreamsHaveTheirOwn) {
  const CachingAllocator allocator(allocator_on(device));
  const Stream other = Stream::create(device);
  const std::byte* const here = allocator.allocate(4096, stream).get();
  EXPECT_NE(allocator.allocate(4096, other).get(), here);
  EXPECT_EQ(allocator.allocate(4096, stream).get(), here);
}

TEST_F(Caching, BlocksNeverOverlapAndAllComesBack) {
  const CachingAllocator allocator(allocator_on(device));
  std::mt19937 random(3);
  std::map<std::byte*, std::pair<std::size_t, std::shared_ptr<std::byte>>> held;
  std::size_t in_use = 0;
  for (int i = 0; i < 3000; ++i) {
    if (held.size() > 40 || (!held.empty() && random() % 2)) {
      auto it = held.begin();
      std::advance(it, random() % held.size());
      in_use -= it->second.first;
      held.erase(it);
      continue;
    }
    const std::size_t bytes = (std::size_t{1} << random() % 23) + random() % 1000;
    auto memory = allocator.allocate(bytes, stream);
    const auto [it, is_new] = held.try_emplace(memory.get(), bytes, memory);
    ASSERT_TRUE(is_new);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 256, 0u);
    if (const auto next = std::next(it); next != held.end()) ASSERT_LE(memory.get() + bytes, next->first);
    if (it != held.begin()) ASSERT_LE(std::prev(it)->first + std::prev(it)->second.first, memory.get());
    in_use += bytes;
    ASSERT_GE(allocator.statistics().in_use, in_use);
  }
  held.clear();
  EXPECT_EQ(allocator.statistics().in_use, 0u);
  EXPECT_LT(allocator.statistics().reserved, 400 * mebibyte);
  allocator.trim();
  EXPECT_EQ(allocator.statistics().segments, 0u);
}

TEST_F(Caching, MemoryIsReusedInTheStreamsOrder) {
  for (int seed = 0; seed < schedules(30); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    const CachingAllocator allocator(allocator_on(device));
    const Tensor kept = empty_on(stream, {1024});
    {
      const auto a = allocator.allocate(4096, stream);
      memset_async(a.get(), 0, 4096, stream);
      memcpy_async(kept.raw(), a.get(), 4096, stream);
    }
    const auto b = allocator.allocate(4096, stream);  // the same bytes, while the copy may still be pending
    memset_async(b.get(), 1, 4096, stream);
    EXPECT_EQ(from_device(kept, stream), std::vector<double>(1024, 0));
  }
}

/// As in a tape on a device: a pool above, segments below.
TEST_F(Caching, SizesThatNeverRecurAreReleased) {
  std::size_t held = 0, max_held = 0;
  const auto counted = [&](std::size_t bytes) {
    const auto memory = allocate_on(device, bytes);
    max_held = std::max(max_held, held += bytes);
    return std::shared_ptr<std::byte>(memory.get(), [&held, bytes, memory](std::byte*) { held -= bytes; });
  };
  const CachingAllocator allocator({counted, device});
  const BufferPool pool(allocator.on(stream));
  for (std::size_t n = 24; n <= 80; n += 8) {
    const Tensor t = pool.empty({n * mebibyte}, DType::u8);
  }
  EXPECT_LE(max_held, (2 * 80 + 64) * mebibyte);
  EXPECT_LE(pool.statistics().bytes, 2 * pool.statistics().peak);
}

TEST_F(Caching, MemoryOfACapturedGraphIsKeptUntilTrim) {
  std::byte* used = nullptr;
  bool went = false;
  const BufferPool pool({[&](std::size_t bytes) {
                           const auto memory = allocate_on(device, bytes);
                           return std::shared_ptr<std::byte>(
                               memory.get(), [&, memory](std::byte* p) { went |= p == used; });
                         },
                         device});
  const Tensor result = empty_on(stream, {1024});
  used = pool.empty({1024}).raw();  // exists when the capture begins
  const Graph graph = capture(stream, [&] {
    const Tensor t = pool.empty({1024});
    EXPECT_EQ(t.raw(), used);
    memset_async(t.raw(), 0, t.bytes(), stream);
    memcpy_async(result.raw(), t.raw(), t.bytes(), stream);
  });
  for (std::size_t n = 2; n < 40; ++n) {  // other sizes: the pool frees unused blocks
    { const Tensor t = pool.empty({n * 1024}); }
    pool.next_pass();
  }
  EXPECT_LT(pool.statistics().bytes, std::size_t{39 * 20} * 4096);
  ASSERT_FALSE(went);
  memset_async(result.raw(), 1, result.bytes(), stream);
  graph.launch(stream);
  EXPECT_EQ(from_device(result, stream), std::vector<double>(1024, 0));
  pool.trim();
  EXPECT_TRUE(went);
}

TEST_F(Caching, WhenUpstreamIsEmptyFreeSegmentsGoBackFirst) {
  std::size_t left = 64 * mebibyte;
  const auto limited = [&](std::size_t bytes) {
    require(bytes <= left, Errc::system, "no more");
    left -= bytes;
    const auto memory = allocate_on(device, bytes);
    return std::shared_ptr<std::byte>(memory.get(), [&left, bytes, memory](std::byte*) { left += bytes; });
  };
  const CachingAllocator allocator({limited, device});
  static_cast<void>(allocator.allocate(40 * mebibyte, stream));  // is freed, but its segment is kept
  const auto large = allocator.allocate(60 * mebibyte, stream);
  EXPECT_EQ(allocator.statistics().reserved, 60 * mebibyte);
  EXPECT_THROW(static_cast<void>(allocator.allocate(10 * mebibyte, stream)), Error);
}

}  // namespace
}  // namespace rz::test
