#include "comm/net/tls.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/net/openssl.h"

namespace rz::net {

namespace {

constexpr const char* aes = "TLS_AES_128_GCM_SHA256";
constexpr const char* chacha = "TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char aes_id[2] = {0x13, 0x01};
constexpr unsigned char psk_identity[] = "ringzero";
/// Records are sent when so many bytes of them wait: they are in a near cache, and the kernel gets few calls.
/// A frame of the largest size is one call.
constexpr std::size_t max_batch = 72 << 10;
/// One read of the socket: several records. Sockets of short messages keep to the first size.
constexpr std::size_t first_read_ahead = 4 << 10, read_ahead = 128 << 10;
/// Shorter contents are decrypted where they are, and copied. Messages to TLS itself are.
constexpr std::size_t copy_below = 1 << 10;

constexpr std::size_t max_wire_record = Tls::max_record + TlsRecords::overhead;
constexpr std::uint8_t unexpected_message = 10, bad_record_mac = 20, internal_error = 80, close_notify = 0;
constexpr std::uint8_t fatal = 2, key_update = 24;
constexpr const char* changed = "; something between the hosts changes what they send";

/// Whether the processor has instructions for AES; without them ChaCha20 is several times faster.
bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes");
#elif defined(__aarch64__)
  return getauxval(AT_HWCAP) & HWCAP_AES;
#else
  return false;
#endif
}

struct Deleter {
  void operator()(SSL_CTX* p) const { SSL_CTX_free(p); }
  void operator()(BIO_METHOD* p) const { BIO_meth_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Deleter>;

/// What all connections of a process share.
struct TlsSettings {
  Owned<SSL_CTX> client, server;
  Owned<BIO_METHOD> socket;
};

/// The alert of the other end that the error is about; 0 if it is none.
int alert_of(unsigned long code) {
  const int reason = ERR_GET_REASON(code);
  const bool is_alert = ERR_GET_LIB(code) == ERR_LIB_SSL && reason >= SSL_AD_REASON_OFFSET &&
                        reason < SSL_AD_REASON_OFFSET + 256;
  return is_alert ? reason - SSL_AD_REASON_OFFSET : 0;
}

}  // namespace

/// The functions that OpenSSL calls.
struct TlsCallbacks {
  static Tls& of(const SSL* ssl) { return *static_cast<Tls*>(SSL_get_app_data(ssl)); }
  static Tls& of(BIO* bio) { return *static_cast<Tls*>(BIO_get_app_data(bio)); }

  /// Gathers records; Tls::flush() sends them without a signal if the other end is gone.
  static int write(BIO* bio, const char* bytes, int size) {
    Tls& tls = of(bio);
    BIO_clear_retry_flags(bio);
    const auto count = static_cast<std::size_t>(size);
    tls.out_.reserve(count, count);
    std::memcpy(tls.out_.bytes.get() + tls.out_.end, bytes, count);
    tls.out_.end += count;
    return size;
  }

  static int read(BIO* bio, char* into, int size) {
    Tls& tls = of(bio);
    BIO_clear_retry_flags(bio);
    const ssize_t n = recv(tls.socket_, into, static_cast<std::size_t>(size), MSG_DONTWAIT);
    if (n > 0) return static_cast<int>(n);
    if (n == 0) tls.ended_ = true;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
      BIO_set_retry_read(bio);
    else if (n < 0)
      tls.read_errno_ = errno;
    return n == 0 ? 0 : -1;
  }

  static long control(BIO* bio, int command, long, void*) {
    return command == BIO_CTRL_FLUSH && of(bio).send_handshake() ? 1 : 0;
  }

  /// OpenSSL's one way to hand out the secrets of the traffic. Nothing is written anywhere.
  static void secret(const SSL* ssl, const char* line) { of(ssl).keep_secret(line); }

  static SSL_SESSION* session_of(SSL* ssl) {
    SSL_SESSION* const session = SSL_SESSION_new();
    const Tls& tls = of(ssl);
    if (session && SSL_SESSION_set1_master_key(session, tls.key_, sizeof tls.key_) &&
        SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, aes_id)) &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
      return session;
    SSL_SESSION_free(session);
    return nullptr;
  }

  static int client_session(SSL* ssl, const EVP_MD*, const unsigned char** id, std::size_t* size,
                            SSL_SESSION** session) {
    *id = psk_identity, *size = sizeof psk_identity - 1;
    *session = session_of(ssl);
    return *session != nullptr;
  }

