#include "comm/net/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <set>

#include "comm/core/error.h"
#include "comm/net/socket.h"

namespace rz::net {

namespace {

constexpr std::uint32_t protocol_version = 1;
constexpr std::size_t max_passed_fds = 4;
constexpr std::size_t max_pending_connections = 64;
constexpr auto unauthenticated_timeout = std::chrono::seconds(5);
constexpr auto check_period = std::chrono::seconds(1);

struct Hello {
  char magic[8];
  std::uint32_t version, rank, size, index;
  JobId job;
};
static_assert(sizeof(Hello) == 40);

/// A connection whose handshake is not complete.
struct PendingConnection {
  Connection connection;
  bool outgoing = false;  ///< opened by this rank; the peer's rank is known
  bool connecting = false;
  Deadline deadline;
  Hello hello{};
  std::size_t received = 0;
};

class Handshake {
 public:
  Handshake(const HandshakeInfo& me, int listener, const std::vector<int>& incoming, int links,
            Deadline deadline)
      : self_(me), listener_(listener), deadline_(deadline) {
    for (const int rank : incoming)
      for (int i = 0; i < links; ++i) missing_.insert({rank, i});
  }

  std::vector<Connection> run(std::vector<Connection> outgoing) {
    for (auto& call : outgoing) {
      missing_.insert({call.rank, call.index});
      pending_.push_back({std::move(call), true, true, deadline_});
    }
    while (!missing_.empty()) step();
    return std::move(established_);
  }

 private:
  void step() {
    if (deadline_.expired())
      throw Error(Errc::timeout,
                  concat("rank ", self_.rank, ": no connection with rank ", list_ranks(missing_ranks()),
                         " before the deadline; did the process end, or does a firewall stand between?"),
                  missing_ranks().front());
    if (self_.check && next_check_.expired()) {
      next_check_ = Deadline::after(check_period);
      self_.check();
    }
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const auto& g : pending_)
      fds.push_back({g.connection.socket.get(), static_cast<short>(g.connecting ? POLLOUT : POLLIN), 0});
    if (poll(fds.data(), fds.size(), deadline_.poll_ms(100)) < 0 && errno != EINTR) fail_errno("poll");
    std::size_t i = 1;
    for (auto it = pending_.begin(); it != pending_.end(); ++i)
      it = (fds[i].revents ? advance(*it) : !it->deadline.expired()) ? std::next(it) : pending_.erase(it);
    if (fds[0].revents) accept_connections();
  }

  /// False if the connection is no longer pending: it was established, or must be dropped.
  bool advance(PendingConnection& pending) {
    if (pending.connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(pending.connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) fail_outgoing(pending, std::strerror(error));
      pending.connecting = false;
      return send_hello(pending);
    }
    const ssize_t n = receive_hello(pending);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0)
      return pending.outgoing ? fail_outgoing(pending, n ? std::strerror(errno) : "it closed the connection")
                              : false;
    pending.received += static_cast<std::size_t>(n);
    if (pending.received < sizeof(Hello)) return true;
    require_one_process(pending.hello);
    if (!is_valid_hello(pending))
      return pending.outgoing ? fail_outgoing(pending, "another program listens there") : false;
    pending.connection.rank = static_cast<int>(pending.hello.rank);
    pending.connection.index = static_cast<int>(pending.hello.index);
    if (!pending.outgoing && !send_hello(pending)) return false;
    missing_.erase({pending.connection.rank, pending.connection.index});
    established_.push_back(std::move(pending.connection));
    return false;
  }

  /// A hello with the job id is of a process that reads this group's store.
  void require_one_process(const Hello& h) const {
    const int rank = static_cast<int>(h.rank);
    const bool is_second = std::ranges::any_of(established_, [&](const Connection& c) {
      return c.rank == rank && c.index == static_cast<int>(h.index);
    });
    if (h.job != self_.job || !is_second) return;
    throw Error(
        Errc::rendezvous,
        concat("rank ", self_.rank, ": two processes connect as rank ", rank,
               "; two jobs that use one MASTER_ADDR and MASTER_PORT need different texts in RZ_LAUNCH"),
        rank);
  }

  bool is_valid_hello(const PendingConnection& pending) const {
    const Hello& h = pending.hello;
    const std::pair sender{static_cast<int>(h.rank), static_cast<int>(h.index)};
    if (std::memcmp(h.magic, "ringzero", 8) != 0 || h.version != protocol_version || h.job != self_.job ||
        h.size != static_cast<std::uint32_t>(self_.size) || !missing_.count(sender))
      return false;
    return !pending.outgoing || sender == std::pair{pending.connection.rank, pending.connection.index};
  }

