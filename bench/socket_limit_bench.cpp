// Measures the limit of sockets: processes that stream to each other over one TCP connection per pair,
// without a runtime. An all_reduce of S bytes on n ranks sends 2S(n-1)/n bytes from every rank, and every
// rank adds half of the bytes that it receives. So each process here sends 2S/n bytes to every other process,
// adds the first half of the received bytes to its own floats while they are in the cache, and stores the
// rest. No byte waits for another.
//
//     socket_limit RANK HOST,HOST,… PORT BYTES ITERATIONS [-sleep]
//
// HOST is the address of each process, in rank order; the process of rank r listens at PORT + r. -sleep:
// block in poll() without spinning first, for more processes than processors. Rank 0 prints the median time
// of its iterations in microseconds.

#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "comm/reduce/reduce.h"

namespace {

using namespace rz;
using Clock = std::chrono::steady_clock;

constexpr std::size_t slice = 32 << 10;                    ///< bytes of one read or write
constexpr auto max_spin = std::chrono::microseconds(100);  ///< before poll() blocks

struct Pair {
  UniqueFd socket;
  std::size_t sent = 0, received = 0;
  std::vector<float> arrived = std::vector<float>(slice / sizeof(float));
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

UniqueFd accept_one(int listener) {
  pollfd p{listener, POLLIN, 0};
  require(poll(&p, 1, 30'000) == 1, Errc::timeout, "no connection within 30 s");
  UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) fail_errno("accept4");
  net::set_tcp_options(socket.get());
  return socket;
}

UniqueFd call(const net::SocketAddress& address) {
  for (int attempt = 0; attempt < 300; ++attempt) {
    UniqueFd socket = net::start_connect(address);
    pollfd p{socket.get(), POLLOUT, 0};
    if (poll(&p, 1, 1000) == 1 && !(p.revents & (POLLERR | POLLHUP))) return socket;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  fail(Errc::timeout, "no process listens at ", address.text());
}

std::vector<Pair> connect_all(int rank, const std::vector<std::string>& hosts, int port) {
  const auto address = [&](int r) {
    return net::resolve({hosts[static_cast<std::size_t>(r)], port + r}).front();
  };
  const UniqueFd listener = net::listen_tcp(address(rank));
  std::vector<Pair> pairs;
  for (int r = 0; r < rank; ++r) pairs.push_back(Pair{call(address(r))});
  for (std::size_t r = static_cast<std::size_t>(rank) + 1; r < hosts.size(); ++r)
    pairs.push_back(Pair{accept_one(listener.get())});
  for (const Pair& p : pairs) net::limit_unsent(p.socket.get(), 256 << 10);
  return pairs;
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

class Stream {
 public:
  Stream(std::vector<Pair> pairs, std::size_t bytes, bool sleeps)
      : pairs_(std::move(pairs)),
        bytes_(bytes),
        sleeps_(sleeps),
        own_(bytes / sizeof(float), 1.f),
        sums_(own_) {}

  /// Sends to and receives from all peers.
  void run() {
    for (Pair& p : pairs_) p.sent = p.received = 0;
    while (!done()) {
      bool moved = false;
      for (Pair& p : pairs_) moved |= receive_some(p) | send_some(p);
      if (!moved) wait();
    }
  }

 private:
  bool done() const {
    return std::all_of(pairs_.begin(), pairs_.end(),
                       [&](const Pair& p) { return p.sent == bytes_ && p.received == bytes_; });
  }

  bool send_some(Pair& p) {
    if (p.sent == bytes_) return false;
    const auto* from = reinterpret_cast<const std::byte*>(own_.data()) + p.sent;
    const ssize_t n = send(p.socket.get(), from, std::min(slice, bytes_ - p.sent), MSG_NOSIGNAL);
    if (n < 0 && !would_block()) fail_errno("send");
    p.sent += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    return n > 0;
  }

  bool receive_some(Pair& p) {
    if (p.received == bytes_) return false;
    const std::size_t half = bytes_ / 2 / sizeof(float) * sizeof(float);
    const bool adds = p.received < half;
    // The bytes of a partly received element stay in front, and the next read completes the element.
    const std::size_t part = adds ? p.received % sizeof(float) : 0;
    auto* to = adds ? reinterpret_cast<std::byte*>(p.arrived.data()) + part
                    : reinterpret_cast<std::byte*>(sums_.data()) + p.received;
    const ssize_t n =
        recv(p.socket.get(), to, std::min(slice - part, (adds ? half : bytes_) - p.received), 0);
    require(n != 0, Errc::peer_lost, "a peer closed the connection");
    if (n < 0 && !would_block()) fail_errno("recv");
    if (n < 0) return false;
    if (adds) add(p, part + static_cast<std::size_t>(n));
    p.received += static_cast<std::size_t>(n);
    return true;
  }

  void add(Pair& p, std::size_t bytes) {
    const std::size_t whole = bytes / sizeof(float);
    float* sum = sums_.data() + p.received / sizeof(float);
    const std::array<const void*, 2> sources{sum, p.arrived.data()};
    reduce(sum, sources, whole, DType::f32, ReduceOp::sum);
    std::memmove(p.arrived.data(), p.arrived.data() + whole, bytes % sizeof(float));
  }

  void wait() {
    std::vector<pollfd> list;
    for (const Pair& p : pairs_) {
      const int events = (p.received < bytes_ ? POLLIN : 0) | (p.sent < bytes_ ? POLLOUT : 0);
      if (events) list.push_back({p.socket.get(), static_cast<short>(events), 0});
    }
    const auto end = Clock::now() + (sleeps_ ? std::chrono::microseconds(0) : max_spin);
    while (Clock::now() < end)
      if (poll(list.data(), list.size(), 0) > 0) return;
    require(poll(list.data(), list.size(), 30'000) != 0, Errc::timeout, "no peer sends or takes anything");
  }

  std::vector<Pair> pairs_;
  std::size_t bytes_;
  bool sleeps_;
  std::vector<float> own_, sums_;
};

int run(int argc, char** argv) {
  require(argc >= 6, Errc::config, "socket_limit RANK HOST,HOST,… PORT BYTES ITERATIONS [-sleep]");
  const int rank = std::stoi(argv[1]), iterations = std::stoi(argv[5]);
  const auto hosts = split(argv[2]);
  const std::size_t each = std::stoull(argv[4]) * 2 / hosts.size() / sizeof(float) * sizeof(float);
  Stream stream(connect_all(rank, hosts, std::stoi(argv[3])), each, argc > 6);
  std::vector<double> times;
  for (int i = 0; i < iterations + std::max(2, iterations / 20); ++i) {
    const auto begin = Clock::now();
    stream.run();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  times.erase(times.begin(), times.end() - iterations);
  std::nth_element(times.begin(), times.begin() + iterations / 2, times.end());
  if (rank == 0) std::printf("%.2f\n", times[static_cast<std::size_t>(iterations / 2)]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& e) {
  std::fprintf(stderr, "socket_limit: %s\n", e.what());
  return 1;
}
