#pragma once
/// Encrypted records of TLS 1.3 (RFC 8446, sections 5.2 to 5.5 and 7.2): one direction of a connection whose
/// handshake OpenSSL has completed. The cipher is OpenSSL's, too; what is here is the order of its calls.
///
/// OpenSSL's own records copy each payload twice on its way out and once on its way in, and cost 0.3 us more
/// each. These are encrypted from where the payload is to where the socket takes it, and back.

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/net/openssl.h"

struct evp_cipher_ctx_st;

namespace rz::net {

/// The rest of a list of buffers.
class Parts {
 public:
  explicit Parts(std::span<const iovec>);
  /// In all buffers together.
  std::size_t left() const { return left_; }
  /// The next bytes, which are in one buffer: at most `most`, at least one.
  std::span<std::uint8_t> take(std::size_t max);

 private:
  std::span<const iovec> parts_;
  std::size_t at_ = 0;  ///< in the first one
  std::size_t left_ = 0;
};

enum class RecordType : std::uint8_t { none = 0, alert = 21, handshake = 22, data = 23 };

class TlsRecords {
 public:
  static constexpr std::size_t header = 5, tag = 16;
  static constexpr std::size_t overhead = header + 1 + tag;  ///< of a record, beyond its content
  static constexpr std::size_t max_content = 16 << 10;

  enum class Cipher { aes, chacha };
  /// `secret`: of the application's traffic in this direction. Errc::system if OpenSSL fails.
  TlsRecords(Cipher, bool encrypts, const Digest& secret);
  TlsRecords(const TlsRecords&) = delete;
  ~TlsRecords();

  /// Writes a record with the next `size` bytes of `from` to `to`, which has space for the overhead, too.
  /// False if OpenSSL fails.
  bool seal(RecordType, Parts& from, std::size_t size, std::uint8_t* to);

  /// The number of bytes after this header; 0 if no record has it.
  static std::size_t length_of(const std::uint8_t* header);
  /// Decrypts a whole record. Its content, length_of() - tag - 1 bytes, goes to `into`, which may be the
  /// record itself, after its header. `none`: it is not what the other end has sent, or is padded, which no
  /// end of this library does; the bytes in `into` are of no use.
  RecordType open(std::uint8_t* record, Parts& into);

  /// The next key, as both ends agree by a KeyUpdate.
  void update_key();

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st*) const;
  };

  void set_key();
  /// Starts a record: the nonce is the number of the record under this key, and its header is authenticated.
  bool start(const std::uint8_t* header);

  const Cipher cipher_;
  const bool encrypts_;
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
  Digest secret_;
  std::uint8_t iv_[12];
  std::uint64_t number_ = 0;
};

}  // namespace rz::net
