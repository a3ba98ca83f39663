#include "comm/transports/connect.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/pause.h"
#include "comm/core/types.h"
#include "comm/store_detail.h"
#include "comm/topology.h"
#include "comm/transports/poller.h"
#include "comm/transports/roster.h"
#include "comm/transports/shm.h"
#include "comm/transports/staging_ring.h"
#include "comm/transports/tcp.h"

namespace rz {

namespace {

using std::chrono::microseconds;

/// How long wait() looks before it sleeps: about as long as falling asleep and waking up takes, and over TCP
/// as long as a small message does.
constexpr int spins = 2000;
constexpr int yields = 4;
constexpr int pauses = 4;  ///< between two looks at sockets, each a system call
constexpr auto longest_look = microseconds(100);
/// The same where ranks are crowded, and each look gives the processor to another rank: twice as many take
/// turns.
constexpr auto longest_look_when_crowded = microseconds(200);
/// Sockets are looked at this often while progress() is called all the time.
constexpr auto look_interval = std::chrono::milliseconds(2);
/// A sleep is cut here, in case something is missed.
constexpr auto longest_sleep = std::chrono::milliseconds(100);

/// Routes each peer to its link, and is the one place for waiting and for failures.
class GroupTransport final : public Transport {
 public:
  GroupTransport(int rank, int size, const Roster& roster, const TransportOptions& options,
                 const Store& store)
      : rank_(rank),
        size_(size),
        near_(neighbours(rank, roster, options.kind)),
        hosts_(number_hosts(roster, options.kind)),
        crowded_(std::any_of(near_.begin(), near_.end(), [&](int r) { return roster.crowded(r); })),
        some_near_(options.kind != "tcp" &&
                   static_cast<int>(std::set(roster.hosts.begin(), roster.hosts.end()).size()) < size),
        waiting_(rank),
        shm_(rank, near_, near_.size() > 1 ? staging_ring_bytes(caches(), near_.size()) : 0, poller_,
             waiting_),
        tcp_(rank, others(size, near_), sockets_a_link(hosts_, options.sockets), options.congestion,
             listen_address(roster, options, store), poller_, waiting_) {}

  void connect(Store& store, const Roster& roster, Deadline deadline) {
    const auto entries =
        exchange(rank_, size_, store, "at", str(shm_.address(), ' ', tcp_.address()), deadline);
    std::vector<std::string> shm, tcp;
    for (const auto& entry : entries) {
      const auto space = std::min(entry.find(' '), entry.size());
      shm.push_back(entry.substr(0, space));
      tcp.push_back(entry.substr(std::min(space + 1, entry.size())));
    }
    const Introduction me{roster.job, rank_, size_, {}};
    shm_.connect(me, shm, deadline);
    tcp_.connect(me, tcp, deadline);
  }

  std::size_t post(int peer, Lane lane, const Signature& signature,
                   std::span<const std::byte> bytes) override {
    return shm_.has(peer) ? shm_.post(peer, lane, signature, bytes) : tcp_.post(peer, lane, signature, bytes);
  }
  std::uint64_t released(int peer, Lane lane) override {
    return shm_.has(peer) ? shm_.released(peer, lane) : tcp_.released(peer, lane);
  }
  Incoming peek(int peer, Lane lane) override {
    return shm_.has(peer) ? shm_.peek(peer, lane) : tcp_.peek(peer, lane);
  }
  void consume(int peer, Lane lane, std::size_t bytes) override {
    return shm_.has(peer) ? shm_.consume(peer, lane, bytes) : tcp_.consume(peer, lane, bytes);
  }
  std::size_t receive(int peer, Lane lane, std::span<std::byte> into) override {
    return shm_.has(peer) ? Transport::receive(peer, lane, into) : tcp_.receive(peer, lane, into);
  }

  void progress() override {
    check();
    if (tcp_.empty()) {  // then there is nothing to move, only to see who died
      const auto now = Deadline::Clock::now();
      if (now < next_look_) return;
      next_look_ = now + look_interval;
    }
    fresh_ |= poller_.poll(microseconds(0));
    look();
  }

