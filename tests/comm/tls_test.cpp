// TLS of two ends that have one key: every size arrives with equal bits, bytes read ahead are not forgotten,
// and another key, or a certificate, is of no use.

#include "comm/net/tls.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "comm/core/error.h"
#include "tests/support/forked.h"
#include "tests/support/tls_ends.h"

namespace rz::net {
namespace {

using test::key_a;
using test::key_b;
using test::noise;
using test::Sockets;
using test::soon;
using test::TlsKey;

/// Both ends of a TLS connection, after their handshakes.
struct Ends {
  Sockets sockets;
  Tls client, server;
  explicit Ends(const TlsKey& of_client = key_a, const TlsKey& of_server = key_a,
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

// The first test, in a child: OpenSSL's own default context reads the file once in a process. The file
// forbids what TLS needs, and it forbids it to the program alone.
TEST(Tls, AProgramsOwnUseOfOpenSslReadsItsConfiguration) {
  const auto file = std::filesystem::temp_directory_path() / concat("rz_openssl_tls_", getpid(), ".cnf");
  std::ofstream(file) << "openssl_conf = all\n[all]\nalg_section = algorithms\n[algorithms]\n"
                         "default_properties = fips=yes\n";
  EXPECT_EQ(test::in_forked_child([&] {
              setenv("OPENSSL_CONF", file.c_str(), 1);
              const bool is_open = Ends().client.handshake() == Tls::Status::open;
              EVP_MD* const of_the_program = EVP_MD_fetch(nullptr, "SHA256", nullptr);
              return is_open && !of_the_program;
            }),
            0);
  std::filesystem::remove(file);
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

}  // namespace
}  // namespace rz::net
