#pragma once
/// How long threads spin, yield and sleep while they wait: all such constants of comm, for nodes on which
/// every rank has a processor, and for oversubscribed ones. Each step from spinning to sleeping trades
/// latency for the time of other threads. Limits of a whole wait (timeouts) stand with the functions that
/// wait.

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
  Time max_turn{200};  ///< of one communicator, between two steps, before the thread serves the next one
};

/// The loop of a progress thread (comm/progress/progress_driver.h).
struct DriverWaitPolicy {
  int yields = 4;  ///< rounds without progress, each after a yield of the processor, before it sleeps
  std::chrono::milliseconds max_sleep{1'000};  ///< also while no communicator is due
};
inline constexpr DriverWaitPolicy driver_wait_policy;

/// A turn of the intra-node engine (comm/intranode).
struct IntranodeWaitPolicy {
  int spins_per_poll = 40;  ///< of MailboxChannel::spin_once(), on one condition
  /// The first of them have no pause instruction, which takes longer than a slot takes between near cores.
  int unpaused_spins = 32;
  int polls_per_yield = 16;  ///< of spin_once(), about 4 us; then other threads may use the processor
  /// The limit of one Engine::spin() on an oversubscribed node, where a computing rank keeps its processor
  /// for milliseconds.
  std::chrono::microseconds max_yield_time{500};
  unsigned space_share = 8;  ///< a writer without free slots waits for 1/8 of the steps in flight
};
inline constexpr IntranodeWaitPolicy intranode_wait_policy;

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

/// The pauses of a loop that polls a state whose change wakes no thread.
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
/// For NCCL, each of whose polls takes about a microsecond.
inline constexpr PollBackoff nccl_backoff{.yields = 1000, .min_sleep = PollBackoff::Time(50)};
/// For MPI calls: a message of a peer that computes takes long, and its rank needs the processor.
inline constexpr PollBackoff mpi_backoff{
    .pauses = 63, .yields = 192, .min_sleep = PollBackoff::Time(10), .max_sleep = PollBackoff::Time(500)};

/// The sleeps of a loop that polls what another process does at an unknown time: each takes twice as long as
/// the one before.
struct ExponentialBackoff {
  using Time = std::chrono::microseconds;

  Time min_sleep, max_sleep;

  /// Sleeps after poll number `polls`, counted from 0, but no longer than `timeout`.
  void wait(unsigned polls, std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max()) const {
    const Time sleep = std::min(max_sleep, min_sleep * (1 << std::min(polls, 20u)));
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(sleep, timeout));
  }
};

/// For a TCP store that does not listen yet, or refuses a connection.
inline constexpr ExponentialBackoff tcp_store_backoff{std::chrono::milliseconds(5),
                                                      std::chrono::milliseconds(500)};
/// For a key of a store in files.
inline constexpr ExponentialBackoff file_store_backoff{std::chrono::microseconds(50),
                                                       std::chrono::milliseconds(20)};
/// For the other ranks of a node at its rendezvous directory.
inline constexpr ExponentialBackoff local_rendezvous_backoff{std::chrono::milliseconds(1),
                                                             std::chrono::milliseconds(20)};
/// For the last messages of MPI ranks.
inline constexpr ExponentialBackoff mpi_departure_backoff{std::chrono::microseconds(10),
                                                          std::chrono::milliseconds(10)};

/// Sleeps of fixed length between polls.
namespace poll_period {

using Time = std::chrono::microseconds;

inline constexpr Time staged_input{5};                 ///< of a collective's input, on its way to the host
inline constexpr Time device_drain{20};                ///< of the end of a device's work, at teardown
inline constexpr Time group_teardown{100};             ///< of stopped kernels and departures of peers
inline constexpr Time nccl_lock{1'000};                ///< of another thread's NCCL call
inline constexpr Time mpi_comm_dup{50};                ///< of the copy of an MPI communicator
inline constexpr Time mpi_finalize{200};               ///< of the arrival of all ranks, before MPI_Finalize
inline constexpr Time full_backlog{1'000};             ///< of a listener whose queue is full
inline constexpr Time exhausted_descriptors{100'000};  ///< of a free descriptor, or of the kernel's memory

}  // namespace poll_period

}  // namespace rz
