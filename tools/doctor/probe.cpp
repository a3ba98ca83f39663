#include "tools/doctor/probe.h"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <vector>

#include "comm/core/error.h"

namespace rz::doctor {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::size_t token_bytes = 32;
constexpr milliseconds token_timeout{2000}, connect_timeout{5000}, transfer_timeout{4000};

/// A request of the client. Integers are in the order of x86, as in all of ringzero.
struct Request {
  enum Kind : std::uint64_t { ping = 1, send = 2, receive = 3, packets = 4 };
  std::uint64_t kind = ping;
  std::uint64_t bytes = 0;  ///< of what follows, or of what the server shall send
};

/// A packet begins with it, and so does the answer.
struct PacketHead {
  char token[token_bytes];
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;  ///< answer: how many came
};

// ---- whole transfers over non-blocking sockets

/// Until when something may take; and a descriptor whose input, or end, stops it.
struct Limit {
  Deadline deadline;
  int stop = -1;
};
constexpr short stopping = POLLIN | POLLRDHUP | POLLHUP;

/// Waits for a socket, up to a second. Errc::aborted if it shall stop.
bool is_ready(int socket, short events, const Limit& limit) {
  std::array<pollfd, 2> ready{{{socket, events, 0}, {limit.stop, stopping, 0}}};
  poll(ready.data(), ready.size(), limit.deadline.poll_ms(1000));
  require(!ready[1].revents, Errc::aborted, "stopped");
  return ready[0].revents != 0;
}

/// Waits after a call that returned -1, or throws.
void await(int socket, short events, const Limit& limit) {
  require(errno == EAGAIN || errno == EINTR, Errc::rendezvous, std::strerror(errno));
  require(!limit.deadline.expired(), Errc::timeout, "no answer before the deadline");
  is_ready(socket, events, limit);
}

void send_all(int socket, std::span<const std::byte> bytes, const Limit& limit) {
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::send(socket, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n < 0) await(socket, POLLOUT, limit);
    if (n > 0) at += static_cast<std::size_t>(n);
  }
}

/// False if the connection ends before the first byte.
bool receive_all(int socket, std::span<std::byte> bytes, const Limit& limit) {
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::recv(socket, bytes.data() + at, bytes.size() - at, 0);
    if (n == 0 && at == 0) return false;
    require(n != 0, Errc::rendezvous, "the other host closed the connection within a message");
    if (n < 0) await(socket, POLLIN, limit);
    if (n > 0) at += static_cast<std::size_t>(n);
  }
  return true;
}

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

constexpr std::size_t block_bytes = 1 << 20;

/// Calls `f` with blocks of memory, `bytes` in all.
template <class F>
void in_blocks(std::uint64_t bytes, const F& f) {
  std::vector<std::byte> block(std::min<std::uint64_t>(bytes, block_bytes));
  for (std::uint64_t done = 0; done < bytes;) {
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - done, block.size()));
    f(std::span(block).first(n));
    done += n;
  }
}

// ---- server

UniqueFd packet_socket(int family) {
  UniqueFd socket(::socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail_errno("socket", "for UDP");
  return socket;
}

/// Answers the packets that have the token.
void answer_packets(int socket, const std::string& token) {
  std::vector<char> packet(65536);
  net::SocketAddress from;
  for (;;) {
    from.size = sizeof from.storage;
    const ssize_t n = recvfrom(socket, packet.data(), packet.size(), 0, from.get(), &from.size);
    if (n < 0) return;
    PacketHead head;
    if (static_cast<std::size_t>(n) < sizeof head) continue;
    std::memcpy(&head, packet.data(), sizeof head);
    if (std::memcmp(head.token, token.data(), token_bytes) != 0) continue;
    head.bytes = static_cast<std::uint64_t>(n);
    sendto(socket, &head, sizeof head, MSG_NOSIGNAL, from.get(), from.size);
  }
}

void perform(int client, const Request& request, int packet_port, const Limit& limit) {
  std::uint64_t reply = request.bytes;
  if (request.kind == Request::send)
    in_blocks(request.bytes, [&](std::span<std::byte> block) {
      require(receive_all(client, block, limit), Errc::rendezvous, "the client left");
    });
  else if (request.kind == Request::receive)
    return in_blocks(request.bytes, [&](std::span<std::byte> block) { send_all(client, block, limit); });
  else if (request.kind == Request::packets)
    reply = static_cast<std::uint64_t>(packet_port);
  else
    require(request.kind == Request::ping, Errc::rendezvous, "an unknown request");
  send_all(client, bytes_of(reply), limit);
}

}  // namespace

