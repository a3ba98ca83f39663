#pragma once
/// Agents over TCP: rzrun listens, agents connect, and both prove the secret (docs/security.md) before a
/// frame is read. Frames are encrypted where connections between ranks are (RZ_ENCRYPTION).

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/authentication.h"
#include "comm/net/door.h"
#include "comm/net/socket.h"
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

/// The end of rzrun, a net::Door. Agents have 10 s to prove the secret.
class AgentListener {
 public:
  /// Agents that connect at once from one address: containers, or hosts behind one router.
  static constexpr std::size_t max_of_a_host = 8, max_unproven = net::Door::max_unproven + max_of_a_host;
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
  int wait_ms() const { return door_.poll_ms(1000); }
  /// Appends what becomes readable when advance() has something to do.
  void append_descriptors(std::vector<pollfd>& wait) const {
    wait.push_back({door_.descriptor(), POLLIN, 0});
  }
  /// Agents and strangers that have proved nothing yet.
  std::size_t unproven() const { return door_.unproven(); }
  /// "10.0.0.1:29400, [fd00::1]:29400"
  std::string places() const;
  const net::Strangers& strangers() const { return door_.strangers(); }
  std::string text() const { return door_.text(); }

 private:
  std::vector<UniqueFd> listeners_;
  net::Door door_;
};

/// Connects to the rzrun that listens there, or will. Tries until the deadline; `waits` gets the reason
/// before each new try. Errc::rendezvous has the last reason. A listener with another secret is tried for 2 s
/// only, and one with another choice of encryption once: Errc::mismatch.
FrameStream connect_to_rzrun(const net::HostPort&, const AgentAccess&, Deadline,
                             const std::function<void(const std::string& why)>& waits);

}  // namespace rz::rzrun
