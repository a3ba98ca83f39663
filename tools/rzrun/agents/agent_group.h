#pragma once
/// The ranks of several hosts: an agent on each.

#include <list>
#include <set>

#include "comm/core/deadline.h"
#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/agents/join_request.h"
#include "tools/rzrun/ranks/output.h"
#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

/// Agents that this rzrun starts, or that have connected to it, and their ranks.
class AgentGroup : public Ranks {
 public:
  /// Starts the agents, through ssh. Output goes to these consoles, which must outlive the group.
  AgentGroup(const Hosts&, Console& out, Console& err);
  /// Ends the agents, which end what they run.
  ~AgentGroup() override;

  void start(const Job&, const std::function<bool()>& go_on) override;
  std::optional<StartFailure> start_failure() override { return std::exchange(failure_, {}); }
  void append_descriptors(std::vector<pollfd>&) const override;
  int wait_ms() const override { return 1000; }
  void forward_output() override;
  std::vector<std::string> messages() override { return std::exchange(messages_, {}); }
  std::vector<RankEnd> reap() override;
  std::optional<StopRequest> stop_request() override { return std::exchange(stop_, {}); }
  std::string why_no_restart() const override;
  int size() const override;
  std::vector<int> running() const override;
  bool any_process_alive() const override;
  std::size_t leftovers() const override;
  void signal_all(int signal) override;
  bool signal_handlers(int signal) override;
  void suspend() override;

 protected:
  /// One host, its agent, and the process that connects to it.
  struct HostLink {
    std::string host, connector;  ///< connector: "ssh", for messages
    int node = 0, first_rank = 0, local_ranks = 0;
    std::vector<int> slots{};  ///< that a filter chose
    pid_t pid = -1;            ///< of that process; -1: the agent has connected by itself
    UniqueFd pidfd{};
    FrameStream stream;
    std::string banner{};  ///< what a shell printed before the agent began
    Console error_lines{};
    Forwarder errors;  ///< what the connecting process prints
    Silence silence{};
    Deadline ready_by;
    std::optional<Deadline> lost_at{};  ///< its connection has ended, the reason is awaited
    bool is_ready = false, is_idle = true;
    bool is_warned = false;    ///< its starter has begun to end it
    bool is_stopping = false;  ///< by a signal of others it ends its ranks, which have not failed
    int leaves_by = 0;         ///< a signal, by which it leaves the job to others
    std::string lost{};        ///< not empty: why
    std::set<int> running{};
    std::size_t left = 0, not_accepted = 0;
    std::vector<std::string> addresses{};
    int free_port = 0;
    std::string why_no_port{};  ///< if there is none
    JoinRequest request{};
  };

  /// No agents yet.
  AgentGroup(const Hosts& hosts, Console& out, Console& err, std::nullptr_t)
      : job_hosts_(hosts), stdout_(out), stderr_(err) {}
  /// An agent that has connected; it must begin to send frames within this time.
  HostLink& add(FrameStream, const std::string& address, std::chrono::seconds time_to_begin);
  /// An agent has sent its frame `join`.
  virtual void join(HostLink&) {}
  /// An agent has sent its frame `hello`, with its place (frames.h).
  virtual void take_place(HostLink&, const std::string& place) { static_cast<void>(place); }
  /// An agent has got a signal to end, or SIGCONT, after which mpirun sends one.
  virtual void stop(HostLink&, int signal);
  /// True once no further agent is to come; agents_ are then in the order of the hosts.
  virtual bool all_have_joined() { return true; }
  void lose(HostLink&, const std::string& why);
  /// From then on the ranks of this agent run, until it reports that they have ended.
  void send_job(HostLink&, const Variables&);

  const Hosts& job_hosts_;
  Console &stdout_, &stderr_;
  std::list<HostLink> agents_;
  Job job_;
  std::optional<StartFailure> failure_;
  std::vector<std::string> messages_;
  std::optional<StopRequest> stop_;

 private:
  void start_agent(int node, int first_rank);
  void send_jobs();
  void receive(HostLink&);
  void collect_lines(HostLink&);
  void handle(HostLink&, const Frame&);
  void watch(HostLink&);
  std::string why_ended(HostLink&);

  bool is_pending_ = false;  // the job waits for agents
  bool is_killed_ = false;
  std::vector<RankEnd> ends_;
  Deadline next_beat_ = Deadline::after({});
  OwnStop own_stop_;
};

}  // namespace rz::rzrun
