// TLS of connections whose ends have proved one secret: every size arrives with equal bits, bytes read ahead
// are not forgotten, and an end in the middle that records, changes, replays or strips it achieves nothing.

#include "comm/net/tls.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/handshake.h"
#include "comm/net/socket.h"
#include "comm/net/stream.h"
#include "comm/store.h"
#include "tests/support/between.h"
#include "tests/support/error_of.h"

namespace rz::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Between;
using test::error_of;

const std::string ours = "the secret of this job, which nobody else has";
Deadline soon() { return Deadline::after(seconds(30)); }
bool contains(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

/// Both ends of a connection over loopback.
struct Sockets {
  UniqueFd client, server;
  Sockets() {
    const UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
    client = connect_tcp(local_address(listener.get()), soon());
    pollfd p{listener.get(), POLLIN, 0};
    poll(&p, 1, 10'000);
    server = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    set_tcp_options(server.get());
  }
};

using Key = std::array<std::uint8_t, 32>;
constexpr Key key_a{1, 2, 3}, key_b{1, 2, 4};

/// Both ends of a TLS connection, after their handshakes.
struct Ends {
  Sockets sockets;
  Tls client, server;
  explicit Ends(const Key& of_client = key_a, const Key& of_server = key_a,
                std::uint64_t records_a_key = Tls::default_records_a_key)
      : client(sockets.client.get(), true, of_client, records_a_key),
        server(sockets.server.get(), false, of_server, records_a_key) {
    const Deadline deadline = soon();
    while (!deadline.expired()) {
      const auto a = client.handshake(), b = server.handshake();
      if (a == Tls::Status::failed || b == Tls::Status::failed) {
        client.handshake(), server.handshake();
        return;
      }
      if (a == Tls::Status::open && b == Tls::Status::open) return;
    }
  }
};

std::vector<std::byte> noise(std::size_t size, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

/// Sends all from one end to the other. `parts`: in how many pieces of a gather.
std::vector<std::byte> carry(Tls& from, Tls& to, std::vector<std::byte> bytes, std::size_t head) {
  std::vector<std::byte> got(bytes.size());
  std::size_t sent = 0, received = 0;
  const Deadline deadline = soon();
  while ((received < got.size() || from.unsent()) && !deadline.expired()) {
    std::vector<iovec> parts;
    if (sent < head) parts.push_back({bytes.data() + sent, head - sent});
    const std::size_t rest = std::max(sent, head);
    parts.push_back({bytes.data() + rest, bytes.size() - rest});
    if (sent < bytes.size()) {
      const auto n = from.send(parts);
      if (n > 0) sent += static_cast<std::size_t>(n);
    } else {
      from.flush();
    }
    const iovec into{got.data() + received, std::min<std::size_t>(got.size() - received, 70'001)};
    const auto n = to.receive({&into, 1});
    if (n > 0) received += static_cast<std::size_t>(n);
    if (n < 0 && errno != EAGAIN) break;
  }
  got.resize(received);
  return got;
}

TEST(Tls, CarriesEverySizeInBothDirections) {
  for (const std::uint64_t records_a_key : {Tls::default_records_a_key, std::uint64_t{3}}) {
    Ends ends(key_a, key_a, records_a_key);
    EXPECT_FALSE(ends.client.cipher().empty());
    for (const std::size_t size : {1, 24, 40, 16'383, 16'384, 16'385, 65'576, 300'000, 5'000'000})
      for (const std::size_t head : {std::size_t{0}, std::min<std::size_t>(size, 40), size}) {
        const auto bytes = noise(size, static_cast<unsigned>(size));
        ASSERT_EQ(carry(ends.client, ends.server, bytes, head), bytes) << size << ' ' << head;
        ASSERT_EQ(carry(ends.server, ends.client, bytes, head), bytes) << size << ' ' << head;
      }
  }
}

// The classic stall: the socket is drained, and decrypted bytes wait in memory.
TEST(Tls, BytesReadAheadAreReported) {
  Ends ends;
  const auto bytes = noise(3000);
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  for (int i = 0; i < 3; ++i) ASSERT_EQ(ends.client.send({&part, 1}), 3000);
  pollfd p{ends.sockets.server.get(), POLLIN, 0};
  ASSERT_EQ(poll(&p, 1, 10'000), 1);
  std::vector<std::byte> got(9000);
  const iovec first{got.data(), 1};
  while (ends.server.receive({&first, 1}) != 1) {
  }
  EXPECT_TRUE(ends.server.has_more());
  std::size_t done = 1;
  for (const Deadline deadline = soon(); done < got.size() && !deadline.expired();) {
    const iovec rest{got.data() + done, got.size() - done};
    const auto n = ends.server.receive({&rest, 1});
    if (n > 0) done += static_cast<std::size_t>(n);
  }
  EXPECT_EQ(done, got.size());
  const iovec again{got.data(), 1};
  EXPECT_EQ(ends.server.receive({&again, 1}), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_FALSE(ends.server.has_more());
}

TEST(Tls, AnotherKeyCompletesNoHandshake) {
  Ends ends(key_a, key_b);
  EXPECT_EQ(ends.server.handshake(), Tls::Status::failed);
  EXPECT_NE(ends.server.error().find("TLS handshake failed"), std::string::npos) << ends.server.error();
  EXPECT_EQ(ends.server.error().find("between the hosts"), std::string::npos) << ends.server.error();
  EXPECT_NE(ends.client.handshake(), Tls::Status::open);
}

TEST(Tls, AnEndOfTheConnectionIsNoErrorOfEncryption) {
  Ends ends;
  ends.sockets.client.close();
  std::byte b;
  const iovec one{&b, 1};
  for (const Deadline deadline = soon(); ends.server.receive({&one, 1}) < 0 && !deadline.expired();) {
  }
  EXPECT_EQ(ends.server.receive({&one, 1}), 0);
  EXPECT_EQ(ends.server.error(), "");
}

// A server that is not of this job, and has a certificate, as any program can make one.
TEST(Tls, ACertificateIsNoReplacementForTheKey) {
  Sockets sockets;
  EVP_PKEY* const pair = EVP_EC_gen("P-256");
  X509* const certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, pair);
  X509_sign(certificate, pair, EVP_sha256());
  SSL_CTX* const context = SSL_CTX_new(TLS_server_method());
  ASSERT_EQ(SSL_CTX_use_certificate(context, certificate), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey(context, pair), 1);
  SSL* const server = SSL_new(context);
  SSL_set_fd(server, sockets.server.get());
  Tls client(sockets.client.get(), true, key_a);
  auto status = client.handshake();
  for (const Deadline deadline = soon(); status == Tls::Status::pending && !deadline.expired();) {
    SSL_accept(server);
    status = client.handshake();
  }
  EXPECT_EQ(status, Tls::Status::failed);
  SSL_free(server), SSL_CTX_free(context), X509_free(certificate), EVP_PKEY_free(pair);
}

TEST(Tls, WithoutTheKernelsModuleTheSocketStaysUsable) {
  Sockets sockets;
  if (Tls::enable_kernel_tls(sockets.client.get())) GTEST_SKIP() << "this kernel has TLS";
  ASSERT_EQ(send(sockets.client.get(), "x", 1, MSG_NOSIGNAL), 1);
  Ends ends;
  EXPECT_FALSE(ends.client.kernel_sends() || ends.client.kernel_receives());
}

TcpStoreOptions options(bool serve, const std::string& encryption) {
  return {.serve = serve,
          .timeout = seconds(20),
          .launch = "a launch",
          .size = 2,
          .rank = serve ? 0 : 1,
          .secret = ours,
          .encryption = encryption};
}
std::shared_ptr<Store> serve(const std::string& encryption) {
  return tcp_store("127.0.0.1:0", options(true, encryption));
}

TEST(TlsOfTheStore, CarriesValuesOfEverySize) {
  const auto server = serve("always");
  const auto client = tcp_store(concat("127.0.0.1:", tcp_store_port(*server)), options(false, "always"));
  for (const std::size_t size : {0, 1, 16'384, 70'000, 1 << 20}) {
    const auto bytes = noise(size);
    const std::string value(reinterpret_cast<const char*>(bytes.data()), size);
    client->set("key", value);
    EXPECT_EQ(server->get("key", soon()), value);
    EXPECT_EQ(client->get("key", soon()), value);
  }
  EXPECT_EQ(client->add("counter", 3), 3);
}

TEST(TlsOfTheStore, AnEavesdropperFindsNoValue) {
  const std::string pattern = "a value that is easily found";
  for (const std::string encryption : {"off", "always"}) {
    const auto server = serve(encryption);
    Between between(tcp_store_port(*server));
    const auto client = tcp_store(between.address().text(), options(false, encryption));
    client->set("key", pattern);
    EXPECT_EQ(client->get("key", soon()), pattern);
    EXPECT_EQ(between.recorded().find(pattern) != std::string::npos, encryption == "off");
  }
}

TEST(TlsOfTheStore, ARecordedSessionHasNoEffect) {
  const auto server = serve("always");
  std::string session;
  {
    Between between(tcp_store_port(*server));
    EXPECT_EQ(tcp_store(between.address().text(), options(false, "always"))->add("counter", 1), 1);
    session = between.recorded();
  }
  for (int i = 0; i < 3; ++i) {
    const UniqueFd replay = connect_tcp(resolve({"127.0.0.1", tcp_store_port(*server)}).front(), soon());
    send(replay.get(), session.data(), session.size(), MSG_NOSIGNAL);
    pollfd p{replay.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&p, 1, 20'000), 1) << "it was not disconnected";
  }
  EXPECT_EQ(server->add("counter", 0), 1);
}

/// The ends of an exchange, and what the server would have read after it. Every byte passes through
/// `change`, with the end that sent it and its position.
struct Outcome {
  Authentication client, server;
};
Outcome exchange(Encryption of_client, Encryption of_server,
                 const std::function<void(bool by_client, std::size_t at, std::uint8_t&)>& change) {
  const Secret secret = Secret::of_text(ours);
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

TEST(TlsOfTheStore, ADifferentSettingIsAnErrorThatNamesBoth) {
  for (const std::string of_server : {"off", "always"}) {
    const auto server = serve(of_server);
    const Error e = error_of([&] {
      tcp_store(concat("127.0.0.1:", tcp_store_port(*server)),
                options(false, of_server == "off" ? "always" : "off"));
    });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_TRUE(contains(e, "RZ_ENCRYPTION=off") && contains(e, "RZ_ENCRYPTION=on") && contains(e, "rank 1"))
        << e.what();
    const Error of_rank_0 = error_of([&] { server->get("absent", Deadline::after(milliseconds(1))); });
    EXPECT_TRUE(contains(of_rank_0, "rank 1 at 127.0.0.1 proved the secret")) << of_rank_0.what();
  }
}

/// An end that has proved the secret, and then sends `bytes` in place of a TLS handshake, is dropped, and
/// others are served.
TEST(TlsOfTheStore, AHandshakeThatDoesNotEndIsDropped) {
  TcpStoreOptions serving = options(true, "always");
  serving.hello_timeout = milliseconds(300);
  const auto server = tcp_store("127.0.0.1:0", serving);
  const SocketAddress at = resolve({"127.0.0.1", tcp_store_port(*server)}).front();
  const Secret secret = Secret::of_text(ours);
  const AuthenticationKey key(&secret, Purpose::store, "");
  for (const bool garbage : {false, true}) {
    const UniqueFd socket = connect_tcp(at, soon());
    auto end = Authentication::client(key, {.size = 2, .rank = 1, .group = fingerprint("a launch")},
                                      Encryption::always);
    for (const Deadline deadline = soon(); !end.has_proof() && !deadline.expired();)
      end.advance(socket.get());
    ASSERT_TRUE(end.has_proof());
    if (garbage) send(socket.get(), ours.data(), ours.size(), MSG_NOSIGNAL);
    pollfd p{socket.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&p, 1, 20'000), 1) << "it was not disconnected";
  }
  EXPECT_EQ(tcp_store(at.text(), options(false, "always"))->add("counter", 1), 1);
}

/// A change of any byte of the session: nobody reads another value.
TEST(TlsOfTheData, AChangedBitIsAnErrorOfBothEnds) {
  const JobId job = random_id();
  const auto secret = std::make_shared<const Secret>(Secret::of_text(ours));
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
  const auto secret = std::make_shared<const Secret>(Secret::of_text(ours));
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
  const auto secret = std::make_shared<const Secret>(Secret::of_text(ours));
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

}  // namespace
}  // namespace rz::net
