#pragma once
/// mpirun or srun, which starts an agent on each host.

#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/agents/host_links.h"

namespace rz::rzrun {

/// Whether a line of mpirun or srun, or of the ssh of mpirun, blames the host: "ssh: connect to host n1 port
/// 22: …", "user@n1: Permission denied (publickey).", "Node: n1", "error: … on node n1: …". Hosts between
/// which there is no route ("target node: n1") are not to blame.
bool blames(std::string_view line, const std::string& host);

/// Starts the starter once, and listens for its agents, which find addresses and secret in variables of
/// their own. A starter that ends before the job has lost the hosts.
class AgentStarter {
 public:
  /// Hosts whose agents have connected, and those that are lost, are in `links`, which must outlive this
  /// object.
  AgentStarter(const JobSpec&, HostLinks& links);
  /// Ends the agents, and waits for the end of the starter, which it kills after some seconds.
  ~AgentStarter();

  /// Does what can be done without waiting; then the links may advance.
  void advance();
  /// An agent has begun at this place (frames.h), which decides its host.
  void join(HostLink&, const std::string& place);
  /// True once no further agent is to join; the links are then in the order of the hosts.
  bool all_joined();
  /// An agent has got a signal to end, or SIGCONT, after which mpirun sends one.
  void stop(HostLink&, int signal);
  std::optional<StopRequest> stop_request() { return std::exchange(stop_, {}); }
  void append_descriptors(std::vector<pollfd>&) const;
  int wait_ms() const {
    const int longest = listener_ ? listener_->wait_ms() : 1000;
    return stopped_at_ ? stopped_at_->poll_ms(longest) : longest;
  }

 private:
  void explain_stop();
  void take_lines();
  void watch();
  void lose_all(const std::string& why);
  std::vector<const hosts::Host*> missing() const;

  const Hosts& hosts_of_job_;
  HostLinks& links_;
  std::optional<AgentListener> listener_;
  hosts::Connector starter_;
  Console lines_{};
  Forwarder out_, err_;
  Deadline join_by_, explain_at_;
  std::set<std::string> blamed_{};  ///< hosts, by its lines
  std::optional<ExitStatus> ended_{};
  bool has_complained_ = false;           ///< it has printed a line since all agents came
  int stopped_by_ = 0;                    ///< a signal that has ended an agent
  std::optional<Deadline> stopped_at_{};  ///< until then the others get it too, if they are to
  std::optional<Deadline> lost_at_{};     ///< once it has ended: the agents have so long to end first
  std::optional<StopRequest> stop_{};
};

}  // namespace rz::rzrun