  void wait(microseconds most, bool eager) override {
    if (std::exchange(fresh_, false) || stirred()) return;
    if (look_around(eager)) return;
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

  void ask() override {
    waiting_.forget();
    for (int r = 0; r < size_; ++r)
      if (r != rank_) tell(r, {WaitNote::question, {}});
  }
  void answer(const RankSet& waits_for) override {
    for (const int asker : waiting_.take_askers()) tell(asker, {WaitNote::answer, waits_for});
  }
  const WaitForGraph& waiting() const override { return waiting_; }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return allocate_zeroed(arena(), bytes); }
  std::shared_ptr<Arena> arena() const override { return near_.size() > 1 ? shm_.arena() : nullptr; }
  std::span<const MeetingView> meeting() const override {
    return one_host() && size_ > 1 ? shm_.meeting() : std::span<const MeetingView>();
  }
  void nudge() override { shm_.nudge(); }
  void need(int peer) override { shm_.need(peer); }
  bool crowded() const override { return crowded_; }
  std::optional<SharedSpot> share(std::span<const std::byte> bytes) override { return shm_.share(bytes); }
  std::byte* reach(int peer, const SharedSpot& spot, std::size_t bytes) override {
    return shm_.reach(peer, spot, bytes);
  }
  bool reads_peers() const override { return shm_.reads_peers(); }
  PeerRead read(int peer, std::uint64_t address, std::span<std::byte> into) override {
    return shm_.read(peer, address, into);
  }
  bool one_host() const override { return tcp_.empty(); }
  std::string describe() const override { return tcp_.empty() ? "shm" : some_near_ ? "shm+tcp" : "tcp"; }
  std::span<const int> hosts() const override { return hosts_; }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  /// The ranks that share memory with this one, itself among them.
  static std::vector<int> neighbours(int rank, const Roster& roster, const std::string& kind) {
    std::vector<int> near, far;
    for (int r = 0; r < static_cast<int>(roster.hosts.size()); ++r)
      (roster.hosts[at(r)] == roster.hosts[at(rank)] ? near : far).push_back(r);
    require(kind != "shm" || far.empty(), Errc::config, "transport 'shm', but rank ", list_ranks(far),
            " is not on the host of rank ", rank, "; use 'auto' or 'tcp'");
    return kind == "tcp" ? std::vector{rank} : near;
  }
  /// Over "tcp" alone every rank is a host of its own.
  static std::vector<int> number_hosts(const Roster& roster, const std::string& kind) {
    std::vector<int> numbers;
    std::vector<std::string> seen;
    for (const std::string& host : roster.hosts) {
      const auto at = std::find(seen.begin(), seen.end(), host);
      const bool known = at != seen.end() && kind != "tcp";
      numbers.push_back(static_cast<int>(known ? at - seen.begin() : std::ssize(seen)));
      if (!known) seen.push_back(host);
    }
    return numbers;
  }
  static std::vector<int> others(int size, const std::vector<int>& near) {
    std::vector<int> far;
    for (int r = 0; r < size; ++r)
      if (!std::binary_search(near.begin(), near.end(), r)) far.push_back(r);
    return far;
  }
  static SocketAddress listen_address(const Roster& roster, const TransportOptions& options,
                                      const Store& store) {
    const bool one_machine = std::set(roster.machines.begin(), roster.machines.end()).size() == 1;
    const bool needed =
        options.kind == "tcp" || std::set(roster.hosts.begin(), roster.hosts.end()).size() > 1;
    if (!needed) return {};
    return choose_address(options.interface, one_machine, tcp_store_local_address(store));
  }

  void tell(int peer, const WaitNote& note) {
    shm_.has(peer) ? shm_.tell(peer, note) : tcp_.tell(peer, note);
  }

  /// Looks for news without sleeping; true if there is something.
  bool look_around(bool eager) {
    if (eager && !tcp_.empty()) return look_at_sockets();
    const bool spinning = eager && !crowded_;
    for (int i = spinning ? 0 : spins; i < spins; ++i, cpu_pause())
      if (stirred()) return true;
    for (int i = spinning ? yields : 0; i < yields; ++i) {
      sched_yield();
      if (stirred() || (!tcp_.empty() && poller_.poll(microseconds(0)))) return true;
    }
    return false;
  }

  bool look_at_sockets() {
    const auto end = Deadline::Clock::now() + (crowded_ ? longest_look_when_crowded : longest_look);
    do {
      if (crowded_) sched_yield();
      for (int i = 0; i < pauses; ++i, cpu_pause())
        if (stirred()) return true;
      if (poller_.poll(microseconds(0))) return true;
    } while (Deadline::Clock::now() < end);
    return false;
  }

  /// Something that a caller of wait() wants to see.
  bool stirred() { return woken_.exchange(false) || shm_.changed() || failed_.load() || shm_.verdict(); }

  void check() {
    if (!failed_.load(std::memory_order_acquire))
      if (const auto failure = shm_.verdict()) poison(*failure);
    if (!failed_.load(std::memory_order_acquire)) return;
    tcp_.flush_controls();
    throw_failure();
  }

  void look() {
    if (const auto failure = tcp_.look()) poison(*failure);
    if (const auto failure = shm_.look()) poison(*failure);
    check();
  }

  /// The first failure wins; every rank is told. Any thread.
  void poison(const Failure& failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    failure_ = shm_.agree(failure);
    tcp_.announce(failure_);
    failed_.store(true, std::memory_order_release);
    Poller::ring(poller_.doorbell());
  }

  [[noreturn]] void throw_failure() const { throw Error(failure_.code, failure_.reason, failure_.culprit); }

  int rank_, size_;
  std::vector<int> near_, hosts_;
  bool crowded_;    ///< more ranks than processors on this machine: spinning would take them from each other
  bool some_near_;  ///< some ranks of the group share memory, not only this one's
  Poller poller_;
  WaitForGraph waiting_;
  ShmLinks shm_;
  TcpLinks tcp_;
  bool fresh_ = false;  ///< progress() saw something that wait() must not sleep over
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

// Each link's blocks go by turns over its sockets, and all sockets of a host by turns over its network: with
// more of them every block is longer on its way, and so is all that follows from it.
int sockets_a_link(std::span<const int> hosts, int wanted) {
  std::ptrdiff_t sharing = 1;
  for (const int host : hosts) sharing = std::max(sharing, std::count(hosts.begin(), hosts.end(), host));
  return std::max(1, wanted / static_cast<int>(sharing));
}

std::unique_ptr<Transport> connect_transport(int rank, int size, Store& store,
                                             const TransportOptions& options, Deadline deadline) {
  std::string tuning;
  return connect_transport(rank, size, store, options, deadline, tuning);
}

std::unique_ptr<Transport> connect_transport(int rank, int size, Store& store,
                                             const TransportOptions& options, Deadline deadline,
                                             std::string& tuning) {
  check_arguments(rank, size, options);
  const Roster roster = exchange_roster(rank, size, store, options, deadline);
  tuning = roster.tuning;
  auto transport = std::make_unique<GroupTransport>(rank, size, roster, options, store);
  transport->connect(store, roster, deadline);
  return transport;
}

}  // namespace rz
