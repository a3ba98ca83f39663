#include "comm/net/openssl.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/params.h>

#include <memory>

#include "comm/core/error.h"
#include "comm/core/lazy.h"

namespace rz::net {

namespace {

struct Free {
  void operator()(OSSL_LIB_CTX* p) const { OSSL_LIB_CTX_free(p); }
  void operator()(EVP_MD* p) const { EVP_MD_free(p); }
  void operator()(EVP_MAC* p) const { EVP_MAC_free(p); }
  void operator()(EVP_MAC_CTX* p) const { EVP_MAC_CTX_free(p); }
};

/// Fetched once, as a search by name costs more than the code of a message.
struct Fetched {
  std::unique_ptr<OSSL_LIB_CTX, Free> library;
  std::unique_ptr<EVP_MD, Free> sha256;
  std::unique_ptr<EVP_MAC, Free> hmac;
};

Fetched fetch() {
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  Fetched f;
  f.library.reset(OSSL_LIB_CTX_new());
  if (!f.library) fail_openssl("OSSL_LIB_CTX_new");
  f.sha256.reset(EVP_MD_fetch(f.library.get(), "SHA256", nullptr));
  if (!f.sha256) fail_openssl("EVP_MD_fetch");
  f.hmac.reset(EVP_MAC_fetch(f.library.get(), "HMAC", nullptr));
  if (!f.hmac) fail_openssl("EVP_MAC_fetch");
  return f;
}

const Fetched& fetched() {
  static constinit Lazy<Fetched> made;
  return made.get(fetch);
}

}  // namespace

ossl_lib_ctx_st* openssl_context() { return fetched().library.get(); }

Digest sha256(std::span<const std::uint8_t> bytes) {
  Digest digest;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), nullptr, fetched().sha256.get(), nullptr) != 1)
    fail_openssl("EVP_Digest");
  return digest;
}

Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> text) {
  char name[] = "SHA256";
  const OSSL_PARAM hash[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, name, 0),
                             OSSL_PARAM_construct_end()};
  const std::unique_ptr<EVP_MAC_CTX, Free> mac(EVP_MAC_CTX_new(fetched().hmac.get()));
  Digest code;
  std::size_t size = 0;
  if (!mac || !EVP_MAC_init(mac.get(), key.data(), key.size(), hash) ||
      !EVP_MAC_update(mac.get(), text.data(), text.size()) ||
      !EVP_MAC_final(mac.get(), code.data(), &size, code.size()) || size != code.size())
    fail_openssl("HMAC-SHA256");
  return code;
}

void fail_openssl(const char* what) {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  fail(Errc::system, what, " of OpenSSL failed: ", reason ? reason : "no reason");
}

}  // namespace rz::net