ProbeServer::ProbeServer(const std::string& address, int stop) : stop_(stop) {
  net::SocketAddress at = net::resolve({address, 0}).front();
  listener_ = net::listen_tcp(at);
  packets_ = packet_socket(at.storage.ss_family);
  if (bind(packets_.get(), at.get(), at.size) != 0) fail_errno("bind", at.text());
}

UniqueFd ProbeServer::accept_client(const std::string& token, Deadline deadline) const {
  while (!deadline.expired()) {
    if (!is_ready(listener_.get(), POLLIN, {deadline, stop_})) continue;
    UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!client) continue;
    std::array<char, token_bytes> received{};
    try {
      const Deadline soon = Deadline::after(std::min<Clock::duration>(token_timeout, deadline.remaining()));
      if (!receive_all(client.get(), std::as_writable_bytes(std::span(received)), {soon, stop_})) continue;
    } catch (const Error& e) {
      if (e.code() == Errc::aborted) throw;
      continue;  // a stranger
    }
    unsigned different = token.size() != token_bytes;
    for (std::size_t i = 0; i < std::min(token.size(), token_bytes); ++i)
      different |= static_cast<unsigned char>(token[i]) ^ static_cast<unsigned char>(received[i]);
    if (!different) return client;
  }
  return {};
}

void ProbeServer::serve_client(int client, const std::string& token, Deadline deadline) const {
  const int packet_port = net::local_address(packets_.get()).port();
  const Limit limit{deadline, stop_};
  while (!deadline.expired()) {
    std::array<pollfd, 3> ready{{{client, POLLIN, 0}, {packets_.get(), POLLIN, 0}, {stop_, stopping, 0}}};
    if (poll(ready.data(), ready.size(), deadline.poll_ms(1000)) <= 0) continue;
    if (ready[2].revents) return;
    if (ready[1].revents) answer_packets(packets_.get(), token);
    Request request;
    if (!ready[0].revents) continue;
    if (!receive_all(client, bytes_of(request), limit)) return;
    perform(client, request, packet_port, limit);
  }
}

void ProbeServer::serve(const std::string& token, Deadline deadline) {
  try {
    const UniqueFd client = accept_client(token, deadline);
    if (!client) return;
    net::set_tcp_options(client.get());
    serve_client(client.get(), token, deadline);
  } catch (const Error&) {  // the client knows why
  }
}

// ---- client

namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Client {
 public:
  Client(UniqueFd socket, net::SocketAddress server, std::string token, Deadline deadline)
      : socket_(std::move(socket)), server_(server), token_(std::move(token)), deadline_(deadline) {
    send_all(socket_.get(), std::as_bytes(std::span(token_)), {deadline_});
  }

  double round_trip_us() const {
    std::vector<double> times;
    const auto start = Clock::now();
    while (times.size() < 5 || (times.size() < 200 && seconds_since(start) < 0.1)) {
      const auto now = Clock::now();
      call({Request::ping, 0});
      times.push_back(seconds_since(now) * 1e6);
    }
    std::ranges::nth_element(times, times.begin() + std::ssize(times) / 2);
    return times[times.size() / 2];
  }

  /// Bytes a second; the amount grows until it takes a tenth of a second.
  double rate(Request::Kind kind) const {
    constexpr std::uint64_t min_bytes = 256 << 10, max_bytes = 256 << 20;
    for (std::uint64_t bytes = min_bytes;; bytes *= 4) {
      const Deadline deadline =
          Deadline::after(std::min<Clock::duration>(transfer_timeout, deadline_.remaining()));
      const auto start = Clock::now();
      transfer({kind, bytes}, {deadline});
      const double time = seconds_since(start);
      if (time >= 0.1 || bytes >= max_bytes) return static_cast<double>(bytes) / time;
    }
  }

  /// Measures PairMeasurement::packet and passed.
  void probe_packets(PairMeasurement& m) {
    const std::uint64_t port = call({Request::packets, 0});
    net::SocketAddress to = server_;
    to.set_port(static_cast<int>(port));
    packets_ = packet_socket(to.storage.ss_family);
    if (connect(packets_.get(), to.get(), to.size) != 0) return;
    const bool v6 = to.storage.ss_family == AF_INET6;
    const int probe = v6 ? IPV6_PMTUDISC_PROBE : IP_PMTUDISC_PROBE;  // never fragment
    setsockopt(packets_.get(), v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_MTU_DISCOVER : IP_MTU_DISCOVER,
               &probe, sizeof probe);
    header_bytes_ = v6 ? 48 : 28;
    m.packet = path_mtu(v6);
    constexpr int small = 576;
    if (!passes(small)) return;
    int fits = small, lost = m.packet + 1;
    if (passes(m.packet)) fits = m.packet;
    while (fits < m.packet && lost - fits > 1) {
      const int middle = fits + (lost - fits) / 2;
      (passes(middle) ? fits : lost) = middle;
    }
    m.passed = fits;
    m.packet = path_mtu(v6);  // smaller if a router has reported its own
  }

 private:
  std::uint64_t call(Request request) const {
    send_all(socket_.get(), bytes_of(request), {deadline_});
    return receive_reply({deadline_});
  }

  std::uint64_t receive_reply(const Limit& limit) const {
    std::uint64_t reply = 0;
    require(receive_all(socket_.get(), bytes_of(reply), limit), Errc::rendezvous,
            "the other host closed the connection");
    return reply;
  }

  void transfer(Request request, const Limit& limit) const try {
    const bool sends = request.kind == Request::send;
    send_all(socket_.get(), bytes_of(request), limit);
    in_blocks(request.bytes, [&](std::span<std::byte> block) {
      if (sends) return send_all(socket_.get(), block, limit);
      require(receive_all(socket_.get(), block, limit), Errc::rendezvous,
              "the other host closed the connection");
    });
    if (sends) receive_reply(limit);
  } catch (const Error& e) {
    fail(e.code(), "a transfer of ", request.bytes, " bytes ",
         request.kind == Request::send ? "there" : "back", " stopped: ", e.what());
  }

  int path_mtu(bool v6) const {
    int mtu = 0;
    socklen_t size = sizeof mtu;
    getsockopt(packets_.get(), v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_MTU : IP_MTU, &mtu, &size);
    return std::min(mtu, 65535);
  }

  /// Whether a packet of this size, headers included, arrives.
  bool passes(int size) {
    PacketHead head{};
    std::memcpy(head.token, token_.data(), token_bytes);
    std::vector<char> packet(
        static_cast<std::size_t>(std::max(size - header_bytes_, static_cast<int>(sizeof head))));
    for (int tries = 0; tries < 3 && !deadline_.expired(); ++tries) {
      head.number = ++number_;
      std::memcpy(packet.data(), &head, sizeof head);
      if (::send(packets_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) < 0) continue;  // EMSGSIZE
      const Deadline soon = Deadline::after(milliseconds(60 << tries));
      for (PacketHead answer{}; !soon.expired();) {
        pollfd p{packets_.get(), POLLIN, 0};
        if (poll(&p, 1, soon.poll_ms(1000)) <= 0) continue;
        if (recv(packets_.get(), &answer, sizeof answer, 0) != sizeof answer) continue;
        if (answer.number == number_ && answer.bytes == packet.size()) return true;
      }
    }
    return false;
  }

  UniqueFd socket_, packets_;
  net::SocketAddress server_;
  std::string token_;
  Deadline deadline_;
  int header_bytes_ = 28;
  std::uint64_t number_ = 0;
};

}  // namespace

PairMeasurement measure(const std::string& address, int port, const std::string& token, Deadline deadline) {
  PairMeasurement m;
  m.address = address;
  try {
    require(token.size() == token_bytes, Errc::config, "a token has ", token_bytes, " characters");
    net::SocketAddress server = net::resolve({address, port}).front();
    UniqueFd socket = net::connect_tcp(
        server, Deadline::after(std::min<Clock::duration>(connect_timeout, deadline.remaining())));
    require(static_cast<bool>(socket), Errc::rendezvous, "connect to ", server.text(), ": ",
            std::strerror(errno));
    Client client(std::move(socket), server, token, deadline);
    m.round_trip_us = client.round_trip_us();
    m.connected = true;
    client.probe_packets(m);
    m.send_rate = client.rate(Request::send);
    m.receive_rate = client.rate(Request::receive);
  } catch (const std::exception& e) {
    m.error = one_line(e);
  }
  return m;
}

}  // namespace rz::doctor
