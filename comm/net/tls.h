#pragma once
/// TLS 1.3 (RFC 8446) over a connected socket whose ends have proved to each other that they have one secret
/// (authentication.h). The key that both derive from it, and from the random numbers of their exchange, is
/// the external pre-shared key of TLS; X25519 makes traffic keys that nobody can compute from the secret
/// later. There are no certificates, tickets or names: an end that does not have the key completes no
/// handshake. The handshake is OpenSSL's; tls_records.h has the records after it.
///
/// docs/decisions/0044-tls.md has the reasons.

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/net/tls_records.h"

struct ssl_st;

namespace rz::net {

/// Not thread safe: one thread at a time calls a function. Nothing waits. Memory grows to about 300 KiB, with
/// long messages in both directions.
class Tls {
 public:
  enum class Status { pending, open, failed };
  static constexpr std::size_t max_record = TlsRecords::max_content;

  /// `socket`, borrowed, is connected and does not block. `records_a_key`: the number of records after which
  /// this end changes its key. Errc::system if OpenSSL fails.
  Tls(int socket, bool is_client, std::span<const std::uint8_t, 32> key,
      std::uint64_t records_a_key = default_records_a_key);
  Tls(const Tls&) = delete;
  ~Tls();

  /// Continues the handshake; call it first, and whenever the socket is readable.
  Status handshake();

  /// Encrypts and sends a part of these bytes, in records of up to 16 KiB. Returns the number of bytes taken,
  /// or -1 with errno: EAGAIN if the socket is full. Encrypted bytes that the socket has not accepted yet are
  /// unsent(); flush() continues.
  std::ptrdiff_t send(std::span<const iovec>);
  /// True if nothing is unsent; else errno has the reason.
  bool flush();
  std::size_t unsent() const { return out_.end - out_.begin; }
  /// Receives into these buffers, of which bytes beyond the result may change, too. Fewer bytes than
  /// requested: the socket is drained, unless has_more(). 0: the stream has ended. -1 with errno: EAGAIN if
  /// there is nothing; EBADMSG if bytes were changed on their way, or the other end reports that, with
  /// error().
  std::ptrdiff_t receive(std::span<const iovec>);
  /// receive() may return bytes, or the end, although the socket is not readable.
  bool has_more() const;
  /// Why TLS has failed; empty if it has not, and if the connection itself ended or failed.
  const std::string& error() const { return error_; }

  /// Of an open one, as OpenSSL names it.
  std::string cipher() const { return cipher_; }

  /// AES-GCM is safe for 2^24.5 records a key (RFC 8446, 5.5).
  static constexpr std::uint64_t default_records_a_key = 1 << 24;

 private:
  friend struct TlsCallbacks;
  struct Free {
    void operator()(ssl_st*) const;
  };

  /// Bytes from `begin` to `end`; memory grows by need.
  struct Buffer {
    std::unique_ptr<std::uint8_t[]> bytes;
    std::size_t capacity = 0, begin = 0, end = 0;
    /// Makes space for so many bytes at the end; what is there moves to the front.
    void reserve(std::size_t size, std::size_t at_least);
  };

  bool send_handshake();
  Status finish_handshake();
  void keep_secret(const char* line);
  bool write_record(RecordType, Parts& from, std::size_t size);
  bool write_short(RecordType, std::initializer_list<std::uint8_t>);
  bool fill();
  bool has_record() const;
  bool open_record(Parts& into);
  void process(RecordType, std::span<const std::uint8_t>);
  /// This end cannot go on with these bytes.
  void refuse_record(std::uint8_t alert, const char* why);
  /// Why the last call of OpenSSL failed.
  void record_error(const char* what);

  const int socket_;
  const bool is_client_;
  std::uint8_t key_[32];
  std::uint64_t records_a_key_, records_ = 0;
  std::unique_ptr<ssl_st, Free> ssl_;         ///< until the handshake is complete
  Digest client_secret_{}, server_secret_{};  ///< of the traffic; until then, too
  std::optional<TlsRecords> encrypt_, decrypt_;
  std::string cipher_;
  Buffer out_;                        ///< encrypted
  Buffer in_;                         ///< encrypted
  std::span<std::uint8_t> received_;  ///< decrypted, in in_, before its begin
  int read_errno_ = 0;
  bool ended_ = false, drained_ = false, updates_key_ = false;
  Status status_ = Status::pending;
  std::string error_;
};

}  // namespace rz::net
