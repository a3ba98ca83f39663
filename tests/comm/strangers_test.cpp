// Connections of strangers to a job that has a secret: scans, garbage, half-open ones, thousands at once, a
// recorded session, another job's secret, an end in the middle that changes bytes. None is let in, and the
// job is not disturbed.

#include "comm/net/strangers.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "comm/bootstrap/store_internal.h"
#include "comm/bootstrap/store_wire.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/handshake.h"
#include "comm/net/socket.h"
#include "comm/net/unix_socket.h"
#include "comm/store.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/fuzz.h"
#include "tests/support/strangers.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::call_from;
using test::error_of;
using test::plausible_hello;

const std::string ours = "the secret of this job, which nobody else has";
const std::string theirs = "the secret of another job on the same network";

Deadline soon() { return Deadline::after(seconds(60)); }
bool contains(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

std::shared_ptr<Store> serve(int size = 2, milliseconds hello_timeout = seconds(10)) {
  return tcp_store(
      "127.0.0.1:0",
      {.serve = true, .launch = "a launch", .size = size, .secret = ours, .hello_timeout = hello_timeout});
}
std::string address_of(const Store& server) { return concat("127.0.0.1:", tcp_store_port(server)); }
TcpStoreOptions joining(int rank, const std::string& secret = ours) {
  return {.timeout = seconds(20), .launch = "a launch", .size = 2, .rank = rank, .secret = secret};
}

/// Opens connections of all kinds, 4,096 at a time, until it ends.
class Flood {
 public:
  Flood(const char* source, int port, std::string hello)
      : thread_([this, source, port, hello = std::move(hello)] {
          const std::string kinds[] = {
              "",    "GET / HTTP/1.1\r\n\r\n",    std::string(100'000, '\xff'), hello.substr(0, 20),
              hello, hello + std::string(32, 'x')};
          std::vector<UniqueFd> open(4096);
          for (std::size_t i = 0; !stop_; ++i) {
            UniqueFd& s = open[i % open.size()];
            s = call_from(source, port);
            const std::string& bytes = kinds[i % std::size(kinds)];
            // The previous connection of each place has been established meanwhile.
            UniqueFd& before = open[(i + open.size() - 50) % open.size()];
            if (before && send(before.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
              ++sent_;
            if (i % 64 == 0) std::this_thread::yield();
          }
        }) {}
  ~Flood() {
    stop_ = true;
    thread_.join();
  }
  int sent() const { return sent_; }

 private:
  std::atomic<bool> stop_ = false;
  std::atomic<int> sent_ = 0;
  std::thread thread_;
};

class StrangersTest : public testing::TestWithParam<const char*> {};

TEST_P(StrangersTest, ThousandsAtTheStoreDoNotDisturbTheJob) {
  require_open_files(2 * 4096, "the strangers");
  const auto server = serve();
  const std::string hello = plausible_hello(net::Purpose::store, net::fingerprint("a launch"));
  const Flood flood(GetParam(), tcp_store_port(*server), hello);
  while (flood.sent() < 8000) std::this_thread::sleep_for(milliseconds(1));
  for (int i = 0; i < 20; ++i) {
    const auto start = Deadline::Clock::now();
    const auto client = tcp_store(address_of(*server), joining(1));
    client->set(concat("key ", i), "value");
    EXPECT_EQ(server->get(concat("key ", i), soon()), "value");
    EXPECT_LT(Deadline::Clock::now() - start, seconds(10)) << i;
  }
  const Error e = error_of([&] { server->get("absent", Deadline::after(milliseconds(1))); });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_TRUE(contains(e, "connections that did not prove the secret of this job were refused")) << e.what();
}

TEST_P(StrangersTest, ThousandsAtTheDataListenerDoNotDisturbTheHandshake) {
  require_open_files(2 * 4096, "the strangers");
  const net::JobId job = net::random_id();
  const auto secret = std::make_shared<const net::Secret>(net::Secret::of_text(ours));
  const std::string hello = plausible_hello(net::Purpose::data, 7);
  for (int round = 0; round < 5; ++round) {
    const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
    const net::SocketAddress at = net::local_address(listener.get());
    const Flood flood(GetParam(), at.port(), hello);
    while (flood.sent() < 800) std::this_thread::sleep_for(milliseconds(1));
    std::thread rank_1([&] {
      std::vector<net::Connection> calls;
      for (int i = 0; i < 4; ++i) calls.push_back({0, i, net::start_connect(at), {}, at.text()});
      const auto met = net::handshake({job, 1, 2, {}, nullptr, secret}, -1, std::move(calls), {}, 4, soon());
      EXPECT_EQ(met.size(), 4u);
      for (const auto& c : met) EXPECT_EQ(send(c.socket.get(), "rank", 4, MSG_NOSIGNAL), 4);
    });
    const auto start = Deadline::Clock::now();
    const auto met = net::handshake({job, 0, 2, {}, nullptr, secret}, listener.get(), {}, {1}, 4, soon());
    EXPECT_LT(Deadline::Clock::now() - start, seconds(10));
    rank_1.join();
    ASSERT_EQ(met.size(), 4u);
    for (const auto& c : met) {
      char bytes[4];
      EXPECT_EQ(recv(c.socket.get(), bytes, 4, MSG_DONTWAIT), 4);
      EXPECT_EQ(std::string(bytes, 4), "rank") << "a stranger was let in";
    }
  }
}

// ---- limits

/// Connections of one source that stay open on this side. Each has sent `bytes`.
std::vector<UniqueFd> hold_open(const char* source, int port, std::size_t number, const std::string& bytes) {
  std::vector<UniqueFd> held;
  for (std::size_t i = 0; i < number; ++i) {
    held.push_back(call_from(source, port));
    pollfd p{held.back().get(), POLLOUT, 0};
    poll(&p, 1, 20'000);
    if (!bytes.empty()) send(held.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  return held;
}

/// The number of connections that the store has refused.
std::uint64_t refused_by(Store& server) {
  const Error e = error_of([&] { server.get("absent", Deadline::after({})); });
  const std::string text = e.what();
  const auto end = text.find(" connection");
  return end == text.npos ? 0 : std::stoull(text.substr(text.rfind(' ', end - 1) + 1));
}

// hello_timeout is long: it is their number that ends them.
TEST(StrangersAtTheStore, AtMostAFewUnprovenConnectionsAreKept) {
  require_open_files(4 * 1024, "the strangers");
  const auto server = serve(2, std::chrono::hours(1));
  for (const std::string& bytes : {std::string(), std::string("\xff"),
                                   plausible_hello(net::Purpose::store, net::fingerprint("a launch"))}) {
    const auto held = hold_open("127.0.0.2", tcp_store_port(*server), 1000, bytes);
    const auto open = [&] {
      return std::ranges::count_if(held, [](auto& s) { return !test::ManyHosts::has_ended(s.get()); });
    };
    const Deadline deadline = soon();
    while (open() > 64 + 2 && !deadline.expired()) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_LE(open(), 64 + 2);
  }
}

// A rank of another host than the strangers is slow: it connects, and later sends its hello or its proof.
TEST(StrangersAtTheStore, ASlowRankIsKeptWhileThousandsConnect) {
  require_open_files(4 * 1024, "the strangers");
  const auto server = serve(2, std::chrono::hours(1));
  const net::Secret secret = net::Secret::of_text(ours);
  const net::AuthenticationKey key(&secret, net::Purpose::store, "");
  const std::uint64_t group = net::fingerprint("a launch");
  std::vector<UniqueFd> sockets;
  std::vector<net::Authentication> ranks;
  for (const bool sends_hello : {false, true}) {
    sockets.push_back(net::connect_tcp(net::resolve({"127.0.0.1", tcp_store_port(*server)}).front(), soon()));
    ranks.push_back(net::Authentication::client(key, {.size = 2, .rank = 1, .group = group}));
    if (!sends_hello) continue;
    ranks.back().advance(sockets.back().get());
    pollfd p{sockets.back().get(), POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 20'000), 1) << "no reply";
  }
  const auto silent = hold_open("127.0.0.2", tcp_store_port(*server), 500, "");
  const auto plausible =
      hold_open("127.0.0.2", tcp_store_port(*server), 500, plausible_hello(net::Purpose::store, group));
  const Deadline deadline = soon();
  while (refused_by(*server) < 900 && !deadline.expired()) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_GE(refused_by(*server), 900u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_FALSE(test::ManyHosts::has_ended(sockets[i].get())) << "the rank was dropped";
    ranks[i].complete(sockets[i].get(), soon());
    const std::string request =
        to_bytes(store_wire::StoreRequest{.kind = store_wire::StoreRequest::hello}, "a launch");
    send(sockets[i].get(), request.data(), request.size(), MSG_NOSIGNAL);
    pollfd p{sockets[i].get(), POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 20'000), 1);
    store_wire::Reply reply;
    ASSERT_EQ(recv(sockets[i].get(), &reply, sizeof reply, MSG_DONTWAIT),
              std::ssize(std::as_bytes(std::span(&reply, 1))));
    EXPECT_EQ(reply.status, store_wire::Reply::ok);
  }
}

/// A port of loopback that nobody has.
int free_port() {
  return net::local_address(net::listen_tcp(net::resolve({"127.0.0.1", 0}).front()).get()).port();
}

// The server's process is stopped meanwhile, as one that has no processor is.
TEST(StrangersAtTheStore, WhatARankHasSentInTimeCountsAlthoughItIsReadLate) {
  const net::Secret secret = net::Secret::of_text(ours);
  test::Gate serves;
  const int port = free_port();
  const pid_t server = fork();
  if (server == 0) {
    const auto store = tcp_store(
        concat("127.0.0.1:", port),
        {.serve = true, .launch = "a launch", .size = 2, .secret = ours, .hello_timeout = seconds(2)});
    serves.open();
    for (;;) pause();
  }
  serves.wait();
  const UniqueFd socket = net::connect_tcp(net::resolve({"127.0.0.1", port}).front(), soon());
  auto rank = net::Authentication::client({&secret, net::Purpose::store, ""},
                                          {.size = 2, .rank = 1, .group = net::fingerprint("a launch")});
  rank.advance(socket.get());
  pollfd p{socket.get(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 20'000), 1) << "no reply";
  kill(server, SIGSTOP);
  rank.complete(socket.get(), soon());
  const std::string request =
      to_bytes(store_wire::StoreRequest{.kind = store_wire::StoreRequest::hello}, "a launch");
  send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL);
  std::this_thread::sleep_for(milliseconds(2500));
  kill(server, SIGCONT);
  EXPECT_EQ(poll(&p, 1, 20'000), 1);
  store_wire::Reply reply{};
  EXPECT_EQ(recv(socket.get(), &reply, sizeof reply, MSG_DONTWAIT),
            std::ssize(std::as_bytes(std::span(&reply, 1))));
  EXPECT_EQ(reply.status, store_wire::Reply::ok);
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
}

// Hundreds of hosts, each of which has one connection and a hello, as a rank has.
TEST(StrangersAtTheStore, ManyHostsDoNotKeepARankOut) {
  const auto server = serve(2, std::chrono::hours(1));
  const test::ManyHosts strangers(240, tcp_store_port(*server),
                                  plausible_hello(net::Purpose::store, net::fingerprint("a launch")));
  strangers.await();
  for (int i = 0; i < 20; ++i) {
    const auto start = Deadline::Clock::now();
    tcp_store(address_of(*server), joining(1))->set(concat("key ", i), "value");
    EXPECT_EQ(server->get(concat("key ", i), soon()), "value");
    EXPECT_LT(Deadline::Clock::now() - start, seconds(5)) << i;
  }
}

TEST(StrangersAtTheData, ManyHostsDoNotKeepARankOut) {
  const net::JobId job = net::random_id();
  const auto secret = std::make_shared<const net::Secret>(net::Secret::of_text(ours));
  const std::string hello =
      plausible_hello(net::Purpose::data, net::fingerprint(concat("group ", net::to_hex(job))));
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  const test::ManyHosts strangers(240, at.port(), hello);
  auto rank_1 = std::async(std::launch::async, [&] {
    strangers.await();
    std::vector<net::Connection> calls;
    for (int i = 0; i < 4; ++i) calls.push_back({0, i, net::start_connect(at), {}, at.text()});
    return net::handshake({job, 1, 2, {}, nullptr, secret}, -1, std::move(calls), {}, 4, soon()).size();
  });
  const auto start = Deadline::Clock::now();
  net::HandshakeInfo me{job, 0, 2, {}, nullptr, secret};
  me.hello_timeout = std::chrono::hours(1);
  EXPECT_EQ(net::handshake(me, listener.get(), {}, {1}, 4, soon()).size(), 4u);
  EXPECT_LT(Deadline::Clock::now() - start, seconds(10));
  EXPECT_EQ(rank_1.get(), 4u);
}

/// A listener whose queue strangers fill: it answers no packet until someone accepts.
struct FullListener {
  UniqueFd socket = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  net::SocketAddress at = net::local_address(socket.get());
  std::vector<UniqueFd> strangers;

  FullListener() {
    listen(socket.get(), 0);
    for (bool is_full = false; !is_full;) {
      strangers.push_back(call_from("127.0.0.2", at.port()));
      pollfd p{strangers.back().get(), POLLOUT, 0};
      is_full = poll(&p, 1, 50) == 0;
    }
  }
};

/// Packets that the socket has sent again, its first one included.
unsigned sent_again(const UniqueFd& socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  EXPECT_EQ(getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size), 0);
  return info.tcpi_total_retrans;
}

// The kernel repeats it after 1 s, and then after 2 s.
TEST(StrangersAtAFullQueue, AConnectionWhoseFirstPacketIsLostIsBegunAnew) {
  const FullListener full;
  auto rank = std::async(std::launch::async, [&] { return net::connect_in_tries(full.at, soon()); });
  std::this_thread::sleep_for(milliseconds(250));
  while (rank.wait_for(milliseconds(1)) != std::future_status::ready)
    const UniqueFd stranger(accept4(full.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const UniqueFd socket = rank.get();
  ASSERT_TRUE(socket);
  EXPECT_EQ(sent_again(socket), 0u);
}

TEST(StrangersAtAFullQueue, ADataConnectionWhoseFirstPacketIsLostIsBegunAnew) {
  const net::JobId job = net::random_id();
  const FullListener full;
  auto rank_1 = std::async(std::launch::async, [&] {
    std::vector<net::Connection> calls;
    calls.push_back({0, 0, net::start_connect(full.at), {}, full.at.text()});
    return net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon());
  });
  std::this_thread::sleep_for(milliseconds(250));
  EXPECT_EQ(net::handshake({job, 0, 2}, full.socket.get(), {}, {1}, 1, soon()).size(), 1u);
  const auto met = rank_1.get();
  ASSERT_EQ(met.size(), 1u);
  EXPECT_EQ(sent_again(met.front().socket), 0u);
}

TEST(StrangersAtTheStore, TheirRateIsLimitedOnceAllRanksHaveConnected) {
  const auto server = serve();
  const auto rank_1 = tcp_store(address_of(*server), joining(1));
  const auto start = Deadline::Clock::now();
  std::atomic<std::uint64_t> opened = 0;
  {
    std::vector<std::jthread> scans;
    for (int i = 0; i < 2; ++i)
      scans.emplace_back([&] {
        while (Deadline::Clock::now() - start < seconds(2)) {
          const UniqueFd s = call_from("127.0.0.2", tcp_store_port(*server));
          ++opened;
        }
      });
  }
  const std::uint64_t refused = refused_by(*server);
  const double elapsed = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  EXPECT_LE(static_cast<double>(refused), 64 + 192 + 2 + 32 + net::AcceptRate::while_running * elapsed)
      << "of " << opened;
  EXPECT_GT(refused, 0u);
  rank_1->set("key", "value");
  EXPECT_EQ(server->get("key", soon()), "value");
}

TEST(StrangersAtTheData, AConnectionThatIsDroppedBeforeItsProofIsOpenedAgain) {
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  std::thread rank_1([&] {
    std::vector<net::Connection> calls;
    calls.push_back({0, 0, net::start_connect(at), {}, at.text()});
    EXPECT_EQ(net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon()).size(), 1u);
  });
  for (int dropped = 0; dropped < 3; ++dropped) {
    pollfd p{listener.get(), POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 20'000), 1);
    const UniqueFd first(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  EXPECT_EQ(net::handshake({job, 0, 2}, listener.get(), {}, {1}, 1, soon()).size(), 1u);
  rank_1.join();
}

// A process that waits for a processor sends its hello and, long after it, its proof.
TEST(StrangersAtTheData, AProofMayTakeLongerThanAHello) {
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::AuthenticationKey key(nullptr, net::Purpose::data,
                                   {reinterpret_cast<const char*>(job.data()), job.size()});
  const UniqueFd socket = net::connect_tcp(net::local_address(listener.get()), soon());
  auto client = net::Authentication::client(
      key, {.size = 2, .rank = 1, .group = net::fingerprint(concat("group ", net::to_hex(job)))});
  client.advance(socket.get());  // sends the hello
  auto rank_1 = std::async(std::launch::async, [&] {
    pollfd p{socket.get(), POLLIN, 0};
    EXPECT_EQ(poll(&p, 1, 20'000), 1);  // the reply
    std::this_thread::sleep_for(milliseconds(500));
    client.complete(socket.get(), soon());
  });
  net::HandshakeInfo me{job, 0, 2};
  me.hello_timeout = milliseconds(50);
  EXPECT_EQ(net::handshake(me, listener.get(), {}, {1}, 1, Deadline::after(seconds(10))).size(), 1u);
  rank_1.get();
}

int status_of(pid_t child) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// It may be another part of the process that has taken them, and returns them.
TEST(StrangersAtTheData, WithoutADescriptorARankWaitsForOne) {
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  test::Gate taken;
  const pid_t rank_0 = fork();
  if (rank_0 == 0) {
    std::vector<UniqueFd> all;
    net::HandshakeInfo me{job, 0, 2};
    me.check = [&] {  // once a second
      if (all.empty()) {
        while (all.empty() || all.back()) all.emplace_back(dup(STDERR_FILENO));
        taken.open();
      } else {
        all.resize(1);
      }
    };
    const Error e =
        error_of([&] { _exit(net::handshake(me, listener.get(), {}, {1}, 1, soon()).size() == 1 ? 0 : 1); });
    std::fprintf(stderr, "%s\n", e.what());
    _exit(2);
  }
  taken.wait();
  std::vector<net::Connection> calls;
  calls.push_back({0, 0, net::start_connect(at), {}, at.text()});
  EXPECT_EQ(net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon()).size(), 1u);
  EXPECT_EQ(status_of(rank_0), 0);
}

// ---- users of a host

/// Runs `f` in a process of the user nobody; its result is the exit status.
template <class F>
pid_t as_nobody(const F& f) {
  const pid_t child = fork();
  if (child == 0) _exit(setgid(65534) == 0 && setuid(65534) == 0 ? f() : 100);
  return child;
}

TEST(StrangersAtUnixSockets, AListenerOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const std::string name = "rz-strangers-" + net::random_hex();
  const net::JobId job = net::random_id();  // the other user has read it
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const UniqueFd ready_in(ready[0]);
  UniqueFd ready_out(ready[1]);
  const pid_t child = as_nobody([&] {
    const UniqueFd listener = net::listen_unix(name);
    if (write(ready_out.get(), "x", 1) != 1) return 101;
    pollfd p{listener.get(), POLLIN, 0};
    if (poll(&p, 1, 20'000) != 1) return 102;
    const UniqueFd caller(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    char bytes[64];
    return recv(caller.get(), bytes, sizeof bytes, 0) <= 0 ? 0 : 1;  // what it learns: nothing
  });
  ready_out.close();
  char byte = 0;
  ASSERT_EQ(read(ready_in.get(), &byte, 1), 1);
  std::vector<net::Connection> calls;
  calls.push_back({0, 0, net::connect_unix(name, soon()), {}, name});
  const Error e = error_of([&] { net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon()); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "another user") && contains(e, name)) << e.what();
  calls.clear();
  EXPECT_EQ(status_of(child), 0) << "the other user's listener has received bytes";
}

TEST(StrangersAtUnixSockets, ACallerOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const std::string name = "rz-strangers-" + net::random_hex();
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_unix(name);
  const pid_t child = as_nobody([&] {
    std::vector<net::Connection> calls;
    calls.push_back({0, 0, net::connect_unix(name, soon()), {}, name});
    pollfd p{calls.front().socket.get(), POLLRDHUP, 0};
    return poll(&p, 1, 20'000) == 1 ? 0 : 1;
  });
  const Error e = error_of([&] {
    net::handshake({job, 0, 2}, listener.get(), {}, {1}, 1, Deadline::after(seconds(1)));
  });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_EQ(status_of(child), 0) << "it was not disconnected";
}

// ---- users of a host, over TCP and without a secret

/// Variables of this process by which loopback has no secret.
class NoSecret {
 public:
  NoSecret() : before_(environment_variable("RZ_SECRET")) { unsetenv("RZ_SECRET"); }
  ~NoSecret() {
    if (before_) setenv("RZ_SECRET", before_->c_str(), 1);
  }

 private:
  std::optional<std::string> before_;
};

TcpStoreOptions joining_without_secret(int rank) {
  return {.timeout = seconds(10), .launch = "a launch", .size = 2, .rank = rank};
}

/// Becomes the user nobody, who lets everybody in.
bool become_a_stranger() {
  return setgid(65534) == 0 && setuid(65534) == 0 && setenv("RZ_INSECURE", "1", 1) == 0;
}

TEST(StrangersAtLoopback, AnotherUserDoesNotGetIntoTheStore) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret no_secret;
  const int port = free_port();
  const std::string address = concat("127.0.0.1:", port);
  const pid_t child = fork();
  if (child == 0) {
    if (!become_a_stranger()) _exit(100);
    TcpStoreOptions options = joining_without_secret(1);
    options.timeout = seconds(3);
    try {
      const auto store = tcp_store(address, options);
      store->set("key", "of a stranger");
      _exit(1);
    } catch (const Error&) {
      _exit(0);
    }
  }
  testing::internal::CaptureStderr();
  {
    TcpStoreOptions options = joining_without_secret(0);
    options.serve = true;
    const auto server = tcp_store(address, options);
    EXPECT_EQ(status_of(child), 0) << "the stranger was let in";
    const Error e = error_of([&] { server->get("key", Deadline::after({})); });
    EXPECT_EQ(e.code(), Errc::timeout) << "the stranger has set a value";
    EXPECT_TRUE(contains(e, "of another user") && contains(e, "names itself rank 1 at 127.0.0.1") &&
                contains(e, "run all ranks as one user") && !contains(e, "did not prove the secret"))
        << e.what();
    const auto rank_1 = tcp_store(address, joining_without_secret(1));
    rank_1->set("key", "ours");
    EXPECT_EQ(server->get("key", soon()), "ours");
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(text.starts_with("rank 0 waits for rank 1: ")) << text;
  EXPECT_NE(text.find("\nrank 0: "), text.npos) << "no line at the end: " << text;
}

TEST(StrangersAtLoopback, AStoreOfAnotherUserIsNotBelieved) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret no_secret;
  const int port = free_port();
  const std::string address = concat("127.0.0.1:", port);
  test::Gate served, done;
  const pid_t child = fork();
  if (child == 0) {
    if (!become_a_stranger()) _exit(100);
    TcpStoreOptions options = joining_without_secret(0);
    options.serve = true;
    const auto server = tcp_store(address, options);
    served.open();
    done.wait();
    try {
      server->get("key", Deadline::after({}));
      _exit(1);
    } catch (const Error&) {
      _exit(0);
    }
  }
  served.wait();
  const auto start = Deadline::Clock::now();
  const Error e = error_of([&] { tcp_store(address, joining_without_secret(1))->set("key", "value"); });
  EXPECT_LT(Deadline::Clock::now() - start, seconds(8)) << "it waited for the deadline";
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(contains(e, "rank 1") && contains(e, address) && contains(e, "of another user")) << e.what();
  done.open();
  EXPECT_EQ(status_of(child), 0) << "the other user's store has the value";
}

// Without RZ_INSECURE, which only a stranger has: ranks that one user starts as two.
TEST(StrangersAtLoopback, BothUsersAreTold) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret no_secret;
  const int port = free_port();
  const std::string address = concat("127.0.0.1:", port);
  const pid_t child = as_nobody([&] {
    try {
      tcp_store(address, joining_without_secret(1));
      return 1;
    } catch (const Error& e) {
      return e.code() == Errc::mismatch && contains(e, "of another user") ? 0 : 2;
    }
  });
  TcpStoreOptions options = joining_without_secret(0);
  options.serve = true;
  testing::internal::CaptureStderr();
  const auto server = tcp_store(address, options);
  EXPECT_EQ(status_of(child), 0);
  const Error e = error_of([&] { server->get("key", Deadline::after({})); });
  testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(e, "of another user") && contains(e, "names itself rank 1 at 127.0.0.1")) << e.what();
}

TEST(StrangersAtLoopback, TwoUsersWithOneSecretAreOneJob) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret restored;
  setenv("RZ_SECRET", ours.c_str(), 1);
  const int port = free_port();
  const std::string address = concat("127.0.0.1:", port);
  const pid_t child = as_nobody([&] {
    tcp_store(address, joining_without_secret(1))->set("key", "value");
    return 0;
  });
  TcpStoreOptions options = joining_without_secret(0);
  options.serve = true;
  const auto server = tcp_store(address, options);
  EXPECT_EQ(server->get("key", Deadline::after(seconds(10))), "value");
  EXPECT_EQ(status_of(child), 0);
  unsetenv("RZ_SECRET");
}

// A connection of ranks that say they are of two hosts. The stranger knows the job's id.
TEST(StrangersAtLoopback, AnotherUserGetsNoDataConnection) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret no_secret;
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  const pid_t child = fork();
  if (child == 0) {
    if (!become_a_stranger()) _exit(100);
    std::vector<net::Connection> calls;
    calls.push_back({0, 0, net::start_connect(at), {}, at.text()});
    const auto met = net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon());
    char byte = 0;
    pollfd p{met.front().socket.get(), POLLIN, 0};
    _exit(poll(&p, 1, 20'000) == 1 && recv(met.front().socket.get(), &byte, 1, 0) <= 0 ? 0 : 1);
  }
  const Error e = error_of([&] {
    net::handshake({job, 0, 2}, listener.get(), {}, {1}, 1, Deadline::after(seconds(1)));
  });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_TRUE(contains(e, "of another user") && contains(e, "names itself rank 1 at 127.0.0.1")) << e.what();
  EXPECT_EQ(status_of(child), 0) << "it was not disconnected";
}

TEST(StrangersAtLoopback, ADataListenerOfAnotherUserIsNotBelieved) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to start a process of another user";
  const NoSecret no_secret;
  const net::JobId job = net::random_id();
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  const pid_t child = fork();
  if (child == 0) {
    if (!become_a_stranger()) _exit(100);
    try {
      net::handshake({job, 0, 2}, listener.get(), {}, {1}, 1, Deadline::after(seconds(2)));
      _exit(1);
    } catch (const Error&) {
      _exit(0);
    }
  }
  std::vector<net::Connection> calls;
  calls.push_back({0, 0, net::start_connect(at), {}, at.text()});
  const Error e = error_of([&] { net::handshake({job, 1, 2}, -1, std::move(calls), {}, 1, soon()); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "of another user") && contains(e, at.text())) << e.what();
  EXPECT_EQ(status_of(child), 0) << "the other user has the connection";
}

INSTANTIATE_TEST_SUITE_P(From, StrangersTest, testing::Values("127.0.0.1", "127.0.0.2"),
                         [](const auto& info) {
                           return std::string(info.param) == "127.0.0.1" ? "TheHostOfARank" : "AnotherHost";
                         });

TEST(StrangersAtTheStore, AnotherSecretIsAnErrorThatBothSidesExplain) {
  const auto server = serve();
  for (const std::string& secret : {theirs, std::string()}) {
    const auto start = Deadline::Clock::now();
    const Error e = error_of([&] { tcp_store(address_of(*server), joining(1, secret)); });
    EXPECT_LT(Deadline::Clock::now() - start, seconds(5)) << "it waited for the deadline";
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_TRUE(contains(e, "rank 1") && contains(e, "RZ_SECRET") && contains(e, address_of(*server)))
        << e.what();
    EXPECT_FALSE(contains(e, theirs) || contains(e, "\n")) << e.what();
  }
  const Error e = error_of([&] { server->get("absent", Deadline::after(milliseconds(1))); });
  EXPECT_TRUE(contains(e, "names itself rank 1 at 127.0.0.1") && contains(e, "RZ_SECRET")) << e.what();
}

TEST(StrangersAtTheStore, AMissingRankWithAnotherSecretIsPrintedAtOnce) {
  const auto server = serve(3);
  const auto rank_1 = tcp_store(address_of(*server), joining(1));
  testing::internal::CaptureStderr();
  error_of([&] { tcp_store(address_of(*server), joining(1, theirs)); });  // this rank is there already
  const std::uint64_t refused = refused_by(*server);
  EXPECT_GT(refused, 0u);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  error_of([&] { tcp_store(address_of(*server), joining(2, theirs)); });
  EXPECT_GT(refused_by(*server), refused);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  EXPECT_EQ(text.rfind("rank 0 waits for rank 2: ", 0), 0u) << text;
  EXPECT_NE(text.find("names itself rank 2 at 127.0.0.1 of this job: if it is, its RZ_SECRET"), text.npos)
      << text;
}

TEST(StrangersAtTheStore, AnotherJobOnThePortIsNoError) {
  const auto server = serve();
  TcpStoreOptions other = joining(1, theirs);
  other.launch = "another launch", other.timeout = seconds(3);
  const Error e = error_of([&] { tcp_store(address_of(*server), other); });
  EXPECT_EQ(e.code(), Errc::rendezvous) << e.what();  // its own store may come yet
}

/// Passes bytes between a client and the server, records those of the client, and may change some.
class Middle {
 public:
  /// `flip`: the number of the byte, among those of one direction, in which a bit is changed; -1: none.
  Middle(int server_port, int flip, bool to_server)
      : listener_(net::listen_tcp(net::resolve({"127.0.0.1", 0}).front())),
        thread_([this, server_port, flip, to_server] { run(server_port, flip, to_server); }) {}
  ~Middle() {
    stop_ = true;
    thread_.join();
  }
  std::string address() const { return net::local_address(listener_.get()).text(); }
  std::string recorded() {
    const std::lock_guard lock(mutex_);
    return recorded_;
  }

 private:
  struct Relay {
    UniqueFd ends[2];  ///< the client, the server
    std::size_t passed[2] = {0, 0};
  };

  void run(int server_port, int flip, bool to_server) {
    std::vector<Relay> relays;
    while (!stop_) {
      net::SocketAddress server = net::resolve({"127.0.0.1", server_port}).front();
      if (UniqueFd client{accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)}) {
        relays.emplace_back();
        relays.back().ends[0] = std::move(client);
        relays.back().ends[1] = net::connect_tcp(server, soon());
      }
      for (Relay& r : relays)
        for (int from = 0; from < 2; ++from) pass(r, from, (from == 0) == to_server ? flip : -1);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void pass(Relay& r, int from, int flip) {
    if (!r.ends[0] || !r.ends[1]) return;
    char bytes[4096];
    const ssize_t n = recv(r.ends[from].get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
      r.ends[0].close(), r.ends[1].close();
      return;
    }
    if (n < 0) return;
    const auto at = static_cast<std::ptrdiff_t>(flip) - static_cast<std::ptrdiff_t>(r.passed[from]);
    if (flip >= 0 && at >= 0 && at < n) bytes[at] = static_cast<char>(bytes[at] ^ 4);
    r.passed[from] += static_cast<std::size_t>(n);
    if (from == 0) {
      const std::lock_guard lock(mutex_);
      recorded_.append(bytes, static_cast<std::size_t>(n));
    }
    send(r.ends[1 - from].get(), bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL);
  }

  UniqueFd listener_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::string recorded_;
  std::thread thread_;
};

TEST(StrangersAtTheStore, AChangedByteOfTheProofsLetsNobodyIn) {
  const auto server = serve();
  std::mt19937 random(5);
  for (int i = 0; i < 12; ++i) {
    const bool to_server = i % 2;
    Middle middle(tcp_store_port(*server), static_cast<int>(random() % (to_server ? 96 : 64)), to_server);
    TcpStoreOptions options = joining(1);
    options.timeout = milliseconds(300);
    EXPECT_THROW(tcp_store(middle.address(), options)->set("key", "value"), Error) << i;
  }
  EXPECT_EQ(error_of([&] { server->get("key", Deadline::after({})); }).code(), Errc::timeout);
  // The middle alone does no harm.
  Middle middle(tcp_store_port(*server), -1, true);
  tcp_store(middle.address(), joining(1))->set("key", "value");
  EXPECT_EQ(server->get("key", soon()), "value");
}

TEST(StrangersAtTheStore, ARecordedSessionHasNoEffect) {
  const auto server = serve();
  std::string session;
  {
    Middle middle(tcp_store_port(*server), -1, true);
    EXPECT_EQ(tcp_store(middle.address(), joining(1))->add("counter", 1), 1);
    session = middle.recorded();
  }
  ASSERT_GT(session.size(), 96u + sizeof(store_wire::StoreRequest));
  for (int i = 0; i < 10; ++i) {
    const UniqueFd replay =
        net::connect_tcp(net::resolve({"127.0.0.1", tcp_store_port(*server)}).front(), soon());
    send(replay.get(), session.data(), session.size(), MSG_NOSIGNAL);
    pollfd p{replay.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&p, 1, 10'000), 1) << "it was not disconnected";
  }
  EXPECT_EQ(server->add("counter", 0), 1);
}

// Requests of a client that has proved the secret, with changed bytes, and bytes before any proof.
TEST(StrangersAtTheStore, ChangedFramesEndTheirOwnConnectionOnly) {
  // It is no time that ends a connection, so this test may wait for longer than a busy machine takes.
  const auto server = serve(2, std::chrono::hours(1));
  server->set("mine", "untouched");
  const net::Secret secret = net::Secret::of_text(ours);
  const net::AuthenticationKey key(&secret, net::Purpose::store, "");
  using store_wire::StoreRequest;
  const std::string hello = to_bytes(StoreRequest{.kind = StoreRequest::hello}, "a launch");
  const std::string valid[] = {
      to_bytes(StoreRequest{.kind = StoreRequest::set}, "a launch", "key", "value"),
      to_bytes(StoreRequest{.kind = StoreRequest::get, .number = 0}, "a launch", "key"),
      to_bytes(StoreRequest{.kind = StoreRequest::get_numbered, .number = 0}, "a launch", "key"),
      to_bytes(StoreRequest{.kind = StoreRequest::add, .number = 7}, "a launch", "number"), hello};
  test::Fuzz fuzz(2000);
  auto& random = fuzz.random;
  while (fuzz.next()) {
    const UniqueFd socket =
        net::connect_tcp(net::resolve({"127.0.0.1", tcp_store_port(*server)}).front(), soon());
    ASSERT_TRUE(socket);
    const bool proven = random() % 8;
    std::string bytes = proven && random() % 4 ? hello : plausible_hello(net::Purpose::store, 0);
    if (proven) net::Authentication::client(key, {.size = 2, .rank = 1}).complete(socket.get(), soon());
    for (unsigned n = random() % 6; n > 0; --n) {
      std::string frame = valid[random() % std::size(valid)];
      for (unsigned changes = random() % 4; changes > 0; --changes) {
        const std::size_t at =
            random() % (random() % 2 ? frame.size() : std::min<std::size_t>(frame.size(), 32));
        frame[at] = static_cast<char>(random() % 2 ? random() : 1u << random() % 8);
      }
      if (random() % 8 == 0) frame.resize(random() % frame.size());
      bytes += frame;
    }
    send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(socket.get(), SHUT_WR);
    pollfd p{socket.get(), POLLRDHUP, 0};
    ASSERT_EQ(poll(&p, 1, 120'000), 1) << "the server has not ended the connection";
    const linger at_once{1, 0};  // frees the port
    setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    if (fuzz.tried() % 64 == 0) {
      EXPECT_EQ(server->get("mine", soon()), "untouched");
      EXPECT_EQ(tcp_store(address_of(*server), joining(1))->get("mine", soon()), "untouched");
    }
  }
}

// A process that has read the job's id, but not the secret.
TEST(StrangersAtTheData, ARankWithAnotherSecretIsRefusedAndNamed) {
  const net::JobId job = net::random_id();
  const auto right = std::make_shared<const net::Secret>(net::Secret::of_text(ours));
  const auto wrong = std::make_shared<const net::Secret>(net::Secret::of_text(theirs));
  const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  std::thread stranger([&] {
    std::vector<net::Connection> calls;
    calls.push_back({0, 0, net::start_connect(at), {}, at.text()});
    const Error e = error_of([&] {
      net::handshake({job, 1, 2, {}, nullptr, wrong}, -1, std::move(calls), {}, 1, soon());
    });
    EXPECT_EQ(e.code(), Errc::rendezvous);
    EXPECT_TRUE(contains(e, "RZ_SECRET")) << e.what();
  });
  const Error e = error_of([&] {
    net::handshake({job, 0, 2, {}, nullptr, right}, listener.get(), {}, {1}, 1, Deadline::after(seconds(1)));
  });
  stranger.join();
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_TRUE(contains(e, "1 connection that did not prove the secret") && contains(e, "rank 1")) << e.what();
}

}  // namespace
}  // namespace rz
