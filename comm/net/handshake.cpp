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
#include "comm/net/strangers.h"

namespace rz::net {

namespace {

constexpr std::size_t max_pending_connections = 64;
constexpr auto check_period = std::chrono::seconds(1);
constexpr int max_tries = 8;

/// A connection whose handshake is not complete.
struct PendingConnection {
  Connection connection;
  Authentication authentication;
  bool outgoing = false;  ///< opened by this rank; the peer's rank is known
  bool connecting = false;
  Deadline deadline;
  SocketAddress from{};  ///< of an accepted one
  int tries = 0;         ///< to open it again
  int begun_anew = 0;    ///< before the listener has answered
  Deadline answer = Deadline::after(time_of_soon_try);
};

class Handshake {
 public:
  Handshake(const HandshakeInfo& me, int listener, const std::vector<int>& incoming, int links,
            Deadline deadline)
      : self_(me),
        key_(me.secret.get(), Purpose::data, {reinterpret_cast<const char*>(me.job.data()), me.job.size()}),
        group_(fingerprint(concat("group ", to_hex(me.job)))),
        listener_(listener),
        deadline_(deadline),
        accept_rate_(max_pending_connections + incoming.size() * static_cast<std::size_t>(links)) {
    for (const int rank : incoming)
      for (int i = 0; i < links; ++i) missing_.insert({rank, i});
  }

  std::vector<Connection> run(std::vector<Connection> outgoing) {
    for (auto& call : outgoing) {
      missing_.insert({call.rank, call.index});
      Authentication end = client_end(call);
      pending_.push_back({std::move(call), std::move(end), true, true, deadline_});
    }
    while (!missing_.empty()) step();
    return std::move(established_);
  }

 private:
  void step() {
    if (deadline_.expired())
      throw Error(Errc::timeout,
                  concat("rank ", self_.rank, ": no connection with rank ", list_ranks(missing_ranks()),
                         " before the deadline; did the process end, or does a firewall stand between?",
                         strangers_.text()),
                  missing_ranks().front());
    if (self_.check && next_check_.expired()) {
      next_check_ = Deadline::after(check_period);
      self_.check();
    }
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const auto& g : pending_)
      fds.push_back({g.connection.socket.get(), static_cast<short>(g.connecting ? POLLOUT : POLLIN), 0});
    const Deadline rest = Deadline::after(accept_rate_.rest(AcceptRate::while_starting));
    const bool rests = !rest.expired();
    if (rests) fds[0].fd = -1;
    if (poll(fds.data(), fds.size(), deadline_.poll_ms(rests ? rest.poll_ms(100) : 100)) < 0 &&
        errno != EINTR)
      fail_errno("poll");
    std::size_t i = 1;
    // What has arrived is read first: this process may have been without a processor until the deadline.
    for (auto it = pending_.begin(); it != pending_.end(); ++i)
      it = attend(*it, fds[i].revents) && !it->deadline.expired() ? std::next(it) : drop(it);
    if (fds[0].revents) accept_connections();
  }

  Authentication client_end(const Connection& call) const {
    Authentication end = Authentication::client(
        key_,
        {static_cast<std::uint32_t>(self_.size), static_cast<std::uint32_t>(self_.rank),
         static_cast<std::uint32_t>(call.rank), static_cast<std::uint8_t>(call.index), group_},
        self_.encryption);
    end.passed_fds = self_.passed_fds;
    return end;
  }

  bool attend(PendingConnection& pending, short events) {
    if (events) return advance(pending);
    if (pending.connecting && pending.answer.expired() && pending.begun_anew++ < soon_tries)
      open_again(pending);  // a unix socket is connected at once
    return true;
  }

  /// False if the connection is no longer pending: it was established, or must be dropped.
  bool advance(PendingConnection& pending) {
    if (pending.connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(pending.connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) fail_outgoing(pending, std::strerror(error));
      pending.connecting = false;
    }
    Authentication& end = pending.authentication;
    end.advance(pending.connection.socket.get());
    // The client takes its connection for established once it has sent its proof, so it is not dropped for a
    // late one. Strangers that have read the job in another connection are limited in number.
    if (end.has_proof() || knows_job(end)) pending.deadline = deadline_;
    if (end.status() == Authentication::Status::pending) return true;
    if (end.status() == Authentication::Status::refused)
      return pending.outgoing && (connects_again(pending) || fail_outgoing(pending, end.reason()));
    if (!pending.outgoing) {
      accept_rate_.proven();
      const Claim claim = end.claim();
      require_one_process(claim);
      pending.connection.rank = static_cast<int>(claim.rank);
      pending.connection.index = claim.index;
    }
    if (!missing_.erase({pending.connection.rank, pending.connection.index})) return false;
    pending.connection.received_fds = std::move(end.received_fds);
    pending.connection.tls = end.take_tls();
    established_.push_back(std::move(pending.connection));
    return false;
  }

