#pragma once
/// The ranks of several hosts, on each of which mpirun or srun starts an agent.

#include "tools/rzrun/agents/agent_group.h"
#include "tools/rzrun/agents/agent_sockets.h"

namespace rz::rzrun {

/// Whether a line of mpirun or srun, or of the ssh of mpirun, blames the host: "ssh: connect to host n1 port
/// 22: …", "user@n1: Permission denied (publickey).", "Node: n1", "error: … on node n1: …". Hosts between
/// which there is no route ("target node: n1") are not to blame.
bool blames(std::string_view line, const std::string& host);

/// Starts the launcher once, and listens for its agents, which find addresses and secret in variables of
/// their own. A launcher that ends before the job has lost the hosts.
class LaunchedGroup : public AgentGroup {
 public:
  LaunchedGroup(const Options&, Console& out, Console& err);
  /// Ends the agents, and waits for the end of the launcher, which it kills after some seconds.
  ~LaunchedGroup() override;

  void start(const Job&, const std::function<bool()>& go_on) override;
  void append_descriptors(std::vector<pollfd>&) const override;
  std::vector<RankEnd> reap() override;
  int wait_ms() const override {
    return stopped_at_ ? stopped_at_->poll_ms(listener_->wait_ms()) : listener_->wait_ms();
  }
  int size() const override { return options_.ranks; }

 private:
  LaunchedGroup(const Options&, std::vector<UniqueFd> listeners, Variables of_agents, Console& out,
                Console& err);
  bool all_have_come() override;
  void stop(Agent&, int signal) override;
  void explain_stop();
  void greet(Agent&, const std::string& place) override;
  void take_lines();
  void watch_launcher();
  void lose_all(const std::string& why);
  std::vector<const hosts::Host*> missing() const;
  bool any_lost() const;

  const Options& options_;
  std::optional<AgentListener> listener_;
  std::string name_;  ///< of the launcher
  pid_t pid_ = -1;    ///< -1: it has ended
  UniqueFd pidfd_;
  Console lines_{};
  Forwarder out_, err_;
  Deadline come_by_, explain_at_;
  std::set<std::string> blamed_{};  ///< hosts, by its lines
  std::optional<ExitStatus> ended_{};
  bool has_complained_ = false;           ///< it has printed a line since all agents came
  int stopped_by_ = 0;                    ///< a signal that has ended an agent
  std::optional<Deadline> stopped_at_{};  ///< until then the others get it too, if they are to
  std::optional<Deadline> lost_at_{};     ///< once it has ended: the agents have so long to end first
};

}  // namespace rz::rzrun