  bool fail_outgoing(const PendingConnection& pending, const char* why) const {
    const int peer = pending.connection.rank;
    const bool is_unix = pending.connection.address.find(':') == std::string::npos;
    throw Error(Errc::rendezvous,
                concat("rank ", self_.rank, " cannot connect to rank ", peer, " at ",
                       is_unix ? "unix socket @" : "", pending.connection.address, ": ", why,
                       is_unix ? "; did that process end, or report an error of its own?"
                               : "; is that process alive, and the address reachable from this host "
                                 "(RZ_INTERFACE chooses another)?"),
                peer);
  }

  bool send_hello(PendingConnection& pending) {
    Hello hello{{'r', 'i', 'n', 'g', 'z', 'e', 'r', 'o'},
                protocol_version,
                static_cast<std::uint32_t>(self_.rank),
                static_cast<std::uint32_t>(self_.size),
                static_cast<std::uint32_t>(pending.connection.index),
                self_.job};
    iovec bytes{&hello, sizeof hello};
    alignas(cmsghdr) char control[CMSG_SPACE(max_passed_fds * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    if (const std::size_t size = self_.passed_fds.size() * sizeof(int)) {
      message.msg_control = control, message.msg_controllen = CMSG_SPACE(size);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(size);
      std::memcpy(CMSG_DATA(header), self_.passed_fds.data(), size);
    }
    const ssize_t n = sendmsg(pending.connection.socket.get(), &message, MSG_NOSIGNAL);
    if (n != sizeof hello && pending.outgoing)
      fail_outgoing(pending, n < 0 ? std::strerror(errno) : "short write");
    return n == sizeof hello;
  }

  static ssize_t receive_hello(PendingConnection& pending) {
    iovec bytes{reinterpret_cast<char*>(&pending.hello) + pending.received, sizeof(Hello) - pending.received};
    alignas(cmsghdr) char control[CMSG_SPACE(max_passed_fds * sizeof(int))];
    msghdr message{};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(pending.connection.socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (n <= 0) return n;
    for (auto* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
      if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
        for (std::size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
          int fd = -1;
          std::memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
          pending.connection.received_fds.emplace_back(fd);
        }
    return n;
  }

  void accept_connections() {
    for (int i = 0; i < max_accepts_per_poll; ++i) {
      UniqueFd socket(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          if (drop_oldest_unauthenticated()) continue;
          fail_errno("accept4", "(ulimit -n raises the limit)");
        }
        continue;  // the connection was closed before it was accepted
      }
      if (!same_user(socket.get())) continue;
      PendingConnection pending{Connection{}, false, false, Deadline::after(unauthenticated_timeout)};
      pending.connection.socket = std::move(socket);
      pending_.push_back(std::move(pending));
      evict_excess();
    }
  }

  static bool is_unauthenticated(const PendingConnection& g) { return !g.outgoing; }

  /// Limits the number of unauthenticated connections: drops the oldest.
  void evict_excess() {
    if (static_cast<std::size_t>(std::count_if(pending_.begin(), pending_.end(), is_unauthenticated)) >
        max_pending_connections + missing_.size())
      drop_oldest_unauthenticated();
  }
  bool drop_oldest_unauthenticated() {
    const auto pending = std::find_if(pending_.begin(), pending_.end(), is_unauthenticated);
    if (pending == pending_.end()) return false;
    pending_.erase(pending);
    return true;
  }

  /// Whether the peer may connect: on a unix socket, only processes of this user may.
  static bool same_user(int socket) {
    int domain = 0;
    socklen_t size = sizeof domain;
    getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    if (domain != AF_UNIX) return true;
    ucred peer{};
    size = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
  }

  std::vector<int> missing_ranks() const {
    std::set<int> ranks;
    for (const auto& [rank, index] : missing_) ranks.insert(rank);
    return {ranks.begin(), ranks.end()};
  }

  const HandshakeInfo& self_;
  int listener_;
  Deadline deadline_, next_check_ = Deadline::after(check_period);
  std::set<std::pair<int, int>> missing_;  ///< rank, index
  std::list<PendingConnection> pending_;
  std::vector<Connection> established_;
};

}  // namespace

std::vector<Connection> handshake(const HandshakeInfo& me, int listener, std::vector<Connection> outgoing,
                                  const std::vector<int>& incoming, int links, Deadline deadline) {
  return Handshake(me, listener, incoming, links, deadline).run(std::move(outgoing));
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += concat(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

}  // namespace rz::net
