#pragma once
/// Mutual authentication of the two ends of a new connection by a secret that both have. Neither end sends
/// the secret; each proves that it has it by HMAC-SHA256 over random numbers of both, so a recorded exchange
/// is of no use later:
///
///     client, hello: magic 8, version 1, purpose 1, index 1, TLS 1, size 4, rank 4, peer 4, group 8,
///                    nonce 32
///     server, reply: group 8, TLS 1, nonce 23, HMAC(key, "server", hello, group, TLS, nonce) 32
///     client, proof: HMAC(key, "client", hello, reply) 32
///
/// The codes of the two directions differ, and a server refuses a hello that names another rank than its own,
/// so no message of one end serves the other or a third one.
///
/// Both codes cover what each end requires of TLS, so nobody between them can change it. If one requires it,
/// TLS 1.3 follows the proof, with a key that both derive from theirs and from the two nonces: an end in the
/// middle that has relayed the exchange has no such key, and can only relay what it cannot read or change.
///
/// Without a secret, an end of this host must also be a process of this user; the ends of a Unix socket
/// always. The kernel names that user, not the other end.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/tls.h"
#include "comm/os/fd.h"

namespace rz::net {

/// 32 bytes that the processes of a job share and others do not have. Its memory is erased at its end.
class Secret {
 public:
  static constexpr std::size_t size = 32;

  static Secret random();
  /// Of a text of at least `min_text` characters; equal texts give equal secrets. Errc::config if it is
  /// shorter.
  static Secret of_text(std::string_view);
  static constexpr std::size_t min_text = 32;
  explicit Secret(std::span<const std::uint8_t, size>);
  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret();

  std::span<const std::uint8_t, size> bytes() const { return bytes_; }

 private:
  Secret() = default;
  std::array<std::uint8_t, size> bytes_{};
};

/// RZ_INSECURE=1: the user lets every process in. Errc::config if it is neither 0 nor 1.
bool is_insecure();

enum class Purpose : std::uint8_t { store = 1, data = 2, agent = 3 };

/// The key of one purpose and context, derived from the secret by HKDF (RFC 5869). `context` is what the two
/// ends know besides the secret, such as the id of a group; without a secret (null) it is all that is proved.
/// Ends whose secret, purpose or context differ have different keys.
class AuthenticationKey {
 public:
  AuthenticationKey(const Secret*, Purpose, std::string_view context);
  AuthenticationKey(const AuthenticationKey&) = default;
  AuthenticationKey& operator=(const AuthenticationKey&) = default;
  ~AuthenticationKey();

  Purpose purpose() const { return purpose_; }
  std::span<const std::uint8_t, 32> bytes() const { return bytes_; }
  /// There is no secret, so the other end must be a process of this user if it is on this host.
  bool requires_user() const { return kernel_ != nullptr; }
  /// socket_to_kernel() (peer_user.h): open before strangers have taken all descriptors. Requires
  /// requires_user(). The copies of a key share it, and belong to one thread at a time.
  int kernel() const { return kernel_->get(); }

 private:
  Purpose purpose_;
  std::shared_ptr<const UniqueFd> kernel_;
  std::array<std::uint8_t, 32> bytes_{};
};

/// Which connections are encrypted; see RZ_ENCRYPTION. `on`: those that leave the host. Both ends must agree.
enum class Encryption : std::uint8_t { off, on, always };
/// Of "off", "on" or "always". Errc::config for another text.
Encryption parse_encryption(const std::string&);

/// Eight bytes of SHA-256 of a name, for the ends to find that they are of different groups. No secret.
std::uint64_t fingerprint(std::string_view name);

/// What a client connects for. Both proofs cover it.
struct Claim {
  std::uint32_t size = 0;  ///< ranks of the group
  std::uint32_t rank = 0;  ///< of the client
  std::uint32_t peer = 0;  ///< the server's rank; it refuses any other
  std::uint8_t index = 0;
  std::uint64_t group = 0;  ///< fingerprint()
};

/// One end's part, on a socket that may be non-blocking. Before the other end has proved that it has the key,
/// this object reads the bytes of the messages above, 64 at a time, and nothing more; it allocates no memory,
/// and OpenSSL's TLS has not begun.
class Authentication {
 public:
  enum class Status { pending, proven, refused };
  enum class Refusal {
    none,
    closed,            ///< the socket ended or failed; error() has the reason
    no_hello,          ///< another program, another version, or a hello for another purpose or rank
    other_group,       ///< no proof, and the other end is of another group
    other_secret,      ///< no proof, and the other end names the same group
    other_user,        ///< the other end names the same group, but may be a process of another user
    other_encryption,  ///< proven, but one end requires TLS, and the other forbids it
    tls,               ///< proven, but TLS could not be started
  };

