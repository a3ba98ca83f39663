#pragma once
/// Where others connect that have to prove that they are of this job (authentication.h): the one way into the
/// store's server, the data links of a rank and the rzrun that has agents.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/authentication.h"
#include "comm/net/socket.h"
#include "comm/net/strangers.h"
#include "comm/os/fd.h"

namespace rz::net {

/// What a door expects of those that come.
struct Expected {
  AuthenticationKey key;
  std::uint32_t rank = 0;   ///< of this end; a hello for another one is refused
  std::uint64_t group = 0;  ///< fingerprint()
  Encryption encryption = Encryption::off;
  std::size_t members = 0;  ///< connections that they may open at once, from one host or from many
  std::chrono::milliseconds time_to_prove{};
  /// For one that names the group, or has proved the secret, in place of time_to_prove.
  std::optional<Deadline> members_until = {};
  std::span<const int> passed_fds = {};  ///< see Authentication
  /// Is called for each connection that is dropped; must not throw.
  std::function<void(const Authentication&)> on_refusal = nullptr;
};

/// Accepts connections and reads their proofs, without ever waiting. Of a connection without a proof 96 bytes
/// are read, and nothing is parsed; it is dropped, and counted, when its time is over, or when there are too
/// many (choose_dropped()), each after what it has sent is read. They are accepted at a limited rate
/// (AcceptRate). Without a free descriptor one of them is dropped; if there is none, the next ones wait in
/// the kernel's queue until there is. Nothing that comes makes it throw.
class Door {
 public:
  /// Connections without a proof that are kept, beyond those of the members.
  static constexpr std::size_t max_unproven = 64;

  explicit Door(Expected);
  /// A non-blocking listener, borrowed.
  void add(int listener);

  struct Arrival {
    UniqueFd socket;
    Authentication authentication;
    SocketAddress from;
    Deadline until;  ///< for its proof
    bool is_ready = false;
  };
  /// The connections that have proved the secret since. Call it when the descriptor is readable, and after
  /// poll_ms() at the latest. `per_second`: connections that prove nothing.
  std::list<Arrival> advance(double per_second) noexcept;
  int descriptor() const { return epoll_.get(); }
  int poll_ms(int max) const;

  const Expected& expected() const { return expected_; }
  /// From now on.
  void expect(std::size_t members) { expected_.members = members; }
  std::size_t unproven() const;
  const Strangers& strangers() const { return strangers_; }
  /// Why no connection can be accepted now: this process has no descriptor, or the kernel no memory. Empty if
  /// one can.
  std::string why_closed() const;
  /// For the end of a message about one that is missing: Strangers::text(), and why_closed().
  std::string text() const;

 private:
  using Arrivals = std::list<Arrival>;

  bool knows_group(const Authentication& end) const {
    return end.has_hello() && end.claim().group == expected_.group;
  }
  Arrivals::iterator attend(Arrivals::iterator, Arrivals& proven, bool must_leave = false) noexcept;
  void accept(int listener, Arrivals& proven);
  bool drop_one(Arrivals& proven);
  void watch(int fd, Arrival*);
  void rest(Deadline::Clock::duration);
  void listen(bool accepts);

  Expected expected_;
  UniqueFd epoll_;
  std::vector<int> listeners_;
  Arrivals unproven_;  // in the order of their arrival
  Strangers strangers_;
  AcceptRate accept_rate_;
  std::optional<Deadline> rests_;  // does not accept until then
  int exhausted_ = 0;              // the error of the last accept(), if it had no descriptor or memory
};

}  // namespace rz::net
