#pragma once
/// Two processes that meet in memory which both have mapped, and wait for each other by spinning on flags:
/// the least that ranks of one host can tell each other with.

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace rz::bench::limit {

/// Counts up. Written by one rank, read by the other, alone in a pair of cache lines (which some processors
/// fetch together).
struct alignas(128) Flag {
  std::atomic<std::uint64_t> count;
};

/// As much of a message as fits beside a flag.
struct alignas(64) Letter {
  static constexpr std::size_t floats = 14;
  std::atomic<std::uint64_t> number;
  float values[floats];
};

/// Where a rank's own memory lies, for who reads it from another process.
struct Lying {
  pid_t process;
  float *in, *out;
};

/// Lies in shared memory, zero at first. Of each rank what it has done; what a count counts is its user's.
struct Meeting {
  Flag here[2], ready[2], done[2], pieces[2], offered[2], folded[2], taken[2], halved[2];
  Lying lying[2];
  static constexpr std::size_t most_letters = 10;
  Letter letters[2][2][most_letters];  ///< of a rank, of two calls
  std::atomic<bool> failed;
  char why[512];
};

class Seat {
 public:
  Seat(Meeting& meeting, int rank, pid_t peer_process, std::chrono::milliseconds timeout)
      : meeting(meeting), rank(rank), peer(1 - rank), peer_process_(peer_process), timeout_(timeout) {}

  Meeting& meeting;
  const int rank, peer;

  /// Spins until the count has come so far. Errc::timeout, or Errc::peer_lost if the peer ended.
  void wait_for(const std::atomic<std::uint64_t>& count, std::uint64_t at_least) const {
    for (int i = 0; i < spins; ++i)
      if (count.load(std::memory_order_acquire) >= at_least) return;
    wait_longer(count, at_least);
  }
  void wait_for(const Flag& flag, std::uint64_t at_least) const { wait_for(flag.count, at_least); }
  static void publish(Flag& flag, std::uint64_t count) { flag.count.store(count, std::memory_order_release); }
  /// Returns once both ranks have called it.
  void meet();

 private:
  static constexpr int spins = 1 << 16;
  void wait_longer(const std::atomic<std::uint64_t>&, std::uint64_t at_least) const;

  pid_t peer_process_;  // 0: it is the parent, whose end is this process's
  std::chrono::milliseconds timeout_;
  std::uint64_t meetings_ = 0;
};

/// Calls rank_main as rank 0 here and as rank 1 in a process of its own, each on a core of its own if there
/// are two, and returns when both have. Throws what either threw, rank 0's first. Call it where there is one
/// thread.
void run_pair(Meeting&, std::chrono::milliseconds timeout, const std::function<void(Seat&)>& rank_main);

}  // namespace rz::bench::limit
