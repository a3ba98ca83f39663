#pragma once
/// Times communicators over the same ranks that are used concurrently, each with its own stream of
/// all_reduces.

#include <chrono>
#include <vector>

#include "bench/support/memory.h"
#include "comm/communicator.h"

namespace rz::bench::concurrent {

struct Plan {
  std::vector<std::size_t> bytes;  ///< bytes of a call, one entry per communicator
  int registered = 0;              ///< argument of memory_of()
  int rounds = 5;
  std::chrono::duration<double> phase{0.2};
};

/// Result of one stream in one phase, measured on rank 0.
struct Figure {
  double calls_per_s = 0, p50_us = 0, p99_us = 0;
};

/// One entry per stream, in the order of the plan.
using Phase = std::vector<Figure>;

/// One measurement of all phases. Rounds interleave the phases.
struct Round {
  Phase alone;    ///< each stream alone, one after the other
  Phase threads;  ///< all streams concurrently, each on its own thread
  Phase in_turn;  ///< all streams on one thread: one call of each in flight, then the next
};

class Measure {
 public:
  /// Creates the communicators. Collective.
  Measure(Communicator& world, const Plan&);
  Measure(const Measure&) = delete;

  /// Runs all rounds; a warm-up round is not counted. Errc::io if a sum is wrong. Collective.
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
  /// Calls until `end`. Rank 0 marks the last call in its data, so that every rank makes the same number.
  Figure call_until(Caller&, Clock::time_point end);
  Clock::time_point begin();

  Communicator& world_;
  const Plan plan_;
  std::vector<Caller> callers_;
};

}  // namespace rz::bench::concurrent