  static int server_session(SSL* ssl, const unsigned char* id, std::size_t size, SSL_SESSION** session) {
    const bool known = size == sizeof psk_identity - 1 && std::memcmp(id, psk_identity, size) == 0;
    *session = known ? session_of(ssl) : nullptr;
    return 1;
  }
};

namespace {

Owned<SSL_CTX> make_settings(bool is_client) {
  Owned<SSL_CTX> made(
      SSL_CTX_new_ex(openssl_context(), nullptr, is_client ? TLS_client_method() : TLS_server_method()));
  SSL_CTX* const c = made.get();
  // The end that has no instructions for AES decides: a server by its own order, a client by the one that
  // the server follows.
  const std::string ciphers = has_aes() ? concat(aes, ':', chacha) : concat(chacha, ':', aes);
  if (!c || !SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) ||
      !SSL_CTX_set_max_proto_version(c, TLS1_3_VERSION) || !SSL_CTX_set_ciphersuites(c, ciphers.c_str()) ||
      !SSL_CTX_set1_groups_list(c, "X25519") || !SSL_CTX_set_num_tickets(c, 0))
    fail_openssl("SSL_CTX_new");
  SSL_CTX_clear_options(c, SSL_CTX_get_options(c));
  SSL_CTX_set_options(
      c, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_IGNORE_UNEXPECTED_EOF);
  if (!has_aes()) SSL_CTX_set_options(c, SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(c, SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_keylog_callback(c, TlsCallbacks::secret);
  // A server has no certificate, and a client accepts none. finish_handshake() requires the key besides.
  if (is_client) SSL_CTX_set_verify(c, SSL_VERIFY_PEER, nullptr);
  if (is_client)
    SSL_CTX_set_psk_use_session_callback(c, TlsCallbacks::client_session);
  else
    SSL_CTX_set_psk_find_session_callback(c, TlsCallbacks::server_session);
  return made;
}

TlsSettings make_tls_settings() {
  OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  TlsSettings s;
  s.client = make_settings(true);
  s.server = make_settings(false);
  s.socket.reset(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "ringzero"));
  BIO_METHOD* const m = s.socket.get();
  if (!m || !BIO_meth_set_write(m, TlsCallbacks::write) || !BIO_meth_set_read(m, TlsCallbacks::read) ||
      !BIO_meth_set_ctrl(m, TlsCallbacks::control))
    fail_openssl("BIO_meth_new");
  return s;
}

const TlsSettings& tls_settings() {
  static constinit Lazy<TlsSettings> settings;
  return settings.get(make_tls_settings);
}

}  // namespace

void Tls::Free::operator()(ssl_st* ssl) const { SSL_free(ssl); }

Tls::Tls(int socket, bool is_client, std::span<const std::uint8_t, 32> key, std::uint64_t records_a_key)
    : socket_(socket), is_client_(is_client), records_a_key_(records_a_key) {
  std::ranges::copy(key, key_);
  const TlsSettings& settings = tls_settings();
  ERR_clear_error();
  ssl_.reset(SSL_new(is_client ? settings.client.get() : settings.server.get()));
  BIO* const bio = BIO_new_ex(openssl_context(), settings.socket.get());
  if (!ssl_ || !bio) {
    BIO_free(bio);
    fail_openssl("SSL_new");
  }
  BIO_set_app_data(bio, this);
  SSL_set_app_data(ssl_.get(), this);
  SSL_set_bio(ssl_.get(), bio, bio);
  if (is_client)
    SSL_set_connect_state(ssl_.get());
  else
    SSL_set_accept_state(ssl_.get());
}

Tls::~Tls() {
  OPENSSL_cleanse(key_, sizeof key_);
  for (Digest* secret : {&client_secret_, &server_secret_}) OPENSSL_cleanse(secret->data(), secret->size());
}

void Tls::record_error(const char* what) {
  status_ = Status::failed;
  if (!error_.empty()) return;
  const unsigned long code = ERR_peek_error();
  const char* const text = ERR_reason_error_string(code);
  error_ = concat(what, alert_of(code) ? " (the other end reports: " : " (", text ? text : "no reason", ")");
}

// ---- handshake

Tls::Status Tls::handshake() {
  if (status_ != Status::pending) return status_;
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_.get());
  const bool wants = done != 1 && SSL_get_error(ssl_.get(), done) == SSL_ERROR_WANT_READ;
  const bool is_sent = send_handshake();
  if (done == 1 && is_sent) return finish_handshake();
  if (wants && is_sent) return status_;
  if (!ended_ && !read_errno_) record_error("the TLS handshake failed");
  return status_ = Status::failed;
}

