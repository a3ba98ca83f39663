#pragma once
/// The ranks of several hosts: an agent on each, which this rzrun starts through ssh.

#include <list>
#include <set>

#include "comm/core/deadline.h"
#include "tools/rzrun/frames.h"
#include "tools/rzrun/output.h"
#include "tools/rzrun/ranks.h"

namespace rz::rzrun {

/// The words that start the agent of a host: through ssh or the command of --rsh, or without on this host.
std::vector<std::string> agent_command(const Options&, const std::string& host);

/// Variables that ranks on other hosts get from this process: all but those of a login, of a session and of
/// one machine, such as HOME and TMPDIR.
Variables forwarded_environment();

/// True for "localhost" and the name of this host.
bool is_this_host(const std::string& name);

class AgentGroup : public Ranks {
 public:
  /// Starts the agents. Output goes to these consoles, which must outlive the group.
  AgentGroup(const Options&, Console& out, Console& err);
  /// Ends the agents, which end what they run.
  ~AgentGroup() override;

  void start(const Job&, const std::function<bool()>& go_on) override;
  std::optional<StartFailure> start_failure() override { return std::exchange(failure_, {}); }
  void append_descriptors(std::vector<pollfd>&) const override;
  int wait_ms() const override { return 1000; }
  void forward_output() override;
  std::vector<std::string> messages() override { return std::exchange(messages_, {}); }
  std::vector<RankEnd> reap() override;
  std::vector<int> running() const override;
  bool any_process_alive() const override;
  std::size_t leftovers() const override;
  void signal_all(int signal) override;
  bool signal_handlers(int signal) override;

 private:
  /// One host, its agent, and the process that connects to it.
  struct Agent {
    std::string host, connector;  ///< connector: "ssh", for messages
    int node, first_rank, local_ranks;
    std::vector<int> devices;
    pid_t pid;
    UniqueFd pidfd;
    FrameStream stream;
    std::string banner{};  ///< what a shell printed before the agent began
    Console error_lines{};
    Forwarder errors;  ///< what the connecting process prints
    Silence silence{};
    Deadline ready_by;
    std::optional<Deadline> lost_at{};  ///< its connection has ended, the reason is awaited
    bool is_ready = false, is_idle = true;
    std::string lost{};  ///< not empty: why
    std::set<int> running{};
    std::size_t left = 0, not_accepted = 0;
    std::vector<std::string> addresses{};
    int free_port = 0;
  };

  void start_agent(const Options&, int node, int first_rank);
  void send_jobs();
  void receive(Agent&);
  void collect_lines(Agent&);
  void handle(Agent&, const Frame&);
  void watch(Agent&);
  void lose(Agent&, const std::string& why);
  std::string why_ended(Agent&);

  Console &stdout_, &stderr_;
  std::list<Agent> agents_;
  Job job_;
  bool is_pending_ = false;  // the job waits for agents
  bool is_killed_ = false;
  std::optional<StartFailure> failure_;
  std::vector<std::string> messages_;
  std::vector<RankEnd> ends_;
  Deadline next_beat_ = Deadline::after({});
};

}  // namespace rz::rzrun
