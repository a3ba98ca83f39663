#include "comm/transports/connect.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>

#include "comm/core/error.h"
#include "comm/core/pause.h"
#include "comm/core/types.h"
#include "comm/topology.h"
#include "comm/transports/poller.h"
#include "comm/transports/roster.h"
#include "comm/transports/shm.h"

namespace rz {

namespace {

using std::chrono::microseconds;

/// How long wait() looks before it sleeps: about as long as falling asleep and waking up takes.
constexpr int spins = 2000;
constexpr int yields = 4;
/// Sockets are looked at this often while progress() is called all the time.
constexpr auto look_interval = std::chrono::milliseconds(2);
/// A sleep is cut here, in case something is missed.
constexpr auto longest_sleep = std::chrono::milliseconds(100);

/// Routes each peer to its link, and is the one place for waiting and for failures.
class GroupTransport final : public Transport {
 public:
  GroupTransport(int rank, int size, const Roster& roster)
      : rank_(rank),
        size_(size),
        crowded_(std::count(roster.machines.begin(), roster.machines.end(), roster.machines[at(rank)]) >
                 usable_processors()),
        shm_(rank, neighbours(rank, roster), poller_) {}

  void connect(Store& store, const Roster& roster, Deadline deadline) {
    const auto addresses = exchange(rank_, size_, store, "at", shm_.address(), deadline);
    shm_.connect({roster.job, rank_, size_, {}}, addresses, deadline);
  }

  std::size_t post(int peer, Lane lane, const Signature& signature,
                   std::span<const std::byte> bytes) override {
    return shm_.post(peer, lane, signature, bytes);
  }
  std::uint64_t released(int peer, Lane lane) override { return shm_.released(peer, lane); }
  Incoming peek(int peer, Lane lane) override { return shm_.peek(peer, lane); }
  void consume(int peer, Lane lane, std::size_t bytes) override { shm_.consume(peer, lane, bytes); }

  void progress() override {
    check();
    const auto now = Deadline::Clock::now();
    if (now < next_look_) return;
    next_look_ = now + look_interval;
    poller_.poll(microseconds(0));
    look();
  }

  void wait(microseconds most) override {
    if (stirred()) return;
    for (int i = crowded_ ? spins : 0; i < spins; ++i) {
      if (stirred()) return;
      cpu_pause();
    }
    for (int i = crowded_ ? 0 : yields; i < yields; ++i) {
      sched_yield();
      if (stirred()) return;
    }
    shm_.set_asleep(true);
    if (!stirred()) poller_.poll(std::min<microseconds>(most, longest_sleep));
    shm_.set_asleep(false);
    next_look_ = {};
  }

  void wake() noexcept override {
    woken_.store(true, std::memory_order_seq_cst);
    Poller::ring(poller_.doorbell());
  }

  void abort(const Failure& failure) noexcept override { poison(failure); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return shm_.allocate(bytes); }
  bool one_host() const override { return true; }
  std::string describe() const override { return "shm"; }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  static std::vector<int> neighbours(int rank, const Roster& roster) {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < roster.hosts.size(); ++r)
      if (roster.hosts[r] == roster.hosts[at(rank)]) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  /// Something that a caller of wait() wants to see.
  bool stirred() { return woken_.exchange(false) || shm_.changed() || failed_.load() || shm_.verdict(); }

  void check() {
    if (!failed_.load(std::memory_order_acquire))
      if (const auto failure = shm_.verdict()) poison(*failure);
    if (failed_.load(std::memory_order_acquire)) throw_failure();
  }

  void look() {
    if (const auto failure = shm_.look()) poison(*failure);
    check();
  }

  /// The first failure wins; every rank is told. Any thread.
  void poison(const Failure& failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    failure_ = shm_.agree(failure);
    failed_.store(true, std::memory_order_release);
    Poller::ring(poller_.doorbell());
  }

  [[noreturn]] void throw_failure() const {
    throw Error(failure_.deliberate ? Errc::aborted : Errc::peer_lost, failure_.reason, failure_.culprit);
  }

  int rank_, size_;
  bool crowded_;  ///< more ranks than processors on this machine: spinning would take them from each other
  Poller poller_;
  ShmLinks shm_;
  Deadline::Clock::time_point next_look_{};
  std::atomic<bool> woken_{false};
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Failure failure_;  ///< written before failed_
};

void check_arguments(int rank, int size, const TransportOptions& options) {
  require(size >= 1 && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size);
  require(options.kind == "auto" || options.kind == "shm" || options.kind == "tcp", Errc::config,
          "transport '", options.kind, "' is not one of auto, shm, tcp");
  require(options.sockets >= 1 && options.sockets <= 16, Errc::config, options.sockets,
          " sockets a link are not 1 to 16");
}

}  // namespace

std::unique_ptr<Transport> connect_transport(int rank, int size, Store& store,
                                             const TransportOptions& options, Deadline deadline) {
  check_arguments(rank, size, options);
  const Roster roster = exchange_roster(rank, size, store, options, deadline);
  auto transport = std::make_unique<GroupTransport>(rank, size, roster);
  transport->connect(store, roster, deadline);
  return transport;
}

}  // namespace rz
