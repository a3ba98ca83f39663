#include "comm/net/authentication.h"

#include <openssl/crypto.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/openssl.h"
#include "comm/net/peer_user.h"
#include "comm/net/socket.h"

namespace rz::net {

namespace {

constexpr char hello_magic[8] = {'r', 'i', 'n', 'g', 'z', 'e', 'r', 'o'};
constexpr std::uint8_t protocol_version = 3;
constexpr std::size_t max_passed_fds = 4;

void fill_random(std::span<std::uint8_t> bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) fail_errno("getrandom");
}

std::span<const std::uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

/// HMAC of a label and of messages, whose sizes are fixed.
template <class... Messages>
std::array<std::uint8_t, 32> code_of(std::span<const std::uint8_t, 32> key, const char (&label)[16],
                                     const Messages&... messages) {
  std::array<std::uint8_t, sizeof label + (sizeof(Messages) + ...)> text;
  std::size_t at = 0;
  const auto append = [&](const void* bytes, std::size_t size) {
    std::memcpy(text.data() + at, bytes, size);
    at += size;
  };
  append(label, sizeof label);
  (append(&messages, sizeof messages), ...);
  return hmac_sha256(key, text);
}

}  // namespace

// ---- secret and key

Secret Secret::random() {
  Secret secret;
  fill_random(secret.bytes_);
  return secret;
}

Secret Secret::of_text(std::string_view text) {
  require(text.size() >= min_text, Errc::config, "the secret has ", text.size(), " characters; at least ",
          min_text, " that nobody can guess are needed, as from: openssl rand -hex 32");
  Secret secret;
  secret.bytes_ = sha256(bytes_of(text));
  return secret;
}

Secret::Secret(std::span<const std::uint8_t, size> bytes) { std::ranges::copy(bytes, bytes_.begin()); }

Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

bool is_insecure() {
  const std::string value = environment_variable("RZ_INSECURE").value_or("");
  require(value.empty() || value == "0" || value == "1", Errc::config, "RZ_INSECURE='", value,
          "' is neither 0 nor 1");
  return value == "1";
}

AuthenticationKey::AuthenticationKey(const Secret* secret, Purpose purpose, std::string_view context)
    : purpose_(purpose) {
  if (!secret && !is_insecure()) kernel_ = std::make_shared<const UniqueFd>(socket_to_kernel());
  // Of fixed size, so that no two pairs of secret and context give the same text.
  std::array<std::uint8_t, 1 + Secret::size + std::tuple_size_v<Digest>> material{};
  if (secret) {
    material[0] = 1;
    std::ranges::copy(secret->bytes(), material.begin() + 1);
  }
  std::ranges::copy(sha256(bytes_of(context)), material.begin() + 1 + Secret::size);
  constexpr std::string_view salt = "ringzero authentication 2";
  auto extracted = hmac_sha256(bytes_of(salt), material);
  const std::array<std::uint8_t, 2> expand{static_cast<std::uint8_t>(purpose), 1};
  bytes_ = hmac_sha256(extracted, expand);
  OPENSSL_cleanse(material.data(), material.size());
  OPENSSL_cleanse(extracted.data(), extracted.size());
}

AuthenticationKey::~AuthenticationKey() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Encryption parse_encryption(const std::string& text) {
  if (text == "off") return Encryption::off;
  if (text == "on") return Encryption::on;
  require(text == "always", Errc::config, "RZ_ENCRYPTION='", text, "' is not one of on, off, always");
  return Encryption::always;
}

std::uint64_t fingerprint(std::string_view name) {
  const Digest digest = sha256(bytes_of(name));
  std::uint64_t first = 0;
  std::memcpy(&first, digest.data(), sizeof first);
  return first;
}

// ---- one end

Authentication::Authentication(const AuthenticationKey& key, bool is_client, Encryption encryption)
    : key_(key), is_client_(is_client), encryption_(encryption) {}

Authentication Authentication::client(const AuthenticationKey& key, const Claim& claim,
                                      Encryption encryption) {
  Authentication a(key, true, encryption);
  a.group_ = claim.group;
  std::ranges::copy(hello_magic, a.hello_.magic);
  a.hello_.version = protocol_version;
  a.hello_.purpose = static_cast<std::uint8_t>(key.purpose());
  a.hello_.index = claim.index;
  a.hello_.size = claim.size, a.hello_.rank = claim.rank, a.hello_.peer = claim.peer;
  a.hello_.group = claim.group;
  fill_random(a.hello_.nonce);
  return a;
}