/// A new socket has space, so a failure is that of the connection.
bool Tls::send_handshake() {
  const bool is_sent = flush();
  if (!is_sent && !read_errno_) read_errno_ = errno;
  return is_sent;
}

/// OpenSSL reads record by record, so it has read none of those that follow the handshake.
Tls::Status Tls::finish_handshake() {
  OPENSSL_cleanse(key_, sizeof key_);
  const auto fail = [&](const char* why) {
    error_ = why;
    return status_ = Status::failed;
  };
  if (!SSL_session_reused(ssl_.get()))
    return fail("the TLS handshake was completed without the key of this job");
  if (client_secret_ == Digest{} || server_secret_ == Digest{} || SSL_has_pending(ssl_.get()))
    return fail("OpenSSL has completed the TLS handshake without the secrets of its traffic");
  cipher_ = SSL_get_cipher_name(ssl_.get());
  const auto cipher = cipher_ == aes ? TlsRecords::Cipher::aes : TlsRecords::Cipher::chacha;
  encrypt_.emplace(cipher, true, is_client_ ? client_secret_ : server_secret_);
  decrypt_.emplace(cipher, false, is_client_ ? server_secret_ : client_secret_);
  for (Digest* secret : {&client_secret_, &server_secret_}) OPENSSL_cleanse(secret->data(), secret->size());
  ssl_.reset();
  return status_ = Status::open;
}

/// "LABEL random secret", in hexadecimal digits.
void Tls::keep_secret(const char* line) {
  const std::string_view text = line;
  Digest* const secret = text.starts_with("CLIENT_TRAFFIC_SECRET_0 ")   ? &client_secret_
                         : text.starts_with("SERVER_TRAFFIC_SECRET_0 ") ? &server_secret_
                                                                        : nullptr;
  const std::size_t digits = 2 * std::tuple_size_v<Digest>;
  if (!secret || text.size() < digits) return;
  const auto value = [](char c) { return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10; };
  const char* digit = line + text.size() - digits;
  for (std::uint8_t& byte : *secret) {
    byte = static_cast<std::uint8_t>(value(digit[0]) << 4 | value(digit[1]));
    digit += 2;
  }
}

// ---- sending

void Tls::Buffer::reserve(std::size_t size, std::size_t at_least) {
  if (capacity - end >= size) return;
  const std::size_t used = end - begin;
  if (capacity - used < size) {
    const std::size_t grown = std::max(used + size, at_least);
    auto larger = std::make_unique_for_overwrite<std::uint8_t[]>(grown);
    std::copy_n(bytes.get() + begin, used, larger.get());
    bytes = std::move(larger), capacity = grown;
  } else {
    std::memmove(bytes.get(), bytes.get() + begin, used);
  }
  begin = 0, end = used;
}

