#include "comm/backends/peer_cuda/window_registry.h"

#include <gtest/gtest.h>

#include <thread>

namespace rz {
namespace {

struct Memory {
  std::vector<std::byte> bytes = std::vector<std::byte>(1000);
  const std::byte* at(std::size_t i) const { return bytes.data() + i; }
};

TEST(WindowRegistry, NumbersGoUp) {
  const Memory a, b;
  WindowRegistry book;
  EXPECT_EQ(book.add(a.at(0), 1000), 0);
  EXPECT_EQ(book.add(b.at(0), 1000), 1);
  EXPECT_EQ(book.unused(), 0u);
}

TEST(WindowRegistry, ReusesReleasedWindows) {
  const Memory a, b;
  WindowRegistry book;
  book.add(a.at(0), 500);
  book.add(b.at(0), 1000);
  EXPECT_EQ(book.best_fit(10, book.unused()), std::nullopt);
  book.release(1);
  EXPECT_EQ(book.unused(), 2u);
  EXPECT_EQ(book.best_fit(10, book.unused()), 1);
  book.acquire(1);
  EXPECT_EQ(book.unused(), 0u);
}

TEST(WindowRegistry, TheSmallestThatFitsAndOfSeveralTheFirst) {
  WindowRegistry book;
  for (const std::size_t bytes : {900, 300, 500, 300}) book.add(nullptr, bytes);
  for (int i = 0; i < 4; ++i) book.release(i);
  const auto all = book.unused();
  EXPECT_EQ(book.best_fit(0, all), 1);
  EXPECT_EQ(book.best_fit(300, all), 1);
  EXPECT_EQ(book.best_fit(301, all), 2);
  EXPECT_EQ(book.best_fit(501, all), 0);
  EXPECT_EQ(book.best_fit(901, all), std::nullopt);
}

// A window that another rank uses is not free, even if this rank does not use it.
TEST(WindowRegistry, OnlyUnusedWindowsAreConsidered) {
  WindowRegistry book;
  for (const std::size_t bytes : {900, 300, 500}) book.add(nullptr, bytes);
  for (int i = 0; i < 3; ++i) book.release(i);
  EXPECT_EQ(book.best_fit(100, 0b101), 2);
  EXPECT_EQ(book.best_fit(600, 0b110), std::nullopt);
  EXPECT_EQ(book.best_fit(100, 0), std::nullopt);
}

TEST(WindowRegistry, IsFullWithTheLast) {
  WindowRegistry book;
  for (std::size_t i = 0; i < WindowRegistry::max_windows; ++i) {
    EXPECT_FALSE(book.is_full());
    EXPECT_EQ(book.add(nullptr, 100), static_cast<int>(i));
  }
  EXPECT_TRUE(book.is_full());
  book.release(63);
  EXPECT_EQ(book.unused(), WindowRegistry::WindowSet{1} << 63);
  EXPECT_EQ(book.best_fit(100, book.unused()), 63);
  EXPECT_TRUE(book.is_full()) << "a window stays one when it is not used";
}

TEST(WindowRegistry, FindsMemoryByWindowAndOffset) {
  const Memory a, b, other;
  WindowRegistry book;
  book.add(a.at(100), 800);
  book.add(b.at(0), 1000);
  EXPECT_EQ(book.handle_of(a.at(100), 800), peer::window_source(0, 0));
  EXPECT_EQ(book.handle_of(a.at(104), 4), peer::window_source(0, 4));
  EXPECT_EQ(book.handle_of(b.at(999), 1), peer::window_source(1, 999));
  EXPECT_EQ(book.handle_of(b.at(1000), 0), peer::window_source(1, 1000));
  EXPECT_EQ(book.handle_of(a.at(99), 4), 0u) << "begins before it";
  EXPECT_EQ(book.handle_of(a.at(104), 797), 0u) << "ends behind it";
  EXPECT_EQ(book.handle_of(other.at(0), 4), 0u);
  EXPECT_EQ(book.handle_of(nullptr, 0), 0u);
}

TEST(WindowRegistry, HandlesDifferFromAddressesAndArenas) {
  for (const int window : {0, 1, 63}) {
    const std::uint64_t source = peer::window_source(window, std::size_t{1} << 47);
    EXPECT_NE(source & peer::in_window, 0u);
    EXPECT_EQ(source & peer::in_arena, 0u);
    EXPECT_EQ(source >> peer::window_shift & 63, static_cast<std::uint64_t>(window));
  }
}

TEST(WindowRegistry, ThreadsMayReleaseDuringLookups) {
  WindowRegistry book;
  for (int i = 0; i < 64; ++i) book.add(nullptr, 100);
  std::thread other([&] {
    for (int i = 0; i < 64; ++i) book.release(i);
  });
  WindowRegistry::WindowSet seen = 0;
  while (seen != ~WindowRegistry::WindowSet{0}) {
    const auto now = book.unused();
    EXPECT_EQ(now & seen, seen);
    seen = now;
  }
  other.join();
}

}  // namespace
}  // namespace rz
