#include "comm/net/tls.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
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
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/net/openssl.h"

#ifndef TCP_ULP
#define TCP_ULP 31
#endif

namespace rz::net {

namespace {

constexpr const char* aes = "TLS_AES_128_GCM_SHA256";
constexpr const char* chacha = "TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char aes_id[2] = {0x13, 0x01};
constexpr unsigned char psk_identity[] = "ringzero";
/// One call encrypts records until this many bytes wait for the socket: they are in a near cache, and
/// the kernel gets few calls.
constexpr std::size_t max_batch = 64 << 10;
/// One read of the socket: several records.
constexpr std::size_t read_ahead = 80 << 10;

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

/// Of an open connection: whether the bytes of a record are the cause, not memory or OpenSSL itself.
bool is_of_a_record(unsigned long code) {
  if (const int alert = alert_of(code)) return alert != SSL_AD_INTERNAL_ERROR;
  return ERR_GET_LIB(code) == ERR_LIB_SSL && !ERR_COMMON_ERROR(code);
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
    if (BIO_get_ktls_send(bio)) return size;  // an alert, which the kernel would send in another way
    tls.out_.insert(tls.out_.end(), bytes, bytes + size);
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

  /// OpenSSL gives the kernel the keys by BIO_CTRL_SET_KTLS, after it has flushed what it sent before.
  static long control(BIO* bio, int command, long number, void* pointer) {
    if (command == BIO_CTRL_FLUSH) {  // of an open one, out_ keeps what the socket has no space for
      Tls& tls = of(bio);
      return tls.flush() || tls.status_ == Tls::Status::open ? 1 : 0;
    }
    return BIO_meth_get_ctrl(BIO_s_socket())(bio, command, number, pointer);
  }

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
  SSL_CTX_set_mode(c, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_default_read_buffer_len(c, read_ahead);
  // A server has no certificate, and a client accepts none. finish_handshake() requires the key besides.
  if (is_client) SSL_CTX_set_verify(c, SSL_VERIFY_PEER, nullptr);
  if (is_client)
    SSL_CTX_set_psk_use_session_callback(c, TlsCallbacks::client_session);
  else
    SSL_CTX_set_psk_find_session_callback(c, TlsCallbacks::server_session);
  return made;
}

TlsSettings make_tls_settings() {
  OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  TlsSettings s;
  s.client = make_settings(true);
  s.server = make_settings(false);
  s.socket.reset(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_DESCRIPTOR | BIO_TYPE_SOURCE_SINK, "ringzero"));
  BIO_METHOD* const m = s.socket.get();
  if (!m || !BIO_meth_set_write(m, TlsCallbacks::write) || !BIO_meth_set_read(m, TlsCallbacks::read) ||
      !BIO_meth_set_ctrl(m, TlsCallbacks::control) ||
      !BIO_meth_set_create(m, BIO_meth_get_create(BIO_s_socket())) ||
      !BIO_meth_set_destroy(m, BIO_meth_get_destroy(BIO_s_socket())))
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
  BIO_set_fd(bio, socket, BIO_NOCLOSE);
  BIO_set_app_data(bio, this);
  SSL_set_app_data(ssl_.get(), this);
  SSL_set_bio(ssl_.get(), bio, bio);
  if (enable_kernel_tls(socket)) SSL_set_options(ssl_.get(), SSL_OP_ENABLE_KTLS);
  if (is_client)
    SSL_set_connect_state(ssl_.get());
  else
    SSL_set_accept_state(ssl_.get());
}

Tls::~Tls() { OPENSSL_cleanse(key_, sizeof key_); }

/// Without the kernel's module the socket stays as it was.
bool Tls::enable_kernel_tls(int socket) {
#ifdef OPENSSL_NO_KTLS
  static_cast<void>(socket);
  return false;
#else
  return setsockopt(socket, IPPROTO_TCP, TCP_ULP, "tls", sizeof "tls") == 0;
#endif
}

std::string Tls::cipher() const { return SSL_get_cipher_name(ssl_.get()); }

void Tls::record_error(const char* what) {
  const bool was_open = status_ == Status::open;
  status_ = Status::failed;
  if (!error_.empty()) return;
  const unsigned long code = ERR_peek_error();
  const char* const text = ERR_reason_error_string(code);
  error_ =
      concat(what, alert_of(code) ? " (the other end reports: " : " (", text ? text : "no reason", ")",
             was_open && is_of_a_record(code) ? "; something between the hosts changes what they send" : "");
}

// ---- handshake

Tls::Status Tls::handshake() {
  if (status_ != Status::pending) return status_;
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_.get());
  const bool wants = done != 1 && SSL_get_error(ssl_.get(), done) == SSL_ERROR_WANT_READ;
  if (!flush() && done == 1) ended_ = true;  // a new socket has space
  if (done == 1 && !ended_) return finish_handshake();
  if (wants) return status_;
  if (!ended_ && !read_errno_) record_error("the TLS handshake failed");
  return status_ = Status::failed;
}

Tls::Status Tls::finish_handshake() {
  OPENSSL_cleanse(key_, sizeof key_);
  if (!SSL_session_reused(ssl_.get())) {
    error_ = "the TLS handshake was completed without the key of this job";
    return status_ = Status::failed;
  }
  kernel_sends_ = BIO_get_ktls_send(SSL_get_wbio(ssl_.get()));
  kernel_receives_ = BIO_get_ktls_recv(SSL_get_rbio(ssl_.get()));
  // From here on. Before, bytes of the application would have been read, and the kernel could not take over.
  SSL_set_read_ahead(ssl_.get(), 1);
  return status_ = Status::open;
}

// ---- bytes

bool Tls::flush() {
  while (out_sent_ < out_.size()) {
    const ssize_t n =
        ::send(socket_, out_.data() + out_sent_, out_.size() - out_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    out_sent_ += static_cast<std::size_t>(n);
  }
  out_.clear();
  out_sent_ = 0;
  return true;
}

bool Tls::write_record(const void* bytes, std::size_t size) {
  if (++records_ % records_a_key_ == 0) SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
  std::size_t written = 0;
  ERR_clear_error();
  if (SSL_write_ex(ssl_.get(), bytes, size, &written) == 1 && written == size) return true;
  record_error("a record cannot be encrypted");
  return false;
}

std::ptrdiff_t Tls::send(std::span<const iovec> parts) {
  if (!flush()) return -1;
  if (status_ != Status::open) {
    errno = EPIPE;
    return -1;
  }
  std::size_t total = 0, taken = 0, at = 0;  // `at`: in the first part
  for (const iovec& part : parts) total += part.iov_len;
  // A short count means a full socket: callers then wait for it to have space.
  while (taken < total && (out_.size() < max_batch || flush())) {
    const std::size_t size = std::min(total - taken, max_record);
    while (parts.front().iov_len == at) parts = parts.subspan(1), at = 0;
    std::array<std::byte, max_record> record;
    const std::byte* from = static_cast<const std::byte*>(parts.front().iov_base) + at;
    if (parts.front().iov_len - at >= size) {
      at += size;
    } else {  // a header and the start of its payload
      for (std::size_t filled = 0; filled < size;) {
        if (parts.front().iov_len == at) parts = parts.subspan(1), at = 0;
        const std::size_t n = std::min(size - filled, parts.front().iov_len - at);
        std::memcpy(record.data() + filled, static_cast<const std::byte*>(parts.front().iov_base) + at, n);
        filled += n, at += n;
      }
      from = record.data();
    }
    if (!write_record(from, size)) {
      errno = EPIPE;
      return -1;
    }
    taken += size;
  }
  flush();  // what remains is unsent(); an error shows at the next call
  return static_cast<std::ptrdiff_t>(taken);
}

std::ptrdiff_t Tls::receive(std::span<const iovec> parts) {
  std::size_t got = 0;
  has_more_ = true;
  ERR_clear_error();
  for (const iovec& part : parts)
    for (std::size_t done = 0; done < part.iov_len;) {
      std::size_t n = 0;
      if (status_ == Status::open && !ended_ && !read_errno_ &&
          SSL_read_ex(ssl_.get(), static_cast<std::byte*>(part.iov_base) + done, part.iov_len - done, &n)) {
        done += n, got += n;
        continue;
      }
      const bool wants = status_ == Status::open && !ended_ && !read_errno_ &&
                         SSL_get_error(ssl_.get(), 0) == SSL_ERROR_WANT_READ;
      if (wants) has_more_ = false;
      if (!wants && status_ == Status::open && !ended_ && !read_errno_) {
        if (SSL_get_error(ssl_.get(), 0) == SSL_ERROR_ZERO_RETURN)
          ended_ = true;
        else
          record_error("a record is not what the other end has sent");
        flush();  // the alert
      }
      if (got) return static_cast<std::ptrdiff_t>(got);
      if (!wants && ended_ && error_.empty()) return 0;
      errno = wants ? EAGAIN : read_errno_ ? read_errno_ : EBADMSG;
      return -1;
    }
  return static_cast<std::ptrdiff_t>(got);
}

}  // namespace rz::net
