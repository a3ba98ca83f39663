// The records that this library encrypts itself are those of TLS 1.3: the other end here is OpenSSL, with its
// own records, and its own changes of keys.

#include "comm/net/tls_records.h"

#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "comm/net/tls.h"
#include "tests/support/tls_ends.h"

namespace rz::net {
namespace {

using test::key_a;
using test::noise;
using test::Sockets;
using test::soon;

struct FreeSsl {
  void operator()(SSL* p) const { SSL_free(p); }
  void operator()(SSL_CTX* p) const { SSL_CTX_free(p); }
};

SSL_SESSION* session_of_key_a(SSL* ssl) {
  const unsigned char aes[2] = {0x13, 0x01};
  SSL_SESSION* const session = SSL_SESSION_new();
  SSL_SESSION_set1_master_key(session, key_a.data(), key_a.size());
  SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, aes));
  SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  return session;
}

/// A connection of Tls and of OpenSSL's own TLS, after its handshake.
struct WithOpenSsl {
  Sockets sockets;
  std::unique_ptr<SSL_CTX, FreeSsl> context;
  std::unique_ptr<SSL, FreeSsl> other;
  Tls ours;

  /// `ours_is_client`: which end Tls is. `padding`: of the records of the other end.
  explicit WithOpenSsl(bool ours_is_client, const char* cipher, std::size_t padding = 0,
                       std::uint64_t records_a_key = 3)
      : context(SSL_CTX_new(ours_is_client ? TLS_server_method() : TLS_client_method())),
        ours((ours_is_client ? sockets.client : sockets.server).get(), ours_is_client, key_a, records_a_key) {
    SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
    SSL_CTX_set_ciphersuites(context.get(), cipher);
    SSL_CTX_set_num_tickets(context.get(), 0);
    SSL_CTX_set_block_padding(context.get(), padding);
    SSL_CTX_set_psk_use_session_callback(context.get(), [](SSL* ssl, const EVP_MD*, const unsigned char** id,
                                                           std::size_t* size, SSL_SESSION** session) {
      *id = reinterpret_cast<const unsigned char*>("ringzero"), *size = 8;
      *session = session_of_key_a(ssl);
      return 1;
    });
    SSL_CTX_set_psk_find_session_callback(
        context.get(), [](SSL* ssl, const unsigned char*, std::size_t, SSL_SESSION** session) {
          *session = session_of_key_a(ssl);
          return 1;
        });
    other.reset(SSL_new(context.get()));
    SSL_set_fd(other.get(), (ours_is_client ? sockets.server : sockets.client).get());
    if (ours_is_client)
      SSL_set_accept_state(other.get());
    else
      SSL_set_connect_state(other.get());
    for (const Deadline deadline = soon(); !deadline.expired();) {
      const auto status = ours.handshake();
      if (SSL_do_handshake(other.get()) == 1 && status != Tls::Status::pending) break;
    }
  }

  bool open() { return ours.handshake() == Tls::Status::open && SSL_is_init_finished(other.get()); }

  std::vector<std::byte> to_openssl(const std::vector<std::byte>& bytes) {
    std::vector<std::byte> got(bytes.size());
    std::size_t sent = 0, received = 0;
    for (const Deadline deadline = soon(); received < got.size() && !deadline.expired();) {
      const iovec rest{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
      const auto n = sent < bytes.size() ? ours.send({&rest, 1}) : ours.flush() - 1;
      if (n > 0) sent += static_cast<std::size_t>(n);
      std::size_t k = 0;
      if (SSL_read_ex(other.get(), got.data() + received, got.size() - received, &k)) received += k;
    }
    got.resize(received);
    return got;
  }

  std::vector<std::byte> from_openssl(const std::vector<std::byte>& bytes) {
    std::vector<std::byte> got(bytes.size());
    std::size_t sent = 0, received = 0;
    SSL_set_mode(other.get(), SSL_MODE_ENABLE_PARTIAL_WRITE);
    for (const Deadline deadline = soon(); received < got.size() && !deadline.expired();) {
      std::size_t k = 0;
      if (sent < bytes.size() && SSL_write_ex(other.get(), bytes.data() + sent, bytes.size() - sent, &k))
        sent += k;
      const iovec rest{got.data() + received, got.size() - received};
      const auto n = ours.receive({&rest, 1});
      if (n > 0) received += static_cast<std::size_t>(n);
      if (n == 0 || (n < 0 && errno != EAGAIN)) break;
    }
    got.resize(received);
    return got;
  }
};

class TlsWithOpenSsl : public testing::TestWithParam<std::tuple<bool, const char*>> {};

TEST_P(TlsWithOpenSsl, CarriesEverySizeInBothDirections) {
  const auto [ours_is_client, cipher] = GetParam();
  WithOpenSsl ends(ours_is_client, cipher);
  ASSERT_TRUE(ends.open());
  EXPECT_EQ(ends.ours.cipher(), cipher);
  for (const bool requests : {false, true})
    for (const std::size_t size : {1, 5, 16'383, 16'384, 16'385, 65'576, 700'000}) {
      ASSERT_EQ(SSL_key_update(ends.other.get(),
                               requests ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED),
                1);
      const auto bytes = noise(size, static_cast<unsigned>(size));
      ASSERT_EQ(ends.to_openssl(bytes), bytes) << size;
      ASSERT_EQ(ends.from_openssl(bytes), bytes) << size;
    }
  ASSERT_EQ(SSL_shutdown(ends.other.get()), 0);  // sent
  std::byte b;
  const iovec one{&b, 1};
  std::ptrdiff_t n = -1;
  for (const Deadline deadline = soon(); n < 0 && !deadline.expired();) n = ends.ours.receive({&one, 1});
  EXPECT_EQ(n, 0);
  EXPECT_EQ(ends.ours.error(), "");
}

INSTANTIATE_TEST_SUITE_P(Ends, TlsWithOpenSsl,
                         testing::Combine(testing::Bool(), testing::Values("TLS_AES_128_GCM_SHA256",
                                                                           "TLS_CHACHA20_POLY1305_SHA256")),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param) ? "Client" : "Server") +
                                  (std::strstr(std::get<1>(test.param), "AES") ? "Aes" : "ChaCha");
                         });