Authentication Authentication::server(const AuthenticationKey& key, std::uint32_t rank, std::uint64_t group,
                                      Encryption encryption) {
  Authentication a(key, false, encryption);
  a.own_rank_ = rank;
  a.group_ = group;
  return a;
}

Claim Authentication::claim() const {
  return {hello_.size, hello_.rank, hello_.peer, hello_.index, hello_.group};
}

Authentication::Status Authentication::advance(int socket) {
  if (status_ != Status::pending) return status_;
  socket_ = socket;
  if (tls_) return advance_tls();
  if (step_ == 0 && is_unix_socket(socket) && !is_of_this_user(socket)) return refuse(Refusal::other_user);
  if (is_client_ && step_ == 0) {
    hello_.tls = demand_of(socket);
    if (!send(socket, &hello_, sizeof hello_, false)) return refuse(Refusal::closed, errno);
    step_ = 1;
    return status_;
  }
  const auto into = expected().subspan(received_);
  const std::ptrdiff_t n = receive(socket, into);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return status_;
  if (n <= 0) return refuse(Refusal::closed, n < 0 ? errno : 0);
  received_ += static_cast<std::size_t>(n);
  if (received_ < expected().size()) return status_;
  received_ = 0;
  return process();
}

/// Where the next message of the other end goes.
std::span<std::byte> Authentication::expected() {
  if (is_client_) return std::as_writable_bytes(std::span(&reply_, 1));
  return step_ == 0 ? std::as_writable_bytes(std::span(&hello_, 1))
                    : std::as_writable_bytes(std::span(proof_));
}

Authentication::Status Authentication::process() {
  if (is_client_) return process_reply();
  return step_ == 0 ? process_hello() : process_proof();
}

Authentication::Status Authentication::process_hello() {
  if (!std::ranges::equal(hello_.magic, hello_magic) || hello_.version != protocol_version ||
      hello_.purpose != static_cast<std::uint8_t>(key_.purpose()) || hello_.peer != own_rank_)
    return refuse(Refusal::no_hello);
  trusts_user_ = trusts_user(socket_);  // now, since an end that finds the user of this one does not stay
  reply_.group = group_;
  reply_.tls = demand_of(socket_);
  fill_random(reply_.nonce);
  std::ranges::copy(server_code(), reply_.code);
  if (!send(socket_, &reply_, sizeof reply_, true)) return refuse(Refusal::closed, errno);
  step_ = 1;
  return status_;
}

Authentication::Status Authentication::process_reply() {
  if (CRYPTO_memcmp(server_code().data(), reply_.code, sizeof reply_.code) != 0)
    return refuse(reply_.group == group_ ? Refusal::other_secret : Refusal::other_group);
  if (!trusts_user(socket_))
    return refuse(reply_.group == group_ ? Refusal::other_user : Refusal::other_group);
  proof_ = client_code();
  if (!send(socket_, proof_.data(), proof_.size(), true)) return refuse(Refusal::closed, errno);
  return proven();
}

Authentication::Status Authentication::process_proof() {
  if (CRYPTO_memcmp(client_code().data(), proof_.data(), proof_.size()) != 0)
    return refuse(hello_.group == group_ ? Refusal::other_secret : Refusal::other_group);
  if (!trusts_user_) return refuse(hello_.group == group_ ? Refusal::other_user : Refusal::other_group);
  return proven();
}

/// A client has sent its proof, so both ends know what the other one requires.
Authentication::Status Authentication::proven() {
  step_ = 2;
  if (demands_conflict()) return refuse(Refusal::other_encryption);
  if (hello_.tls != Demand::required && reply_.tls != Demand::required) return status_ = Status::proven;
  Proof key = tls_key();
  tls_ = std::make_unique<Tls>(socket_, is_client_, key);
  OPENSSL_cleanse(key.data(), key.size());
  return advance_tls();
}

Authentication::Status Authentication::advance_tls() {
  switch (tls_->handshake()) {
    case Tls::Status::pending:
      return status_;
    case Tls::Status::open:
      return status_ = Status::proven;
    case Tls::Status::failed:
      break;
  }
  return refuse(tls_->error().empty() ? Refusal::closed : Refusal::tls);
}