  /// Another process with the key of this group, which has read its store, may have the same rank.
  void require_one_process(const Claim& claim) const {
    const int rank = static_cast<int>(claim.rank);
    const bool is_second = std::ranges::any_of(
        established_, [&](const Connection& c) { return c.rank == rank && c.index == claim.index; });
    if (!is_second) return;
    throw Error(
        Errc::rendezvous,
        concat("rank ", self_.rank, ": two processes connect as rank ", rank,
               "; two jobs that use one MASTER_ADDR and MASTER_PORT need different texts in RZ_LAUNCH"),
        rank);
  }

  /// A listener at which strangers open too many connections may drop one of a rank. It is opened a few times
  /// more; if the peer has ended, there is no listener.
  bool connects_again(PendingConnection& pending) const {
    if (pending.authentication.refusal() != Authentication::Refusal::closed || is_unix(pending.connection) ||
        ++pending.tries > max_tries)
      return false;
    open_again(pending);
    return true;
  }

  void open_again(PendingConnection& pending) const {
    Connection& call = pending.connection;
    const std::string congestion = congestion_control(call.socket.get());
    call.socket = start_connect(resolve(parse_host_port(call.address)).front(),
                                congestion.empty() ? "system" : congestion);
    pending.authentication = client_end(call);
    pending.connecting = true;
    pending.answer = Deadline::after(time_of_soon_try);
  }

  static bool is_unix(const Connection& c) { return c.address.find(':') == std::string::npos; }

  bool fail_outgoing(const PendingConnection& pending, const std::string& why) const {
    const int peer = pending.connection.rank;
    const bool at_unix = is_unix(pending.connection);
    throw Error(Errc::rendezvous,
                concat("rank ", self_.rank, " cannot connect to rank ", peer, " at ",
                       at_unix ? "unix socket @" : "", pending.connection.address, ": ", why,
                       at_unix ? "; did that process end, or report an error of its own?"
                               : "; is that process alive, and the address reachable from this host "
                                 "(RZ_INTERFACE chooses another)?"),
                peer);
  }

  std::list<PendingConnection>::iterator drop(std::list<PendingConnection>::iterator pending) {
    if (!pending->outgoing && pending->authentication.status() != Authentication::Status::proven)
      strangers_.count(pending->from, pending->authentication);
    return pending_.erase(pending);
  }

  void accept_connections() {
    for (int i = 0; i < max_accepts_per_poll; ++i) {
      SocketAddress from;
      UniqueFd socket = accept_connection(listener_, from);
      if (!socket) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          if (drop_unproven()) continue;
          fail_errno("accept4", "(ulimit -n raises the limit)");
        }
        continue;  // the connection was closed before it was accepted
      }
      accept_rate_.accepted();
      pending_.push_back(
          {Connection{},
           Authentication::server(key_, static_cast<std::uint32_t>(self_.rank), group_, self_.encryption),
           false, false, Deadline::after(self_.hello_timeout), from});
      pending_.back().connection.socket = std::move(socket);
      pending_.back().authentication.passed_fds = self_.passed_fds;
      if (!advance(pending_.back())) drop(std::prev(pending_.end()));  // at once, if it is of another user
      if (unproven() > max_pending_connections + missing_.size()) drop_unproven();
    }
  }

  bool knows_job(const Authentication& end) const { return end.has_hello() && end.claim().group == group_; }

  static bool is_unproven(const PendingConnection& p) { return !p.outgoing && !p.authentication.has_proof(); }

  std::size_t unproven() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(pending_, [](const PendingConnection& p) { return is_unproven(p); }));
  }

  /// Makes place for another connection; false if none is unproven.
  bool drop_unproven() {
    std::vector<Unproven> all;
    std::vector<std::list<PendingConnection>::iterator> places;
    for (auto p = pending_.begin(); p != pending_.end(); ++p)
      if (is_unproven(*p)) {
        all.push_back({source_of(p->from), knows_job(p->authentication)});
        places.push_back(p);
      }
    if (all.empty()) return false;
    const auto chosen = places[choose_dropped(all, missing_.size())];
    advance(*chosen);  // its proof may have come: the other end then takes the connection for established
    drop(chosen);
    return true;
  }

  std::vector<int> missing_ranks() const {
    std::set<int> ranks;
    for (const auto& [rank, index] : missing_) ranks.insert(rank);
    return {ranks.begin(), ranks.end()};
  }

  const HandshakeInfo& self_;
  const AuthenticationKey key_;
  const std::uint64_t group_;  ///< fingerprint of the job
  int listener_;
  Deadline deadline_, next_check_ = Deadline::after(check_period);
  std::set<std::pair<int, int>> missing_;  ///< rank, index
  std::list<PendingConnection> pending_;
  std::vector<Connection> established_;
  Strangers strangers_;
  AcceptRate accept_rate_;
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
