#include "comm/transport/group_transport.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/core/types.h"
#include "comm/net/poller.h"
#include "comm/os/spin.h"
#include "comm/shared_memory/staging_ring.h"
#include "comm/topology.h"
#include "comm/transport/peer_info.h"
#include "comm/transport/shm_transport.h"
#include "comm/transport/tcp_transport.h"

namespace rz {

namespace {

using std::chrono::microseconds;

/// Spin limits of wait() before it sleeps. In shared memory: about the cost of a sleep and a wake-up. Over
/// TCP: about the latency of a small message.
constexpr int shm_spins = 2000;
constexpr int shm_yields = 4;
constexpr int pauses_per_poll = 4;  ///< between two polls of the sockets, each a system call
constexpr auto max_socket_spin = microseconds(100);
/// Spin limit on an oversubscribed host, where the loop yields: twice as long, since ranks take turns.
constexpr auto max_oversubscribed_spin = microseconds(200);
/// Interval of socket polls in progress() if no peer uses TCP.
constexpr auto failure_poll_interval = std::chrono::milliseconds(2);
/// Longest sleep, in case a wake-up is missed.
constexpr auto max_poll_sleep = std::chrono::milliseconds(100);

/// Routes each peer to ShmTransport or TcpTransport, and implements waiting and failure handling for both.
class GroupTransport final : public Transport {
 public:
  GroupTransport(int rank, int size, const PeerInfo& peer_info, const TransportOptions& options,
                 const Store& store)
      : rank_(rank),
        size_(size),
        local_ranks_(local_ranks(rank, peer_info, options.kind)),
        hosts_(number_hosts(peer_info, options.kind)),
        oversubscribed_(std::any_of(local_ranks_.begin(), local_ranks_.end(),
                                    [&](int r) { return peer_info.oversubscribed(r); })),
        any_shared_memory_(options.kind != "tcp" &&
                           static_cast<int>(std::set(peer_info.hosts.begin(), peer_info.hosts.end()).size()) <
                               size),
        wait_graph_(rank),
        shm_(rank, local_ranks_,
             local_ranks_.size() > 1 ? staging_ring_bytes(caches(), local_ranks_.size()) : 0, poller_,
             wait_graph_),
        tcp_(rank, remote_ranks(size, local_ranks_), sockets_per_peer(hosts_, options.sockets),
             options.congestion, listen_address(peer_info, options, store), poller_, wait_graph_) {}

  void connect(Store& store, const PeerInfo& peer_info, Deadline deadline) {
    const auto entries = store_all_gather(rank_, size_, store, "address",
                                          concat(shm_.address(), ' ', tcp_.address()), deadline);
    std::vector<std::string> shm, tcp;
    for (const auto& entry : entries) {
      const auto space = std::min(entry.find(' '), entry.size());
      shm.push_back(entry.substr(0, space));
      tcp.push_back(entry.substr(std::min(space + 1, entry.size())));
    }
    const HandshakeInfo me{peer_info.job_id, rank_, size_, {}};
    shm_.connect(me, shm, deadline);
    tcp_.connect(me, tcp, deadline);
  }

  std::size_t post(int peer, Channel lane, const CallSignature& signature,
                   std::span<const std::byte> bytes) override {
    return shm_.has(peer) ? shm_.post(peer, lane, signature, bytes) : tcp_.post(peer, lane, signature, bytes);
  }
  std::uint64_t released(int peer, Channel lane) override {
    return shm_.has(peer) ? shm_.released(peer, lane) : tcp_.released(peer, lane);
  }
  ReceiveView peek(int peer, Channel lane) override {
    return shm_.has(peer) ? shm_.peek(peer, lane) : tcp_.peek(peer, lane);
  }
  void consume(int peer, Channel lane, std::size_t bytes) override {
    return shm_.has(peer) ? shm_.consume(peer, lane, bytes) : tcp_.consume(peer, lane, bytes);
  }
  std::size_t receive(int peer, Channel lane, std::span<std::byte> into) override {
    return shm_.has(peer) ? Transport::receive(peer, lane, into) : tcp_.receive(peer, lane, into);
  }

