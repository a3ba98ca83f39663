// TLS of connections between ranks: nobody between the ends changes what they require, or a byte of their
// data, and an end that is killed during the handshake is named.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/handshake.h"
#include "comm/net/socket.h"
#include "comm/net/tls.h"
#include "tests/support/between.h"
#include "tests/support/error_of.h"
#include "tests/support/tls_ends.h"

namespace rz::net {
namespace {

using std::chrono::seconds;
using test::Between;
using test::error_of;
using test::noise;
using test::Sockets;
using test::soon;

bool contains(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

/// The ends of an exchange, and what the server would have read after it. Every byte passes through
/// `change`, with the end that sent it and its position.
struct Outcome {
  Authentication client, server;
};
Outcome exchange(Encryption of_client, Encryption of_server,
                 const std::function<void(bool by_client, std::size_t at, std::uint8_t&)>& change) {
  const Secret secret = Secret::of_text(test::tls_secret);
  const AuthenticationKey key(&secret, Purpose::data, "a group");
  Outcome o{Authentication::client(key, {.size = 2, .rank = 1, .group = 7}, of_client),
            Authentication::server(key, 0, 7, of_server)};
  Sockets near, far;  // client, middle; middle, server
  std::size_t passed[2] = {0, 0};
  const auto pass = [&](bool by_client, int from, int to) {
    std::uint8_t bytes[4096];
    const ssize_t n = recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    for (ssize_t i = 0; i < n; ++i) change(by_client, passed[by_client]++, bytes[i]);
    if (n > 0) send(to, bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL);
  };
  using Status = Authentication::Status;
  for (const Deadline deadline = Deadline::after(seconds(2)); !deadline.expired();) {
    const Status a = o.client.advance(near.client.get()), b = o.server.advance(far.server.get());
    if (a == Status::refused || b == Status::refused || (a == Status::proven && b == Status::proven)) break;
    pass(true, near.server.get(), far.client.get());
    pass(false, far.client.get(), near.server.get());
  }
  return o;
}

// An end in the middle replaces what one end requires of TLS by another valid choice (1: permitted). Were the
// choice not part of the codes, the other end would go on without TLS. On loopback "on" permits it.
TEST(TlsOfTheExchange, NobodyBetweenTheEndsChangesWhatAnEndRequires) {
  using Status = Authentication::Status;
  const auto none = [](bool, std::size_t, std::uint8_t&) {};
  for (const bool client_requires : {true, false}) {
    const Encryption of_client = client_requires ? Encryption::always : Encryption::on,
                     of_server = client_requires ? Encryption::on : Encryption::always;
    Outcome plain = exchange(of_client, of_server, none);
    ASSERT_EQ(plain.client.status(), Status::proven);
    ASSERT_TRUE(plain.client.take_tls() && plain.server.take_tls());
    int changed = 0;
    const std::size_t choice = client_requires ? 11 : 8;  // in the hello; in the reply
    Outcome o = exchange(of_client, of_server, [&](bool by_client, std::size_t at, std::uint8_t& byte) {
      if (by_client != client_requires || at != choice) return;
      EXPECT_EQ(std::exchange(byte, std::uint8_t{1}), 2);
      ++changed;
    });
    EXPECT_EQ(changed, 1);
    // The end that got the changed choice: it neither sends nor reads a byte without TLS.
    const Authentication& deceived = client_requires ? o.server : o.client;
    EXPECT_NE(deceived.status(), Status::proven);
    EXPECT_FALSE(deceived.has_proof());
  }
}

/// A change of any byte of the session: nobody reads another value.
TEST(TlsOfTheData, AChangedBitIsAnErrorOfBothEnds) {
  const JobId job = random_id();
  const auto secret = std::make_shared<const Secret>(Secret::of_text(test::tls_secret));
  const auto bytes = noise(200'000);
  for (const std::ptrdiff_t flip : {100, 700, 5000, 30'000, 150'000}) {
    const UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
    Between between(local_address(listener.get()).port(), flip);
    std::string client_error;
    std::thread rank_1([&] {
      try {
        std::vector<Connection> calls;
        calls.push_back({0, 0, start_connect(between.address()), {}, between.address().text()});
        auto met = handshake({job, 1, 2, {}, nullptr, secret, Encryption::always}, -1, std::move(calls), {},
                             1, Deadline::after(seconds(10)));
        Tls& tls = *met.front().tls;
        std::size_t sent = 0;
        std::byte reply;
        for (const Deadline deadline = soon(); !deadline.expired();) {
          const iovec rest{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
          const auto k = sent < bytes.size() ? tls.send({&rest, 1}) : tls.flush() - 1;
          if (k > 0) sent += static_cast<std::size_t>(k);
          const iovec one{&reply, 1};
          const auto n = tls.receive({&one, 1});
          if (n == 0 || (n < 0 && errno != EAGAIN)) {
            client_error = tls.error().empty() ? "ended" : tls.error();
            break;
          }
        }
      } catch (const Error& e) {
        client_error = e.what();
      }
    });
    std::string server_error;
    std::vector<std::byte> got(bytes.size());
    std::size_t received = 0;
    try {
      auto met = handshake({job, 0, 2, {}, nullptr, secret, Encryption::always}, listener.get(), {}, {1}, 1,
                           Deadline::after(seconds(3)));
      Tls& tls = *met.front().tls;
      for (const Deadline deadline = soon(); received < got.size() && !deadline.expired();) {
        const iovec into{got.data() + received, got.size() - received};
        const auto n = tls.receive({&into, 1});
        if (n > 0) received += static_cast<std::size_t>(n);
        if (n == 0 || (n < 0 && errno != EAGAIN)) break;
      }
      server_error = tls.error();
    } catch (const Error& e) {
      server_error = e.what();
    }
    rank_1.join();
    EXPECT_LT(received, bytes.size()) << flip;
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(received), bytes.begin()));
    EXPECT_NE(server_error, "") << flip;
    EXPECT_NE(client_error, "") << flip;
    if (flip < 5000) continue;  // in the exchange, or the handshake of TLS
    for (const std::string& error : {server_error, client_error})
      EXPECT_NE(error.find("something between the hosts changes what they send"), std::string::npos) << error;
  }
}

/// Passes exactly so many bytes on.
void pass(int from, int to, std::size_t size) {
  std::vector<char> bytes(size);
  for (std::size_t done = 0; done < size;) {
    pollfd p{from, POLLIN, 0};
    if (poll(&p, 1, 10'000) != 1) return;
    const ssize_t n = recv(from, bytes.data() + done, size - done, 0);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
  EXPECT_EQ(send(to, bytes.data(), size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
}

/// Connects to a listener, proves the secret, and closes the connection before a byte of TLS has been sent.
void end_after_the_proof(const SocketAddress& at, const Secret& secret, const JobId& job) {
  const AuthenticationKey key(&secret, Purpose::data,
                              {reinterpret_cast<const char*>(job.data()), job.size()});
  const Sockets own;  // of a client, whose bytes are passed on up to its proof
  const UniqueFd socket = connect_tcp(at, soon());
  const std::uint64_t group = fingerprint(concat("group ", to_hex(job)));
  auto end = Authentication::client(key, {.size = 2, .rank = 1, .group = group}, Encryption::always);
  end.advance(own.client.get());
  pass(own.server.get(), socket.get(), 64);
  pass(socket.get(), own.server.get(), 64);
  for (const Deadline deadline = soon(); !end.has_proof() && !deadline.expired();)
    end.advance(own.client.get());
  pass(own.server.get(), socket.get(), 32);
}

// As when a peer is killed: of the end that listens, the deadline's message has the rank and the reason.
TEST(TlsOfTheData, AClientThatEndsDuringTheHandshakeIsNamed) {
  const JobId job = random_id();
  const auto secret = std::make_shared<const Secret>(Secret::of_text(test::tls_secret));
  const UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
  std::thread rank_1([&] { end_after_the_proof(local_address(listener.get()), *secret, job); });
  const Error e = error_of([&] {
    handshake({job, 0, 2, {}, nullptr, secret, Encryption::always}, listener.get(), {}, {1}, 1,
              Deadline::after(seconds(2)));
  });
  rank_1.join();
  EXPECT_EQ(e.culprit(), 1) << e.what();
  EXPECT_TRUE(contains(e, "; rank 1") &&
              contains(e, " proved the secret of this job, but it closed the connection during the TLS"))
      << e.what();
}

TEST(TlsOfTheData, AServerThatEndsDuringTheHandshakeIsNamedAtOnce) {
  const JobId job = random_id();
  const auto secret = std::make_shared<const Secret>(Secret::of_text(test::tls_secret));
  UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
  const SocketAddress at = local_address(listener.get());
  std::thread rank_0([&] {
    const AuthenticationKey key(secret.get(), Purpose::data,
                                {reinterpret_cast<const char*>(job.data()), job.size()});
    pollfd p{listener.get(), POLLIN, 0};
    poll(&p, 1, 10'000);
    const UniqueFd socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    listener.close();
    auto end = Authentication::server(key, 0, fingerprint(concat("group ", to_hex(job))), Encryption::always);
    for (const Deadline deadline = soon(); !end.has_hello() && !deadline.expired();)
      end.advance(socket.get());
    char proof[32];  // it is there, and no more is read: no byte of TLS is sent
    p = {socket.get(), POLLIN, 0};
    poll(&p, 1, 10'000);
    EXPECT_EQ(recv(socket.get(), proof, sizeof proof, 0), 32);
  });
  const Deadline limit = Deadline::after(seconds(30));
  const Error e = error_of([&] {
    std::vector<Connection> calls;
    calls.push_back({0, 0, start_connect(at), {}, at.text()});
    handshake({job, 1, 2, {}, nullptr, secret, Encryption::always}, -1, std::move(calls), {}, 1,
              Deadline::after(seconds(60)));
  });
  rank_0.join();
  EXPECT_FALSE(limit.expired());
  EXPECT_EQ(e.code(), Errc::rendezvous) << e.what();
  EXPECT_EQ(e.culprit(), 0) << e.what();
}

// Of many ranks on few processors: this one had none for longer than a stranger may take for its proof, which
// arrived in the meantime. Its client, unlike a rank, would not connect again.
TEST(TlsOfTheData, WhatHasArrivedIsReadBeforeADeadlineCounts) {
  const JobId job = random_id();
  const auto secret = std::make_shared<const Secret>(Secret::of_text(test::tls_secret));
  const UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
  std::atomic<bool> sleeps = false;
  std::string refusal;
  std::thread rank_1([&] {
    const UniqueFd socket = connect_tcp(local_address(listener.get()), soon());
    const AuthenticationKey key(secret.get(), Purpose::data,
                                {reinterpret_cast<const char*>(job.data()), job.size()});
    const std::uint64_t group = fingerprint(concat("group ", to_hex(job)));
    auto end = Authentication::client(key, {.size = 2, .rank = 1, .group = group}, Encryption::always);
    end.advance(socket.get());
    sleeps.wait(false);
    try {
      end.complete(socket.get(), soon());
    } catch (const Error& e) {
      refusal = e.what();
    }
  });
  const auto sleep_once = [&] {
    if (!sleeps.exchange(true)) sleeps.notify_all(), std::this_thread::sleep_for(seconds(6));
  };
  std::string failure;
  try {
    handshake({job, 0, 2, {}, sleep_once, secret, Encryption::always}, listener.get(), {}, {1}, 1,
              Deadline::after(seconds(20)));
  } catch (const Error& e) {
    failure = e.what();
  }
  rank_1.join();
  EXPECT_EQ(failure, "");
  EXPECT_EQ(refusal, "");
}

}  // namespace
}  // namespace rz::net
