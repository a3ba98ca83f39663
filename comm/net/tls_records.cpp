#include "comm/net/tls_records.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "comm/core/lazy.h"

namespace rz::net {

namespace {

struct Ciphers {
  EVP_CIPHER *aes, *chacha;
};

const Ciphers& ciphers() {
  static constinit Lazy<Ciphers> fetched;
  return fetched.get([] {
    const Ciphers c{EVP_CIPHER_fetch(openssl_context(), "AES-128-GCM", nullptr),
                    EVP_CIPHER_fetch(openssl_context(), "ChaCha20-Poly1305", nullptr)};
    if (!c.aes || !c.chacha) fail_openssl("EVP_CIPHER_fetch");
    return c;
  });
}

/// HKDF-Expand-Label of RFC 8446, 7.1, without a context, of at most 32 bytes.
Digest expand_label(const Digest& secret, std::string_view label, std::size_t size) {
  std::array<std::uint8_t, 64> text{};
  std::size_t n = 0;
  const auto put = [&](std::uint8_t byte) { text[n++] = byte; };
  constexpr std::string_view prefix = "tls13 ";
  put(0), put(static_cast<std::uint8_t>(size));
  put(static_cast<std::uint8_t>(prefix.size() + label.size()));
  for (const std::string_view part : {prefix, label})
    for (const char c : part) put(static_cast<std::uint8_t>(c));
  put(0);
  put(1);  // the first and only block
  return hmac_sha256(secret, std::span(text).first(n));
}

}  // namespace

Parts::Parts(std::span<const iovec> parts) : parts_(parts) {
  for (const iovec& part : parts) left_ += part.iov_len;
}

std::span<std::uint8_t> Parts::take(std::size_t max) {
  while (parts_.front().iov_len == at_) parts_ = parts_.subspan(1), at_ = 0;
  const std::size_t size = std::min(max, parts_.front().iov_len - at_);
  std::uint8_t* const first = static_cast<std::uint8_t*>(parts_.front().iov_base) + at_;
  at_ += size, left_ -= size;
  return {first, size};
}

void TlsRecords::Free::operator()(evp_cipher_ctx_st* p) const { EVP_CIPHER_CTX_free(p); }

TlsRecords::TlsRecords(Cipher cipher, bool encrypts, const Digest& secret)
    : cipher_(cipher), encrypts_(encrypts), context_(EVP_CIPHER_CTX_new()), secret_(secret) {
  if (!context_) fail_openssl("EVP_CIPHER_CTX_new");
  set_key();
}

TlsRecords::~TlsRecords() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

void TlsRecords::set_key() {
  Digest key = expand_label(secret_, "key", cipher_ == Cipher::aes ? 16 : 32);
  const Digest iv = expand_label(secret_, "iv", sizeof iv_);
  std::copy_n(iv.begin(), sizeof iv_, iv_);
  number_ = 0;
  const EVP_CIPHER* const cipher = cipher_ == Cipher::aes ? ciphers().aes : ciphers().chacha;
  const bool is_set = EVP_CipherInit_ex2(context_.get(), cipher, key.data(), iv_, encrypts_, nullptr);
  OPENSSL_cleanse(key.data(), key.size());
  if (!is_set) fail_openssl("EVP_CipherInit");
}

void TlsRecords::update_key() {
  secret_ = expand_label(secret_, "traffic upd", secret_.size());
  set_key();
}

bool TlsRecords::start(const std::uint8_t* bytes) {
  std::uint8_t nonce[sizeof iv_];
  std::copy_n(iv_, sizeof iv_, nonce);
  for (std::size_t i = 0; i < 8; ++i)
    nonce[sizeof nonce - 1 - i] ^= static_cast<std::uint8_t>(number_ >> (8 * i));
  ++number_;
  int n = 0;
  return EVP_CipherInit_ex2(context_.get(), nullptr, nullptr, nonce, encrypts_, nullptr) &&
         EVP_CipherUpdate(context_.get(), nullptr, &n, bytes, static_cast<int>(header));
}

bool TlsRecords::seal(RecordType type, Parts& from, std::size_t size, std::uint8_t* to) {
  const std::size_t length = size + 1 + tag;
  const std::uint8_t head[header] = {static_cast<std::uint8_t>(RecordType::data), 3, 3,
                                     static_cast<std::uint8_t>(length >> 8),
                                     static_cast<std::uint8_t>(length)};
  std::copy_n(head, header, to);
  to += header;
  bool ok = start(head);
  int n = 0;
  const auto encrypt = [&](const std::uint8_t* bytes, std::size_t count) {
    ok = ok && EVP_CipherUpdate(context_.get(), to, &n, bytes, static_cast<int>(count));
    to += count;
  };
  for (std::size_t done = 0; done < size;) {
    const auto part = from.take(size - done);
    encrypt(part.data(), part.size());
    done += part.size();
  }
  const auto last = static_cast<std::uint8_t>(type);
  encrypt(&last, 1);
  return ok && EVP_CipherFinal_ex(context_.get(), to, &n) &&
         EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, tag, to);
}

std::size_t TlsRecords::length_of(const std::uint8_t* head) {
  const std::size_t length = static_cast<std::size_t>(head[3]) << 8 | head[4];
  const bool valid = head[0] == static_cast<std::uint8_t>(RecordType::data) && head[1] == 3 && head[2] == 3 &&
                     length > tag && length <= max_content + 1 + tag;
  return valid ? length : 0;
}

RecordType TlsRecords::open(std::uint8_t* record, Parts& into) {
  const std::uint8_t* from = record + header;
  const std::size_t size = length_of(record) - tag - 1;
  bool ok = start(record) &&
            EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, tag, record + header + size + 1);
  int n = 0;
  const auto decrypt = [&](std::uint8_t* to, std::size_t count) {
    ok = ok && EVP_CipherUpdate(context_.get(), to, &n, from, static_cast<int>(count));
    from += count;
  };
  for (std::size_t done = 0; done < size;) {
    const auto part = into.take(size - done);
    decrypt(part.data(), part.size());
    done += part.size();
  }
  std::uint8_t type = 0, none[tag];
  decrypt(&type, 1);
  ok = ok && EVP_CipherFinal_ex(context_.get(), none, &n);
  const auto found = static_cast<RecordType>(type);
  const bool known =
      found == RecordType::data || found == RecordType::alert || found == RecordType::handshake;
  return ok && known ? found : RecordType::none;
}

}  // namespace rz::net
