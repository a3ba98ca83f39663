#pragma once
/// Mutual authentication of the two ends of a new connection by a secret that both have. Neither end sends
/// the secret; each proves that it has it by HMAC-SHA256 over random numbers of both, so a recorded exchange
/// is of no use later:
///
///     client: hello    magic 8, version 1, purpose 1, index 2, size 4, rank 4, peer 4, group 8, nonce 32
///     server: reply    group 8, nonce 24, HMAC(key, "server", hello, group, nonce) 32
///     client: proof    HMAC(key, "client", hello, reply) 32
///
/// The codes of the two directions differ, and a server refuses a hello that names another rank than its own,
/// so no message of one end serves the other or a third one. An end that relays all bytes unchanged is not
/// detected (docs/security.md).

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/deadline.h"
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

 private:
  Purpose purpose_;
  std::array<std::uint8_t, 32> bytes_{};
};

/// Eight bytes of SHA-256 of a name, for the ends to find that they are of different groups. No secret.
std::uint64_t fingerprint(std::string_view name);

/// What a client connects for. Both proofs cover it.
struct Claim {
  std::uint32_t size = 0;  ///< ranks of the group
  std::uint32_t rank = 0;  ///< of the client
  std::uint32_t peer = 0;  ///< the server's rank; it refuses any other
  std::uint16_t index = 0;
  std::uint64_t group = 0;  ///< fingerprint()
};

/// One end's part, on a socket that may be non-blocking. Before the other end has proved that it has the key,
/// this object reads the bytes of the messages above, 64 at a time, and nothing more; it allocates no memory.
class Authentication {
 public:
  enum class Status { pending, proven, refused };
  enum class Refusal {
    none,
    closed,        ///< the socket ended or failed; error() has the reason
    no_hello,      ///< another program, another version, or a hello for another purpose or rank
    other_group,   ///< no proof, and the other end is of another group
    other_secret,  ///< no proof, and the other end names the same group
  };

  static Authentication client(const AuthenticationKey&, const Claim&);
  /// `rank`: that of the server. `group`: the client may name another; see Claim and claim().
  static Authentication server(const AuthenticationKey&, std::uint32_t rank, std::uint64_t group);

  /// Sends or receives what comes next, without waiting. A client calls it once when it is connected, then,
  /// like a server, whenever the socket is readable.
  Status advance(int socket);
  /// Calls advance() until the end. Errc::rendezvous, or Errc::timeout, has the cause; the caller adds the
  /// address.
  void complete(int socket, Deadline);

  Status status() const { return status_; }
  Refusal refusal() const { return refusal_; }
  int error() const { return error_; }
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
  struct Hello {
    char magic[8];
    std::uint8_t version, purpose;
    std::uint16_t index;
    std::uint32_t size, rank, peer;
    std::uint64_t group;
    std::uint8_t nonce[32];
  };
  struct Reply {
    std::uint64_t group;
    std::uint8_t nonce[24], code[32];
  };
  using Proof = std::array<std::uint8_t, 32>;
  static_assert(sizeof(Hello) == 64 && sizeof(Reply) == 64);

  Authentication(const AuthenticationKey&, bool is_client);
  std::span<std::byte> expected();
  Status process();
  Status process_hello();
  Status process_reply();
  Status process_proof();
  Status refuse(Refusal, int error = 0);
  Proof server_code() const;
  Proof client_code() const;
  bool send(int socket, const void* bytes, std::size_t size, bool with_fds);
  std::ptrdiff_t receive(int socket, std::span<std::byte> into);

  AuthenticationKey key_;
  bool is_client_;
  std::uint32_t own_rank_ = 0;
  std::uint64_t group_ = 0;
  int step_ = 0;  ///< messages of this end that were sent
  std::size_t received_ = 0;
  Hello hello_{};
  Reply reply_{};
  Proof proof_{};
  Status status_ = Status::pending;
  Refusal refusal_ = Refusal::none;
  int error_ = 0;
  int socket_ = -1;
};

}  // namespace rz::net