  /// Where the connection is encrypted, bytes of the application travel in take_tls() alone.
  static Authentication client(const AuthenticationKey&, const Claim&, Encryption = Encryption::off);
  /// `rank`: that of the server. `group`: the client may name another; see Claim and claim().
  static Authentication server(const AuthenticationKey&, std::uint32_t rank, std::uint64_t group,
                               Encryption = Encryption::off);

  /// Sends or receives what comes next, without waiting. A client calls it once when it is connected, then,
  /// like a server, whenever the socket is readable.
  Status advance(int socket);
  /// Calls advance() until the end. Errc::rendezvous, or Errc::timeout, has the cause; the caller adds the
  /// address.
  void complete(int socket, Deadline);

  Status status() const { return status_; }
  /// The other end has proved that it has the key; TLS may follow.
  bool has_proof() const { return step_ == 2; }
  /// Of a proven end: null if the connection is not encrypted.
  std::unique_ptr<Tls> take_tls() { return std::move(tls_); }
  Refusal refusal() const { return refusal_; }
  int error() const { return error_; }
  static constexpr const char* remedy_of_other_user =
      "run all ranks as one user, or give all of them one RZ_SECRET and RZ_TRANSPORT=tcp";
  /// Why it was refused, as the end of a sentence about the other end.
  std::string reason() const;
  /// Of a server: what the hello names, proven once status() is. Before there is a hello: zeros.
  Claim claim() const;
  bool has_hello() const { return step_ > 0; }

  /// On Unix sockets: descriptors to pass with the reply or the proof (borrowed, at most 4), and those of the
  /// other end.
  std::span<const int> passed_fds;
  std::vector<UniqueFd> received_fds;

 private:
  /// What an end requires of TLS. `permitted`: what it requires of a connection that does not leave the host.
  enum class Demand : std::uint8_t { forbidden, permitted, required };
  struct Hello {
    char magic[8];
    std::uint8_t version, purpose, index;
    Demand tls;
    std::uint32_t size, rank, peer;
    std::uint64_t group;
    std::uint8_t nonce[32];
  };
  struct Reply {
    std::uint64_t group;
    Demand tls;
    std::uint8_t nonce[23], code[32];
  };
  using Proof = std::array<std::uint8_t, 32>;
  static_assert(sizeof(Hello) == 64 && sizeof(Reply) == 64);

  Authentication(const AuthenticationKey&, bool is_client, Encryption);
  std::span<std::byte> expected();
  Status process();
  Status process_hello();
  Status process_reply();
  Status process_proof();
  Status proven();
  Status advance_tls();
  Status refuse(Refusal, int error = 0);
  Demand demand_of(int socket) const;
  bool trusts_user(int socket) const;
  bool demands_conflict() const;
  Proof server_code() const;
  Proof client_code() const;
  Proof tls_key() const;
  bool send(int socket, const void* bytes, std::size_t size, bool with_fds);
  std::ptrdiff_t receive(int socket, std::span<std::byte> into);

  AuthenticationKey key_;
  bool is_client_;
  Encryption encryption_;
  std::uint32_t own_rank_ = 0;
  std::uint64_t group_ = 0;
  bool trusts_user_ = false;  ///< of a server, once there is a hello
  int step_ = 0;              ///< messages of this end that were sent
  std::size_t received_ = 0;
  Hello hello_{};
  Reply reply_{};
  Proof proof_{};
  Status status_ = Status::pending;
  Refusal refusal_ = Refusal::none;
  int error_ = 0;
  int socket_ = -1;
  std::unique_ptr<Tls> tls_;
};

}  // namespace rz::net