TEST(RecordsOfTls, HaveANewKeyWhenTheOtherEndRequestsIt) {
  WithOpenSsl ends(true, "TLS_AES_128_GCM_SHA256", 0, Tls::default_records_a_key);
  ASSERT_TRUE(ends.open());
  int updates = 0;
  SSL_set_msg_callback_arg(ends.other.get(), &updates);
  SSL_set_msg_callback(
      ends.other.get(), [](int sends, int, int type, const void* bytes, std::size_t size, SSL*, void* count) {
        const bool is_update =
            !sends && type == SSL3_RT_HANDSHAKE && size == 5 && *static_cast<const char*>(bytes) == 24;
        *static_cast<int*>(count) += is_update;
      });
  for (const auto& [request, expected] :
       {std::pair(SSL_KEY_UPDATE_NOT_REQUESTED, 0), std::pair(SSL_KEY_UPDATE_REQUESTED, 1)}) {
    ASSERT_EQ(SSL_key_update(ends.other.get(), request), 1);
    ASSERT_EQ(ends.from_openssl(noise(10)), noise(10));
    ASSERT_EQ(ends.to_openssl(noise(10)), noise(10));
    ASSERT_EQ(ends.to_openssl(noise(10)), noise(10));
    EXPECT_EQ(updates, expected);
  }
}

TEST(RecordsOfTls, WithPaddingAreRefused) {
  WithOpenSsl ends(true, "TLS_AES_128_GCM_SHA256", 4096);
  ASSERT_TRUE(ends.open());
  EXPECT_EQ(ends.from_openssl(noise(100)).size(), 0u);
  EXPECT_NE(ends.ours.error(), "");
}

/// The records of one direction, of a fixed secret.
struct Direction {
  TlsRecords encrypts{TlsRecords::Cipher::aes, true, Digest{7}};
  TlsRecords decrypts{TlsRecords::Cipher::aes, false, Digest{7}};

  std::vector<std::uint8_t> seal(std::vector<std::byte> bytes, RecordType type = RecordType::data) {
    std::vector<std::uint8_t> record(bytes.size() + TlsRecords::overhead);
    const iovec part{bytes.data(), bytes.size()};
    Parts from({&part, 1});
    EXPECT_TRUE(encrypts.seal(type, from, bytes.size(), record.data()));
    return record;
  }
  RecordType open(std::vector<std::uint8_t> record) {
    std::vector<std::byte> bytes(record.size());
    const iovec part{bytes.data(), bytes.size()};
    Parts into({&part, 1});
    return decrypts.open(record.data(), into);
  }
};

TEST(RecordsOfTls, EqualContentsHaveOtherBytes) {
  Direction d;
  const auto bytes = noise(100);
  const auto first = d.seal(bytes), second = d.seal(bytes);
  EXPECT_NE(first, second);
  d.encrypts.update_key();
  EXPECT_NE(d.seal(bytes), first);  // number 0 of another key
}

TEST(RecordsOfTls, AreOpenedOnceAndInOrder) {
  const auto bytes = noise(100);
  {
    Direction d;
    const auto first = d.seal(bytes), second = d.seal(bytes);
    EXPECT_EQ(d.open(first), RecordType::data);
    EXPECT_EQ(d.open(first), RecordType::none);
  }
  Direction d;
  const auto first = d.seal(bytes), second = d.seal(bytes);
  EXPECT_EQ(d.open(second), RecordType::none);
}

TEST(RecordsOfTls, AChangeOfAnyByteIsFound) {
  const auto bytes = noise(40);
  for (std::size_t i = TlsRecords::header; i < bytes.size() + TlsRecords::overhead; ++i) {
    Direction d;
    auto record = d.seal(bytes);
    record[i] ^= 1;
    EXPECT_EQ(d.open(record), RecordType::none) << i;
  }
}

TEST(RecordsOfTls, AHeaderOfNoRecordHasNoLength) {
  const std::uint8_t good[] = {23, 3, 3, 0x40, 0x11}, long_one[] = {23, 3, 3, 0x40, 0x12},
                     short_one[] = {23, 3, 3, 0, 16}, plain[] = {22, 3, 3, 0, 40}, old[] = {23, 3, 1, 0, 40};
  EXPECT_EQ(TlsRecords::length_of(good), (16u << 10) + 17);
  for (const auto* bad : {long_one, short_one, plain, old}) EXPECT_EQ(TlsRecords::length_of(bad), 0u);
}

}  // namespace
}  // namespace rz::net
