// The exchange by which two ends prove that they have one secret: only equal keys and claims pass, and no
// message of it serves a second time, in the other direction or changed by a bit.

#include "comm/net/authentication.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/openssl.h"
#include "comm/net/strangers.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/fuzz.h"

namespace rz::net {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Refusal = Authentication::Refusal;
using Status = Authentication::Status;
using test::error_of;

struct Pair {
  UniqueFd near, far;
  Pair() {
    int fds[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0, Errc::system,
            "socketpair");
    near = UniqueFd(fds[0]), far = UniqueFd(fds[1]);
  }
};

void put(int socket, const Bytes& bytes) {
  require(send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes), Errc::io, "send");
}
/// All that has arrived.
Bytes take(int socket) {
  Bytes bytes(1000);
  const ssize_t n = recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  return bytes;
}

const Secret& secret() {
  static const Secret s = Secret::of_text("a secret that is long enough for a test");
  return s;
}
AuthenticationKey key(const Secret* s = &secret(), Purpose purpose = Purpose::data,
                      std::string_view context = "group 1") {
  return {s, purpose, context};
}
constexpr Claim claim{.size = 4, .rank = 3, .peer = 1, .index = 2, .group = 77};

// The first test, in a child: OpenSSL's own default context reads the file once in a process.
TEST(Authentication, NoFileOfConfigurationOfOpenSslIsRead) {
  const auto file = std::filesystem::temp_directory_path() / concat("rz_openssl_", getpid(), ".cnf");
  std::ofstream(file) << "openssl_conf = all\n[all]\nalg_section = algorithms\n[algorithms]\n"
                         "default_properties = fips=yes\n";
  EXPECT_EQ(test::in_forked_child([&] {
              setenv("OPENSSL_CONF", file.c_str(), 1);
              return key().bytes().size() == 32 && fingerprint("a name") != fingerprint("another");
            }),
            0);
  std::filesystem::remove(file);
}

TEST(Authentication, CodesAreThoseOfTheStandards) {
  const std::string text = "what do ya want for nothing?", of_key = "Jefe";  // RFC 4231, test case 2
  const auto bytes = [](const std::string& s) {
    return std::span(reinterpret_cast<const std::uint8_t*>(s.data()), s.size());
  };
  const Digest code = hmac_sha256(bytes(of_key), bytes(text));
  EXPECT_EQ((Bytes{code.begin(), code.begin() + 4}), (Bytes{0x5b, 0xdc, 0xc1, 0x46}));
  const Digest digest = sha256(bytes("abc"));  // FIPS 180-2, B.1
  EXPECT_EQ((Bytes{digest.begin(), digest.begin() + 4}), (Bytes{0xba, 0x78, 0x16, 0xbf}));
}

/// The three messages pass through `change`, which is called with the number of the message; false drops the
/// rest.
struct Outcome {
  Authentication client, server;
  std::vector<Bytes> messages;
};
template <class Change>
Outcome relay(const AuthenticationKey& client_key, const AuthenticationKey& server_key, const Change& change,
              const Claim& of_client = claim) {
  Pair client_side, server_side;
  Outcome o{Authentication::client(client_key, of_client), Authentication::server(server_key, 1, 77), {}};
  const auto pass = [&](int from, int to) {
    Bytes bytes = take(from);
    o.messages.push_back(bytes);
    change(o.messages.size() - 1, bytes);
    if (!bytes.empty()) put(to, bytes);
  };
  o.client.advance(client_side.near.get());
  pass(client_side.far.get(), server_side.far.get());
  o.server.advance(server_side.near.get());
  pass(server_side.far.get(), client_side.far.get());
  o.client.advance(client_side.near.get());
  pass(client_side.far.get(), server_side.far.get());
  o.server.advance(server_side.near.get());
  return o;
}
constexpr auto unchanged = [](std::size_t, Bytes&) {};

TEST(Authentication, EndsWithOneKeyProveIt) {
  const auto o = relay(key(), key(), unchanged);
  EXPECT_EQ(o.client.status(), Status::proven);
  EXPECT_EQ(o.server.status(), Status::proven);
  EXPECT_EQ(o.server.claim().rank, 3u);
  EXPECT_EQ(o.server.claim().index, 2u);
  ASSERT_EQ(o.messages.size(), 3u);
  EXPECT_EQ(o.messages[0].size(), 64u);
  EXPECT_EQ(o.messages[1].size(), 64u);
  EXPECT_EQ(o.messages[2].size(), 32u);
  for (const auto& message : o.messages)  // no part of the secret is sent
    EXPECT_TRUE(std::ranges::search(message, secret().bytes().subspan(0, 8)).empty());
}

