#pragma once
/// How long loops spin before they yield or sleep: all constants of waiting, for processors of which every
/// rank has one, and for oversubscribed ones.

#include <chrono>

namespace rz {

/// Transport::wait() and progress() (comm/transport/transport_waiter.h).
struct TransportWaitPolicy {
  /// Polls of shared memory before the thread yields: about the cost of a sleep and a wake-up.
  int memory_spins;
  /// Yields of the processor after them, before the thread sleeps.
  int memory_yields;
  /// Spin limit if sockets carry data: about the latency of a small message.
  std::chrono::microseconds socket_spin;
  /// Polls of shared memory between two polls of the sockets, each a system call.
  int pauses_per_poll = 4;
  /// Yields before each poll of the sockets.
  bool yields_between_polls;
  /// Interval of socket polls in progress() if sockets carry no data.
  std::chrono::milliseconds failure_poll_interval{2};
  /// Upper bound of a sleep, in case a wake-up is missed.
  std::chrono::milliseconds max_sleep{100};
};

/// The constants of one kind of processors.
struct WaitPolicy {
  TransportWaitPolicy transport;
};

/// Every rank has a processor: spinning delays nobody.
inline constexpr WaitPolicy normal_waits{
    .transport = {.memory_spins = 2000,
                  .memory_yields = 4,
                  .socket_spin = std::chrono::microseconds(100),
                  .yields_between_polls = false},
};

/// Ranks share processors: a rank that spins keeps its peers from running. It sleeps at once in shared
/// memory, and yields between polls of sockets, twice as long, since ranks take turns.
inline constexpr WaitPolicy oversubscribed_waits{
    .transport = {.memory_spins = 0,
                  .memory_yields = 0,
                  .socket_spin = std::chrono::microseconds(200),
                  .yields_between_polls = true},
};

inline constexpr const WaitPolicy& wait_policy(bool oversubscribed) {
  return oversubscribed ? oversubscribed_waits : normal_waits;
}

}  // namespace rz
