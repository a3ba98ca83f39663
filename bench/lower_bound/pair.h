#pragma once
/// Two processes that map the same memory and synchronise by spinning on flags in it, the cheapest
/// synchronisation of two ranks of one node.

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "comm/os/child.h"

namespace rz::bench::lower_bound {

/// A counter written by one rank and read by the other. It occupies two cache lines, since some processors
/// prefetch pairs of lines.
struct alignas(128) Flag {
  std::atomic<std::uint64_t> count;
};

/// A cache line with a flag and as many floats as fit after it.
struct alignas(64) LineSlot {
  static constexpr std::size_t floats = 14;
  std::atomic<std::uint64_t> number;
  float values[floats];
};

/// The addresses of a rank's own memory, which the peer reads from its process.
struct PeerBuffers {
  pid_t process;
  float *in, *out;
};

/// State shared by the two ranks, initially zero. A flag is written by the rank of its index; the code that
/// uses it defines its meaning.
struct PairState {
  Flag barrier[2], ready[2], done[2], pieces[2], copied[2], reduced[2], gathered[2], half_done[2];
  PeerBuffers buffers[2];
  static constexpr std::size_t max_lines = 10;
  LineSlot lines[2][2][max_lines];  ///< by rank and parity of the call
  std::atomic<bool> failed;
  char why[512];
};

/// One of the two ranks, with functions that wait for the other.
class PairRank {
 public:
  PairRank(PairState& state, int rank, Child* peer_process, std::chrono::milliseconds timeout)
      : state(state), rank(rank), peer(1 - rank), peer_process_(peer_process), timeout_(timeout) {}

  PairState& state;
  const int rank, peer;

  /// Spins until the count is at least `min_count`. Errc::timeout after the timeout, Errc::peer_lost if the
  /// peer ended.
  void wait_for(const std::atomic<std::uint64_t>& count, std::uint64_t min_count) const {
    for (int i = 0; i < spins; ++i)
      if (count.load(std::memory_order_acquire) >= min_count) return;
    wait_longer(count, min_count);
  }
  void wait_for(const Flag& flag, std::uint64_t min_count) const { wait_for(flag.count, min_count); }
  static void publish(Flag& flag, std::uint64_t count) { flag.count.store(count, std::memory_order_release); }
  /// Returns once both ranks have called it.
  void barrier();

 private:
  static constexpr int spins = 1 << 16;
  void wait_longer(const std::atomic<std::uint64_t>&, std::uint64_t min_count) const;

  Child* peer_process_;  // nullptr: the parent, whose death kills this process
  std::chrono::milliseconds timeout_;
  std::uint64_t barriers_ = 0;
};

/// Calls rank_main as rank 0 in this process and as rank 1 in a forked process, each bound to a core of its
/// own if there are two. Returns when both have returned. Rethrows an exception of either, that of rank 0
/// first. The caller must be the only thread of its process.
void run_pair(PairState&, std::chrono::milliseconds timeout, const std::function<void(PairRank&)>& rank_main);

}  // namespace rz::bench::lower_bound