TEST(Authentication, OtherKeysAreRefusedOnBothSides) {
  const Secret other = Secret::random();
  const AuthenticationKey others[] = {key(&other), key(nullptr), key(&secret(), Purpose::data, "group 2")};
  for (const auto& wrong : others) {
    const auto o = relay(wrong, key(), unchanged);
    EXPECT_EQ(o.client.refusal(), Refusal::other_secret);
    EXPECT_NE(o.client.reason().find("RZ_SECRET"), std::string::npos);
    EXPECT_NE(o.server.status(), Status::proven);
    EXPECT_TRUE(o.messages[2].empty()) << "a client sends no proof to a server that has none";
  }
  EXPECT_EQ(relay(key(&secret(), Purpose::store), key(), unchanged).server.refusal(), Refusal::no_hello);
}

TEST(Authentication, AnotherGroupIsDistinguishedFromAnotherSecret) {
  const Secret other = Secret::random();
  Claim of_other_group = claim;
  of_other_group.group = 78;
  EXPECT_EQ(relay(key(&other), key(), unchanged, of_other_group).client.refusal(), Refusal::other_group);
  EXPECT_EQ(relay(key(), key(), unchanged, of_other_group).server.claim().group, 78u);
}

TEST(Authentication, EveryFlippedBitIsRefused) {
  const std::size_t sizes[] = {64, 64, 32};
  for (std::size_t message = 0; message < 3; ++message)
    for (std::size_t bit = 0; bit < sizes[message] * 8; ++bit) {
      const auto o = relay(key(), key(), [&](std::size_t m, Bytes& bytes) {
        if (m == message && !bytes.empty()) bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
      });
      EXPECT_NE(o.server.status(), Status::proven) << "message " << message << " bit " << bit;
    }
}

/// Changes bits of a message, replaces it, cuts it off, appends to it, or leaves it.
void damage(test::Fuzz& fuzz, Bytes& bytes) {
  auto& random = fuzz.random;
  const auto any = [&] { return static_cast<std::uint8_t>(random()); };
  const std::size_t size = bytes.size();
  switch (random() % 8) {
    case 0:
      bytes.resize(random() % (size + 1));
      break;
    case 1:
      bytes.resize(size + random() % 200, any());
      break;
    case 2:
      std::ranges::generate(bytes, any);
      break;
    case 3:
      for (auto n = size ? 1 + random() % 4 : 0; n > 0; --n)
        bytes[random() % size] ^= static_cast<std::uint8_t>(1u << random() % 8);
      break;
    default:
      break;
  }
}

TEST(Authentication, OnlyTheMessagesThatWereSentProveAnything) {
  test::Fuzz fuzz(1000);
  long proven = 0;
  while (fuzz.next()) {
    std::vector<Bytes> arrived;
    const auto o = relay(key(), key(), [&](std::size_t, Bytes& bytes) {
      damage(fuzz, bytes);
      arrived.push_back(bytes);
    });
    const auto begins_as_sent = [&](std::size_t i) {
      const Bytes& sent = o.messages[i];
      return !sent.empty() && arrived[i].size() >= sent.size() &&
             std::equal(sent.begin(), sent.end(), arrived[i].begin());
    };
    // What follows a hello is taken for the proof.
    const bool replies = begins_as_sent(0) && begins_as_sent(1), hello_alone = arrived[0].size() == 64;
    ASSERT_EQ(o.client.status() == Status::proven, replies);
    ASSERT_EQ(o.server.status() == Status::proven, replies && hello_alone && begins_as_sent(2));
    proven += o.server.status() == Status::proven;
  }
  EXPECT_GT(proven, fuzz.tried() / 20);
  EXPECT_LT(proven, fuzz.tried());
}

TEST(Authentication, ARecordedExchangeIsOfNoUse) {
  const auto recorded = relay(key(), key(), unchanged);
  // To the server: the recorded hello and proof.
  Pair pair;
  auto server = Authentication::server(key(), 1, 77);
  put(pair.far.get(), recorded.messages[0]);
  server.advance(pair.near.get());
  put(pair.far.get(), recorded.messages[2]);
  EXPECT_EQ(server.advance(pair.near.get()), Status::refused);
  // To the client: the recorded reply.
  Pair other;
  auto client = Authentication::client(key(), claim);
  client.advance(other.near.get());
  put(other.far.get(), recorded.messages[1]);
  EXPECT_EQ(client.advance(other.near.get()), Status::refused);
}

/// An end that has no key forwards a client's hello to a server of the client's own process.
TEST(Authentication, AReflectedHelloIsRefused) {
  Pair client_side, server_side;
  auto client = Authentication::client(key(), claim);
  auto own_server = Authentication::server(key(), claim.rank, 77);
  client.advance(client_side.near.get());
  put(server_side.far.get(), take(client_side.far.get()));
  EXPECT_EQ(own_server.advance(server_side.near.get()), Status::refused);
  EXPECT_EQ(own_server.refusal(), Refusal::no_hello);
  EXPECT_TRUE(take(server_side.far.get()).empty());
}