  void progress() override {
    throw_if_failed();
    if (tcp_.empty()) {  // the sockets carry no data, but show which peers died
      const auto now = Deadline::Clock::now();
      if (now < next_poll_) return;
      next_poll_ = now + failure_poll_interval;
    }
    event_pending_ |= poller_.poll(microseconds(0));
    poll_failures();
  }

  void wait(microseconds most, bool eager) override {
    if (std::exchange(event_pending_, false) || has_event()) return;
    if (spin(eager)) return;
    shm_.set_sleeping(true);
    if (!has_event()) poller_.poll(std::min<microseconds>(most, max_poll_sleep));
    shm_.set_sleeping(false);
    next_poll_ = {};
  }

  void wake() noexcept override {
    woken_.store(true, std::memory_order_seq_cst);
    Poller::ring_doorbell(poller_.doorbell());
  }

  void abort(const Failure& failure) noexcept override { poison(failure); }

  void query_waits() override {
    wait_graph_.clear_replies();
    for (int r = 0; r < size_; ++r)
      if (r != rank_) send_wait_message(r, {WaitMessage::query, {}});
  }
  void reply_waits(const RankSet& waits_for) override {
    for (const int asker : wait_graph_.drain_requesters())
      send_wait_message(asker, {WaitMessage::reply, waits_for});
  }
  const WaitForGraph& wait_graph() const override { return wait_graph_; }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return allocate_zeroed(allocator(), bytes);
  }
  std::shared_ptr<SharedMemoryAllocator> allocator() const override {
    return local_ranks_.size() > 1 ? shm_.allocator() : nullptr;
  }
  std::span<const MailboxView> mailboxes() const override {
    return one_host() && size_ > 1 ? shm_.mailboxes() : std::span<const MailboxView>();
  }
  void wake_peers() override { shm_.wake_peers(); }
  void require_alive(int peer) override { shm_.require_alive(peer); }
  bool oversubscribed() const override { return oversubscribed_; }
  std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte> bytes) override {
    return shm_.export_handle(bytes);
  }
  std::byte* map_handle(int peer, const SharedMemoryHandle& spot, std::size_t bytes) override {
    return shm_.map_handle(peer, spot, bytes);
  }
  bool has_cma() const override { return shm_.has_cma(); }
  CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into) override {
    return shm_.cma_read(peer, address, into);
  }
  bool one_host() const override { return tcp_.empty(); }
  std::string describe() const override {
    return tcp_.empty() ? "shm" : any_shared_memory_ ? "shm+tcp" : "tcp";
  }
  std::span<const int> hosts() const override { return hosts_; }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  /// The ranks that share memory with this one, itself included.
  static std::vector<int> local_ranks(int rank, const PeerInfo& peer_info, const std::string& kind) {
    std::vector<int> near, far;
    for (int r = 0; r < static_cast<int>(peer_info.hosts.size()); ++r)
      (peer_info.hosts[at(r)] == peer_info.hosts[at(rank)] ? near : far).push_back(r);
    require(kind != "shm" || far.empty(), Errc::config, "transport 'shm', but rank ", list_ranks(far),
            " is not on the host of rank ", rank, "; use 'auto' or 'tcp'");
    return kind == "tcp" ? std::vector{rank} : near;
  }
  /// With kind "tcp", every rank counts as a host.
  static std::vector<int> number_hosts(const PeerInfo& peer_info, const std::string& kind) {
    std::vector<int> numbers;
    std::vector<std::string> seen;
    for (const std::string& host : peer_info.hosts) {
      const auto at = std::find(seen.begin(), seen.end(), host);
      const bool known = at != seen.end() && kind != "tcp";
      numbers.push_back(static_cast<int>(known ? at - seen.begin() : std::ssize(seen)));
      if (!known) seen.push_back(host);
    }
    return numbers;
  }
  static std::vector<int> remote_ranks(int size, const std::vector<int>& near) {
    std::vector<int> far;
    for (int r = 0; r < size; ++r)
      if (!std::binary_search(near.begin(), near.end(), r)) far.push_back(r);
    return far;
  }
  static SocketAddress listen_address(const PeerInfo& peer_info, const TransportOptions& options,
                                      const Store& store) {
    const bool one_machine = std::set(peer_info.machines.begin(), peer_info.machines.end()).size() == 1;
    const bool needed =
        options.kind == "tcp" || std::set(peer_info.hosts.begin(), peer_info.hosts.end()).size() > 1;
    if (!needed) return {};
    return choose_address(options.interface, one_machine, tcp_store_local_address(store));
  }

  void send_wait_message(int peer, const WaitMessage& note) {
    shm_.has(peer) ? shm_.send_wait_message(peer, note) : tcp_.send_wait_message(peer, note);
  }

  /// Spins without sleeping; true if there is an event.
  bool spin(bool eager) {
    if (eager && !tcp_.empty()) return spin_on_sockets();
    const bool spinning = eager && !oversubscribed_;
    for (int i = spinning ? 0 : shm_spins; i < shm_spins; ++i, cpu_pause())
      if (has_event()) return true;
    for (int i = spinning ? shm_yields : 0; i < shm_yields; ++i) {
      sched_yield();
      if (has_event() || (!tcp_.empty() && poller_.poll(microseconds(0)))) return true;
    }
    return false;
  }

  bool spin_on_sockets() {
    const auto end = Deadline::Clock::now() + (oversubscribed_ ? max_oversubscribed_spin : max_socket_spin);
    do {
      if (oversubscribed_) sched_yield();
      for (int i = 0; i < pauses_per_poll; ++i, cpu_pause())
        if (has_event()) return true;
      if (poller_.poll(microseconds(0))) return true;
    } while (Deadline::Clock::now() < end);
    return false;
  }

  /// An event for which wait() must return.
  bool has_event() {
    return woken_.exchange(false) || shm_.changed() || failed_.load() || shm_.group_failure();
  }

  void throw_if_failed() {
    if (!failed_.load(std::memory_order_acquire))
      if (const auto failure = shm_.group_failure()) poison(*failure);
    if (!failed_.load(std::memory_order_acquire)) return;
    tcp_.flush_controls();
    throw_failure();
  }

  void poll_failures() {
    if (const auto failure = tcp_.poll_failures()) poison(*failure);
    if (const auto failure = shm_.poll_failures()) poison(*failure);
    throw_if_failed();
  }

  /// Fails the group; the first failure wins and is sent to every rank. Any thread.
  void poison(const Failure& failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    failure_ = shm_.elect_failure(failure);
    tcp_.broadcast_failure(failure_);
    failed_.store(true, std::memory_order_release);
    Poller::ring_doorbell(poller_.doorbell());
  }

  [[noreturn]] void throw_failure() const { throw Error(failure_.code, failure_.reason, failure_.culprit); }

  int rank_, size_;
  std::vector<int> local_ranks_, hosts_;
  bool oversubscribed_;     ///< more ranks than processors on this host: spinning slows other ranks down
  bool any_shared_memory_;  ///< some ranks of the group share memory, not necessarily with this one
  Poller poller_;
  WaitForGraph wait_graph_;
  ShmTransport shm_;
  TcpTransport tcp_;
  bool event_pending_ = false;  ///< progress() saw an event, so the next wait() returns at once
  Deadline::Clock::time_point next_poll_{};
  std::atomic<bool> woken_{false};
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Failure failure_;  ///< written before failed_ is set
};

void check_arguments(int rank, int size, const TransportOptions& options) {
  require(size >= 1 && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size);
  require(options.kind == "auto" || options.kind == "shm" || options.kind == "tcp", Errc::config,
          "transport '", options.kind, "' is not one of auto, shm, tcp");
  require(options.sockets >= 1 && options.sockets <= 16, Errc::config, options.sockets,
          " sockets a link are not 1 to 16");
}

}  // namespace

// Frames to a peer are striped over its sockets, and all sockets of a host share its network. With more
// sockets, every frame takes longer, and so do all transfers that depend on it.
int sockets_per_peer(std::span<const int> hosts, int wanted) {
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
  const PeerInfo peer_info = exchange_peer_info(rank, size, store, options, deadline);
  tuning = peer_info.tuning;
  auto transport = std::make_unique<GroupTransport>(rank, size, peer_info, options, store);
  transport->connect(store, peer_info, deadline);
  return transport;
}

}  // namespace rz