Authentication::Demand Authentication::demand_of(int socket) const {
  if (encryption_ == Encryption::off || is_unix_socket(socket)) return Demand::forbidden;
  return encryption_ == Encryption::always || leaves_host(socket) ? Demand::required : Demand::permitted;
}

/// Without a secret, ends of other hosts have the context of the key alone.
bool Authentication::trusts_user(int socket) const {
  return !key_.requires_user() || is_of_this_user(socket, key_.kernel()) || !is_of_this_host(socket);
}

bool Authentication::demands_conflict() const {
  const auto [weaker, stronger] = std::minmax(hello_.tls, reply_.tls);
  return weaker == Demand::forbidden && stronger == Demand::required;
}

Authentication::Status Authentication::refuse(Refusal why, int error) {
  refusal_ = why;
  error_ = error;
  received_fds.clear();
  // A client that finds no proof of the server ends the connection without one of its own.
  if (!is_client_ && step_ == 1 && why == Refusal::closed)
    refusal_ = hello_.group != group_ ? Refusal::other_group
               : trusts_user_         ? Refusal::other_secret
                                      : Refusal::other_user;
  return status_ = Status::refused;
}

Authentication::Proof Authentication::server_code() const {
  return code_of(key_.bytes(), "ringzero server", hello_, reply_.group, reply_.tls, reply_.nonce);
}

Authentication::Proof Authentication::client_code() const {
  return code_of(key_.bytes(), "ringzero client", hello_, reply_);
}

/// HKDF-Expand (RFC 5869) of the key, with the exchange as its context.
Authentication::Proof Authentication::tls_key() const {
  return code_of(key_.bytes(), "ringzero tls 13", hello_, reply_, std::uint8_t{1});
}

std::string Authentication::reason() const {
  switch (refusal_) {
    case Refusal::none:
      return "it is not complete";
    case Refusal::closed:
      if (tls_) return "it closed the connection during the TLS handshake";
      return error_ ? std::strerror(error_) : "it closed the connection";
    case Refusal::no_hello:
      return "it is another program, or another version of ringzero";
    case Refusal::other_group:
      return "it is another program, or that of a job with another secret";
    case Refusal::other_secret:
      return "it has another secret; copy ~/.config/ringzero/secret of one host to the others, or set one "
             "RZ_SECRET on all; RZ_SECRET_FILE and RZ_INSECURE, too, must be the same there";
    case Refusal::other_user:
      return concat("it is a process of another user; ", remedy_of_other_user);
    case Refusal::other_encryption:
      return (is_client_ ? reply_.tls : hello_.tls) == Demand::forbidden
                 ? "it has RZ_ENCRYPTION=off, and this process encrypts (RZ_ENCRYPTION=on); it must be the "
                   "same on all hosts"
                 : "it encrypts (RZ_ENCRYPTION=on), and this process has RZ_ENCRYPTION=off; it must be the "
                   "same on all hosts";
    case Refusal::tls:
      return tls_->error();
  }
  return "";
}

void Authentication::complete(int socket, Deadline deadline) {
  advance(socket);
  while (status_ == Status::pending) {
    require(!deadline.expired(), Errc::timeout, "it sends no reply");
    pollfd p{socket, POLLIN, 0};
    if (poll(&p, 1, deadline.poll_ms(1000)) > 0) advance(socket);
  }
  require(status_ == Status::proven, Errc::rendezvous, reason());
}

// ---- messages

/// A new socket has space for such a message, so a short write is a failure.
bool Authentication::send(int socket, const void* bytes, std::size_t size, bool with_fds) {
  iovec part{const_cast<void*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(max_passed_fds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  if (with_fds && !passed_fds.empty()) {
    const std::size_t fds = std::min(passed_fds.size(), max_passed_fds) * sizeof(int);
    message.msg_control = control, message.msg_controllen = CMSG_SPACE(fds);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(fds);
    std::memcpy(CMSG_DATA(header), passed_fds.data(), fds);
  }
  const ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0 && n != static_cast<ssize_t>(size)) errno = EMSGSIZE;
  return n == static_cast<ssize_t>(size);
}

std::ptrdiff_t Authentication::receive(int socket, std::span<std::byte> into) {
  iovec part{into.data(), into.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(max_passed_fds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (n <= 0) return n;
  for (auto* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
    if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
      for (std::size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
        received_fds.emplace_back(fd);
      }
  return n;
}

}  // namespace rz::net
