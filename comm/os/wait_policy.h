#pragma once
/// How long threads spin, yield and sleep while they wait: all constants of waiting, for nodes on which every
/// rank has a processor, and for oversubscribed ones. Each step from spinning to sleeping trades latency for
/// the time of other threads.

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/os/spin.h"

namespace rz {

/// Transport::wait() and progress() (comm/transport/transport_waiter.h).
struct TransportWaitPolicy {
  int memory_spins;  ///< polls of shared memory before an eager thread sleeps: as long as sleep and wake-up
  int yields = 4;    ///< of the processor, before a thread sleeps that does not spin
  std::chrono::microseconds socket_spin;  ///< limit if sockets carry data: the latency of a small message
  bool yields_between_polls;              ///< before each poll of the sockets
  int pauses_per_poll = 4;  ///< polls of shared memory between two polls of the sockets, each a system call
  std::chrono::milliseconds failure_poll_interval{2};  ///< of polls of sockets that carry no data
  std::chrono::milliseconds max_sleep{100};            ///< in case a wake-up is missed
};

/// The progress engine (comm/progress/progress_engine.h) and what it drives.
struct ProgressWaitPolicy {
  using Time = std::chrono::microseconds;

  // A small call on its caller's thread. A turn polls the peers' slots some forty times; on an oversubscribed
  // node it yields instead.
  int inline_turns;      ///< of a small call in submit(), before the call becomes a request
  int driver_turns;      ///< of a thread in wait(), before it polls for failures and deadlines
  Time inline_poll{50};  ///< of the progress token, while such a call holds it

  // The driving thread.
  Time spin_limit{30'000};  ///< without progress a thread in wait() spins for so long; then it sleeps
  Time max_wait{10'000};    ///< one wait for an event, before spin_limit
  Time max_sleep{50'000};   ///< one wait for an event, after spin_limit

  // The progress thread.
  Time attended_grace{200};       ///< the caller of a request this young may still be about to wait for it
  Time active_window{1'000'000};  ///< it polls for requests while a call was made this recently
  Time active_poll{1'000};        ///< period of that, if a request was unattended within active_window
  Time idle_poll{16'000};         ///< period of that otherwise
};

struct WaitPolicy {
  TransportWaitPolicy transport;
  ProgressWaitPolicy progress;
};

/// Every rank has a processor: spinning delays no other.
inline constexpr WaitPolicy normal_wait_policy{
    .transport = {.memory_spins = 2000,
                  .socket_spin = std::chrono::microseconds(100),
                  .yields_between_polls = false},
    .progress = {.inline_turns = 30, .driver_turns = 400},
};

/// A node with more ranks than processors: a rank that spins keeps its peers from running. It yields
/// instead; between polls of sockets for twice as long, since ranks take turns.
inline constexpr WaitPolicy oversubscribed_wait_policy{
    .transport = {.memory_spins = 0,
                  .socket_spin = std::chrono::microseconds(200),
                  .yields_between_polls = true},
    .progress = {.inline_turns = 100, .driver_turns = 100},
};

constexpr const WaitPolicy& wait_policy(bool oversubscribed) {
  return oversubscribed ? oversubscribed_wait_policy : normal_wait_policy;
}

/// Of a loop that polls a state whose change wakes no thread.
struct PollBackoff {
  using Time = std::chrono::microseconds;

  unsigned pauses = 0;  ///< the first polls, after each of which it pauses the processor
  unsigned yields = 0;  ///< the next polls, after each of which it yields
  Time min_sleep{0};    ///< after a later poll it sleeps this long, and this much longer every 16 polls
  Time max_sleep = min_sleep;  ///< but never longer than this

  /// Waits after poll number `polls`, counted from 0 since the last change.
  void wait(unsigned polls) const {
    if (polls < pauses) return cpu_pause();
    if (polls < pauses + yields) return std::this_thread::yield();
    std::this_thread::sleep_for(std::min(max_sleep, min_sleep * (1 + (polls - pauses - yields) / 16)));
  }
};

/// For the end of work on a device, and for a lock that is held for microseconds: yields take about a
/// millisecond in total.
inline constexpr PollBackoff short_backoff{.yields = 4000, .min_sleep = PollBackoff::Time(20)};
/// For MPI calls: a message of a peer that computes takes long, and its rank needs the processor.
inline constexpr PollBackoff mpi_backoff{
    .pauses = 63, .yields = 192, .min_sleep = PollBackoff::Time(10), .max_sleep = PollBackoff::Time(500)};

}  // namespace rz