bool Tls::flush() {
  while (out_.begin < out_.end) {
    const ssize_t n =
        ::send(socket_, out_.bytes.get() + out_.begin, out_.end - out_.begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    out_.begin += static_cast<std::size_t>(n);
  }
  out_.begin = out_.end = 0;
  return true;
}

bool Tls::write_record(RecordType type, Parts& from, std::size_t size) {
  out_.reserve(size + TlsRecords::overhead, size < copy_below ? 2 * copy_below : max_batch + max_wire_record);
  ERR_clear_error();
  if (!encrypt_->seal(type, from, size, out_.bytes.get() + out_.end)) {
    record_error("a record cannot be encrypted");
    return false;
  }
  out_.end += size + TlsRecords::overhead;
  return true;
}

bool Tls::write_short(RecordType type, std::initializer_list<std::uint8_t> bytes) {
  const iovec part{const_cast<std::uint8_t*>(bytes.begin()), bytes.size()};
  Parts from({&part, 1});
  return write_record(type, from, bytes.size());
}

std::ptrdiff_t Tls::send(std::span<const iovec> parts) {
  if (!flush()) return -1;
  Parts from(parts);
  const std::size_t total = from.left();
  // A short count means a full socket: callers then wait for it to have space.
  while (status_ == Status::open && from.left() && (out_.end < max_batch || flush())) {
    if (++records_ % records_a_key_ == 0) updates_key_ = true;
    if (updates_key_ && write_short(RecordType::handshake, {key_update, 0, 0, 1, 0})) {
      encrypt_->update_key();
      updates_key_ = false;
    }
    if (status_ == Status::open) write_record(RecordType::data, from, std::min(from.left(), max_record));
  }
  if (status_ != Status::open) {
    errno = EPIPE;
    return -1;
  }
  flush();  // what remains is unsent(); an error shows at the next call
  return static_cast<std::ptrdiff_t>(total - from.left());
}

// ---- receiving

/// One read of the socket; false if there was nothing.
bool Tls::fill() {
  const bool was_full = in_.end && in_.end == in_.capacity;
  if (in_.begin == in_.end) in_.begin = in_.end = 0;
  if (was_full && in_.capacity < read_ahead)
    in_.reserve(read_ahead - (in_.end - in_.begin), read_ahead);
  else
    in_.reserve(std::max(first_read_ahead, in_.capacity / 2), first_read_ahead);
  const std::size_t space = in_.capacity - in_.end;
  ssize_t n = 0;
  do {
    n = recv(socket_, in_.bytes.get() + in_.end, space, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  drained_ = n < static_cast<ssize_t>(space);
  if (n == 0) ended_ = true;
  if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) read_errno_ = errno;
  if (n > 0) in_.end += static_cast<std::size_t>(n);
  return n > 0;
}

bool Tls::has_record() const {
  if (in_.end - in_.begin < TlsRecords::header) return false;
  const std::size_t length = TlsRecords::length_of(in_.bytes.get() + in_.begin);
  return in_.end - in_.begin >= TlsRecords::header + length;  // of no record: open_record() refuses it
}

bool Tls::has_more() const {
  return !received_.empty() || has_record() || ended_ || read_errno_ || status_ != Status::open;
}

/// Decrypts the next record if all of it is there: into the caller's buffers if it has space.
bool Tls::open_record(Parts& into) {
  if (status_ != Status::open || !has_record()) return false;
  std::uint8_t* const record = in_.bytes.get() + in_.begin;
  const std::size_t length = TlsRecords::length_of(record);
  if (length == 0) {
    refuse_record(unexpected_message, "not a record");
    return false;
  }
  in_.begin += TlsRecords::header + length;
  const std::size_t size = length - TlsRecords::tag - 1;
  const bool directly = size >= copy_below && into.left() >= size;
  const iovec here{record + TlsRecords::header, size};
  Parts in_place({&here, 1});
  const RecordType type = decrypt_->open(record, directly ? into : in_place);
  if (type == RecordType::data) {
    if (!directly) received_ = {record + TlsRecords::header, size};
  } else if (type == RecordType::none) {
    refuse_record(bad_record_mac, "bad record mac");
  } else {
    process(type, directly ? std::span<const std::uint8_t>() : std::span(record + TlsRecords::header, size));
  }
  return status_ == Status::open;
}

/// A message to TLS itself.
void Tls::process(RecordType type, std::span<const std::uint8_t> message) {
  if (type == RecordType::alert && message.size() == 2) {
    const std::uint8_t alert = message[1];
    status_ = alert == close_notify ? Status::open : Status::failed;
    if (alert == close_notify)
      ended_ = true;
    else
      error_ = concat("a record is not what the other end has sent (the other end reports: ",
                      SSL_alert_desc_string_long(alert), ")", alert == internal_error ? "" : changed);
    return;
  }
  const bool is_update = type == RecordType::handshake && message.size() == 5 && message[0] == key_update &&
                         !message[1] && !message[2] && message[3] == 1 && message[4] <= 1;
  if (!is_update) return refuse_record(unexpected_message, "unexpected message");
  decrypt_->update_key();
  updates_key_ |= message[4] == 1;
}

void Tls::refuse_record(std::uint8_t alert, const char* why) {
  write_short(RecordType::alert, {fatal, alert});
  flush();
  status_ = Status::failed;
  error_ = concat("a record is not what the other end has sent (", why, ")", changed);
}

std::ptrdiff_t Tls::receive(std::span<const iovec> parts) {
  Parts into(parts);
  const std::size_t requested = into.left();
  drained_ = false;
  std::size_t got = 0;
  while (got < requested) {
    const std::size_t before = into.left();
    if (!received_.empty()) {
      const auto to = into.take(received_.size());
      std::copy_n(received_.data(), to.size(), to.data());
      received_ = received_.subspan(to.size());
    } else if (!open_record(into) &&
               (status_ != Status::open || drained_ || ended_ || read_errno_ || !fill())) {
      break;
    }
    if (status_ == Status::open) got += before - into.left();
  }
  if (got || !requested) return static_cast<std::ptrdiff_t>(got);
  if (status_ == Status::open && ended_) return 0;
  errno = status_ != Status::open ? EBADMSG : read_errno_ ? read_errno_ : EAGAIN;
  return -1;
}

}  // namespace rz::net