TEST(Authentication, NoMoreThanTheMessageIsRead) {
  Pair pair;
  auto server = Authentication::server(key(), 1, 77);
  put(pair.far.get(), Bytes(1000, 'x'));
  EXPECT_EQ(server.advance(pair.near.get()), Status::refused);
  EXPECT_EQ(take(pair.near.get()).size(), 1000u - 64u);
}

TEST(Authentication, MessagesMayArriveByteByByte) {
  Pair client_side, server_side;
  auto client = Authentication::client(key(), claim);
  auto server = Authentication::server(key(), 1, 77);
  const auto drip = [](int from, int to, Authentication& end, int socket) {
    for (const std::uint8_t byte : take(from)) {
      EXPECT_EQ(end.status(), Status::pending);
      put(to, {byte});
      end.advance(socket);
    }
  };
  client.advance(client_side.near.get());
  drip(client_side.far.get(), server_side.far.get(), server, server_side.near.get());
  drip(server_side.far.get(), client_side.far.get(), client, client_side.near.get());
  drip(client_side.far.get(), server_side.far.get(), server, server_side.near.get());
  EXPECT_EQ(client.status(), Status::proven);
  EXPECT_EQ(server.status(), Status::proven);
}

TEST(Authentication, AShortSecretIsAnError) {
  const Error e = error_of([] { Secret::of_text("short"); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_NE(std::string(e.what()).find("openssl rand"), std::string::npos);
  EXPECT_EQ(std::string(e.what()).find("'short'"), std::string::npos) << "it shows the secret";
}

std::size_t chosen(const std::vector<Unproven>& all, std::size_t expected) {
  return choose_dropped(all, expected);
}

TEST(Strangers, AHostDisplacesItsOwnConnections) {
  const Source one{1}, two{2};
  EXPECT_EQ(chosen({{one}, {two}, {two}}, 1), 1u) << "more than there are ranks";
  EXPECT_EQ(chosen({{one}, {one}, {two}, {two}, {two}}, 1), 2u) << "of the host that has most";
  EXPECT_EQ(chosen({{one}, {one}, {two, true}, {two, true}, {two}}, 1), 2u);
  EXPECT_EQ(chosen({{one}, {two, true}, {two}, {two}}, 1), 2u) << "of it, the kind of which there are more";
}

TEST(Strangers, TheOldestOfTheMoreNumerousKindGoes) {
  const Source one{1}, two{2}, three{3};
  EXPECT_EQ(chosen({{one, true}, {two, true}, {three}}, 2), 0u) << "a newcomer has had no time for its hello";
  EXPECT_EQ(chosen({{one}, {two, true}, {three, true}}, 2), 1u);
  EXPECT_EQ(chosen({{one}, {two}, {three, true}}, 2), 0u);
}

// Strangers of any number of hosts, that send a hello or none.
TEST(Strangers, AConnectionStaysUntilHalfOfAllHaveComeAfterIt) {
  struct Held {
    Unproven unproven;
    int arrival;
  };
  std::mt19937 random(3);
  for (const unsigned percent : {0u, 10u, 50u, 90u, 100u}) {
    std::vector<Held> held;
    for (int i = 0; i < 4000; ++i) {
      const auto host = static_cast<std::uint8_t>(random());
      held.push_back({{Source{host, static_cast<std::uint8_t>(random())}}, i});
      if (held.size() > 64) {
        std::vector<Unproven> all;
        for (const Held& h : held) all.push_back(h.unproven);
        const auto dropped = held.begin() + static_cast<std::ptrdiff_t>(choose_dropped(all, 2));
        EXPECT_GE(i - dropped->arrival, 32) << percent;
        held.erase(dropped);
      }
      held.back().unproven.has_hello = random() % 100 < percent;
    }
  }
}

TEST(Strangers, RanksAloneAreNeverDelayed) {
  AcceptRate rate(64 + 256);
  const AcceptRate::Time now = Deadline::Clock::now();
  for (int round = 0; round < 100; ++round) {  // 256 connect at once, prove the secret and connect again
    for (int i = 0; i < 256; ++i) {
      if (i % max_accepts_per_poll == 0) {
        ASSERT_EQ(rate.rest(1, now).count(), 0) << round << ", " << i;
      }
      rate.accepted();
    }
    for (int i = 0; i < 256; ++i) rate.proven();
  }
}

TEST(Strangers, ThoseThatProveNothingAreAcceptedAtTheRate) {
  AcceptRate rate(320);
  const AcceptRate::Time begin = Deadline::Clock::now();
  AcceptRate::Time now = begin;
  for (int i = 0; i < 320 + 10 * 2'000; ++i) {
    if (i % max_accepts_per_poll == 0) {
      const auto rest = rate.rest(2'000, now);
      EXPECT_LE(rest, std::chrono::milliseconds(16));
      now += rest;
    }
    rate.accepted();
  }
  EXPECT_NEAR(std::chrono::duration<double>(now - begin).count(), 10, 0.1);
}

}  // namespace
}  // namespace rz::net
