#pragma once
/// Agents over TCP: rzrun listens, agents connect, and both prove the secret (docs/security.md) before a
/// frame is read. Frames are encrypted where connections between ranks are (RZ_ENCRYPTION).

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/authentication.h"
#include "comm/net/socket.h"
#include "comm/net/strangers.h"
#include "tools/rzrun/agents/frames.h"

namespace rz::rzrun {

using SharedSecret = std::shared_ptr<const net::Secret>;  ///< null: none is needed

/// What the two ends must have in common.
struct AgentAccess {
  SharedSecret secret;
  net::Encryption encryption = net::Encryption::off;  ///< off if there is no secret
};
/// With this secret, and the choice of RZ_ENCRYPTION.
AgentAccess access_by(SharedSecret);
/// With process_secret().
AgentAccess process_access();

/// The end of rzrun. Before an agent has proved the secret, 96 bytes of it are read, and nothing of it is
/// parsed. Those that prove nothing within 10 s are dropped and counted, as are those beyond 64
/// (net::choose_dropped()). They are accepted at a limited rate (net::AcceptRate).
class AgentListener {
 public:
  static constexpr std::size_t max_unproven = 64;
  static constexpr std::chrono::seconds time_to_prove{10};

  AgentListener(std::vector<UniqueFd> listeners, const AgentAccess&);

  struct Connection {
    FrameStream stream;
    std::string address;     ///< of the agent
    std::string reached_at;  ///< the address of this host that it has connected to
  };
  /// Accepts, reads and writes what can be done without waiting. Returns the agents that have proved the
  /// secret since. Call it after wait_ms() at the latest. `per_second`: connections that prove nothing.
  std::vector<Connection> advance(double per_second = net::AcceptRate::while_running);
  int wait_ms() const { return rests_ ? rests_->poll_ms(1000) : 1000; }
  /// Appends the descriptors that become ready when advance() has something to do.
  void append_descriptors(std::vector<pollfd>&) const;
  /// Agents and strangers that have proved nothing yet.
  std::size_t unproven() const { return unproven_.size(); }
  /// "10.0.0.1:29400, [fd00::1]:29400"
  std::string places() const;
  const net::Strangers& strangers() const { return strangers_; }

 private:
  struct Stranger {
    UniqueFd socket;
    net::Authentication authentication;
    net::SocketAddress from;
    Deadline until;
  };

  bool read(Stranger&, std::vector<Connection>& proven);
  void drop(std::list<Stranger>::iterator);
  void accept(int listener, std::vector<Connection>& proven);
  void drop_one(std::vector<Connection>& proven);

  std::vector<UniqueFd> listeners_;
  net::AuthenticationKey key_;
  net::Encryption encryption_;
  std::list<Stranger> unproven_;
  net::Strangers strangers_;
  net::AcceptRate accept_rate_{2 * max_unproven};
  std::optional<Deadline> rests_;  ///< do not accept until then
};

/// Connects to the rzrun that listens there, or will. Tries until the deadline; `waits` gets the reason
/// before each new try. Errc::rendezvous has the last reason. A listener with another secret is tried for 2 s
/// only, and one with another choice of encryption once: Errc::mismatch.
FrameStream connect_to_rzrun(const net::HostPort&, const AgentAccess&, Deadline,
                             const std::function<void(const std::string& why)>& waits);

}  // namespace rz::rzrun
