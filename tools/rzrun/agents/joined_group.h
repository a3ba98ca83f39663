#pragma once
/// The ranks of a job that the user starts on each host, at its node 0.

#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/agents/host_links.h"
#include "tools/rzrun/ranks/rank_group.h"

namespace rz::rzrun {

/// What this host sends, or compares with what others send.
JoinRequest join_request_of(const JobSpec&);

/// The listeners of node 0, if this host is node 0; nothing if it is to join. It is if its --node-rank is 0,
/// or has none and the endpoint is an address of this host whose port is free. Errors name address and flag.
std::vector<UniqueFd> listen_as_node0(const Rendezvous&);

/// For --dry-run: which node this host would be, where it would listen or connect, and its ranks. Nothing is
/// opened; names are looked up only if they decide which node this host is.
std::string describe_node(const Hosts&);

/// Waits for hosts, starts the ranks of this one itself, and those of the others through their rzruns, which
/// print what their ranks print. A host that comes later waits for a restart, if there can be one, or is
/// refused.
class JoinedGroup : public Ranks {
 public:
  JoinedGroup(const JobSpec&, std::vector<UniqueFd> listeners, Console& out, Console& err);

  void start(const Job&, const std::function<bool()>& go_on) override;
  std::vector<RankEnd> advance() override;
  std::optional<StartFailure> start_failure() override { return links_.take_failure(); }
  std::optional<StopRequest> stop_request() override { return std::exchange(stop_, {}); }
  std::string why_no_restart() const override;
  int size() const override { return is_started_ ? job_.ranks : 0; }
  void end(int status, const std::string& line) override;

  void append_descriptors(std::vector<pollfd>&) const override;
  void forward_output() override { local_.forward_output(); }
  void finish_output() override;
  int wait_ms() const override { return listener_.wait_ms(); }
  std::vector<std::string> messages() override;
  std::vector<int> running() const override;
  bool any_process_alive() const override;
  std::size_t leftovers() const override { return local_.leftovers() + links_.leftovers(); }
  void signal_all(int signal) override;
  bool signal_handlers(int signal) override;
  void suspend() override { links_.suspend(); }

 private:
  void decide(HostLink&, const Frame&);
  void join(HostLink&);
  void fail_all(HostLink&, const std::string& why);
  void refuse(HostLink&, int status, const std::string& line);
  std::vector<JoinRequest> joined() const;
  void drop_lost();
  void wait_for_hosts();
  void start_ranks();
  void choose_numbers();

  const Hosts& hosts_of_job_;
  const Rendezvous& rendezvous_;
  const JoinRequest own_;
  RankGroup local_;
  HostLinks links_;
  AgentListener listener_;
  LastCall last_call_;
  bool is_waiting_ = false;  // the job waits for hosts
  bool is_started_ = false;  // its ranks have been started once
  bool has_warned_ = false;  // of a host that is refused
  Deadline join_until_, explain_at_;
  std::vector<const HostLink*> refused_;
  std::optional<StopRequest> stop_;
  Job job_;
  std::string reached_at_;    // the address of this host that another one has connected to
  std::string last_message_;  // of the end of the ranks
};

}  // namespace rz::rzrun
