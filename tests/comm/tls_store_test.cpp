// TLS of the store: an end in the middle that records or replays a connection achieves nothing, and ends that
// differ in what they require are named.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/socket.h"
#include "comm/store.h"
#include "tests/support/between.h"
#include "tests/support/error_of.h"
#include "tests/support/tls_ends.h"

namespace rz::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Between;
using test::error_of;
using test::noise;
using test::soon;

bool contains(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

TcpStoreOptions options(bool serve, const std::string& encryption) {
  return {.serve = serve,
          .timeout = seconds(20),
          .launch = "a launch",
          .size = 2,
          .rank = serve ? 0 : 1,
          .secret = test::tls_secret,
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
  const Secret secret = Secret::of_text(test::tls_secret);
  const AuthenticationKey key(&secret, Purpose::store, "");
  for (const bool garbage : {false, true}) {
    const UniqueFd socket = connect_tcp(at, soon());
    auto end = Authentication::client(key, {.size = 2, .rank = 1, .group = fingerprint("a launch")},
                                      Encryption::always);
    for (const Deadline deadline = soon(); !end.has_proof() && !deadline.expired();)
      end.advance(socket.get());
    ASSERT_TRUE(end.has_proof());
    if (garbage) send(socket.get(), test::tls_secret.data(), test::tls_secret.size(), MSG_NOSIGNAL);
    pollfd p{socket.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&p, 1, 20'000), 1) << "it was not disconnected";
  }
  EXPECT_EQ(tcp_store(at.text(), options(false, "always"))->add("counter", 1), 1);
}

}  // namespace
}  // namespace rz::net
