#pragma once
/// Times communicators over the same ranks that are used at once, each with a stream of all_reduces of its
/// own.

#include <chrono>
#include <vector>

#include "bench/support/memory.h"
#include "comm/communicator.h"

namespace rz::bench::concurrent {

struct Plan {
  std::vector<std::size_t> bytes;  ///< of a call, a communicator each
  int registered = 0;              ///< of memory_of()
  int rounds = 5;
  std::chrono::duration<double> phase{0.2};
};

/// One stream in one phase, by rank 0's clock.
struct Figure {
  double calls_per_s = 0, p50_us = 0, p99_us = 0;
};

/// A phase's streams, in the plan's order.
using Phase = std::vector<Figure>;

/// All phases take turns.
struct Round {
  Phase alone;    ///< one stream after the other, each by itself
  Phase threads;  ///< all at once, each called by a thread of its own
  Phase in_turn;  ///< all at once, called by one thread: one call of each in flight, then the next
};

class Measure {
 public:
  /// Makes the communicators. Every rank makes the same calls.
  Measure(Communicator& world, const Plan&);
  Measure(const Measure&) = delete;

  /// The first round, in which memory is met for the first time, is not counted. Errc::io if a sum is wrong.
  std::vector<Round> run();

 private:
  struct Caller {
    Communicator comm;
    std::size_t count;
    Memory in, out;

    Work start(bool last);
    bool was_last() const;
    void check() const;
  };
  using Clock = std::chrono::steady_clock;

  Figure alone(Caller&);
  Phase threads();
  Phase in_turn();
  /// Rank 0 marks the last call in its data, so that every rank makes as many.
  Figure call_until(Caller&, Clock::time_point end);
  Clock::time_point begin();

  Communicator& world_;
  const Plan plan_;
  std::vector<Caller> callers_;
};

}  // namespace rz::bench::concurrent
