#include "comm/net/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <set>

#include "comm/core/error.h"
#include "comm/net/door.h"
#include "comm/net/socket.h"

namespace rz::net {

namespace {

constexpr auto check_period = std::chrono::seconds(1);
constexpr int max_tries = 8;
/// For other parts of this process to return a descriptor.
constexpr auto time_without_descriptor = std::chrono::seconds(5);

/// A connection that this rank opens.
struct Call {
  Connection connection;
  Authentication authentication;
  bool connecting = true;
  int tries = 0;       ///< to open it again
  int begun_anew = 0;  ///< before the listener has answered
  Deadline answer = Deadline::after(time_of_soon_try);
};

class Handshake {
 public:
  Handshake(const HandshakeInfo& me, int listener, const std::vector<int>& incoming, int links,
            Deadline deadline)
      : self_(me),
        group_(fingerprint(concat("group ", to_hex(me.job)))),
        deadline_(deadline),
        door_({.key = {me.secret.get(),
                       Purpose::data,
                       {reinterpret_cast<const char*>(me.job.data()), me.job.size()}},
               .rank = static_cast<std::uint32_t>(me.rank),
               .group = group_,
               .encryption = me.encryption,
               .members = incoming.size() * static_cast<std::size_t>(links),
               .time_to_prove = me.hello_timeout,
               .members_until = deadline,
               .passed_fds = me.passed_fds}) {
    if (listener >= 0) door_.add(listener);
    for (const int rank : incoming)
      for (int i = 0; i < links; ++i) missing_.insert({rank, i});
  }

  std::vector<Connection> run(std::vector<Connection> outgoing) {
    for (auto& call : outgoing) {
      missing_.insert({call.rank, call.index});
      Authentication end = client_end(call);
      calls_.push_back({std::move(call), std::move(end)});
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
                         door_.text()),
                  missing_ranks().front());
    if (self_.check && next_check_.expired()) {
      next_check_ = Deadline::after(check_period);
      self_.check();
    }
    std::vector<pollfd> fds{{door_.descriptor(), POLLIN, 0}};
    for (const Call& c : calls_)
      fds.push_back({c.connection.socket.get(), static_cast<short>(c.connecting ? POLLOUT : POLLIN), 0});
    if (poll(fds.data(), fds.size(), deadline_.poll_ms(door_.poll_ms(100))) < 0 && errno != EINTR)
      fail_errno("poll");
    std::size_t i = 1;
    for (auto c = calls_.begin(); c != calls_.end(); ++i)
      c = attend(*c, fds[i].revents) ? std::next(c) : calls_.erase(c);
    for (Door::Arrival& a : door_.advance(AcceptRate::while_starting)) let_in(a);
    const std::string why = door_.why_closed();
    if (why.empty())
      open_by_.reset();
    else if (!open_by_)
      open_by_ = Deadline::after(time_without_descriptor);
    require(!open_by_ || !open_by_->expired(), Errc::system, "rank ", self_.rank, ": ", why);
  }

  Authentication client_end(const Connection& call) const {
    Authentication end = Authentication::client(
        door_.expected().key,
        {static_cast<std::uint32_t>(self_.size), static_cast<std::uint32_t>(self_.rank),
         static_cast<std::uint32_t>(call.rank), static_cast<std::uint8_t>(call.index), group_},
        self_.encryption);
    end.passed_fds = self_.passed_fds;
    return end;
  }

  /// False once the connection is established.
  bool attend(Call& call, short events) {
    if (events) return advance(call);
    if (call.connecting && call.answer.expired() && call.begun_anew++ < soon_tries)
      open_again(call);  // a unix socket is connected at once
    return true;
  }

  bool advance(Call& call) {
    if (call.connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(call.connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) fail_call(call, std::strerror(error));
      call.connecting = false;
    }
    Authentication& end = call.authentication;
    end.advance(call.connection.socket.get());
    if (end.status() == Authentication::Status::pending) return true;
    if (end.status() == Authentication::Status::refused) {
      if (!connects_again(call)) fail_call(call, end.reason());
      return true;
    }
    establish(std::move(call.connection), end);
    return false;
  }

  void let_in(Door::Arrival& arrival) {
    const Claim claim = arrival.authentication.claim();
    require_one_process(claim);
    Connection connection{.rank = static_cast<int>(claim.rank), .index = claim.index};
    connection.socket = std::move(arrival.socket);
    establish(std::move(connection), arrival.authentication);
  }

  /// Closes one that is not missing.
  void establish(Connection connection, Authentication& end) {
    if (!missing_.erase({connection.rank, connection.index})) return;
    door_.expect(missing_.size());
    connection.received_fds = std::move(end.received_fds);
    connection.tls = end.take_tls();
    established_.push_back(std::move(connection));
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
  bool connects_again(Call& call) const {
    if (call.authentication.refusal() != Authentication::Refusal::closed || is_unix(call.connection) ||
        ++call.tries > max_tries)
      return false;
    open_again(call);
    return true;
  }

  void open_again(Call& call) const {
    Connection& connection = call.connection;
    const std::string congestion = congestion_control(connection.socket.get());
    connection.socket = start_connect(resolve(parse_host_port(connection.address)).front(),
                                      congestion.empty() ? "system" : congestion);
    call.authentication = client_end(connection);
    call.connecting = true;
    call.answer = Deadline::after(time_of_soon_try);
  }

  static bool is_unix(const Connection& c) { return c.address.find(':') == std::string::npos; }

  [[noreturn]] void fail_call(const Call& call, const std::string& why) const {
    const int peer = call.connection.rank;
    const bool at_unix = is_unix(call.connection);
    throw Error(Errc::rendezvous,
                concat("rank ", self_.rank, " cannot connect to rank ", peer, " at ",
                       at_unix ? "unix socket @" : "", call.connection.address, ": ", why,
                       at_unix ? "; did that process end, or report an error of its own?"
                               : "; is that process alive, and the address reachable from this host "
                                 "(RZ_INTERFACE chooses another)?"),
                peer);
  }

  std::vector<int> missing_ranks() const {
    std::set<int> ranks;
    for (const auto& [rank, index] : missing_) ranks.insert(rank);
    return {ranks.begin(), ranks.end()};
  }

  const HandshakeInfo& self_;
  const std::uint64_t group_;  ///< fingerprint of the job
  Deadline deadline_, next_check_ = Deadline::after(check_period);
  std::optional<Deadline> open_by_;  // while no connection can be accepted
  Door door_;
  std::set<std::pair<int, int>> missing_;  ///< rank, index
  std::list<Call> calls_;
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
