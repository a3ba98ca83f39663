#pragma once
/// The ranks of several hosts that rzrun starts: an agent on each.

#include "tools/rzrun/agents/agent_starter.h"
#include "tools/rzrun/agents/host_links.h"

namespace rz::rzrun {

/// Starts the agents, through ssh once a host, or by mpirun or srun for all, and their ranks.
class AgentGroup : public Ranks {
 public:
  /// Output goes to these consoles, which must outlive the group.
  AgentGroup(const JobSpec&, Console& out, Console& err);

  void start(const Job&, const std::function<bool()>& go_on) override;
  std::optional<StartFailure> start_failure() override { return links_.take_failure(); }
  std::optional<StopRequest> stop_request() override;
  std::string why_no_restart() const override { return links_.any_lost() ? "a host is gone" : ""; }
  int size() const override { return hosts_of_job_.ranks; }
  void append_descriptors(std::vector<pollfd>&) const override;
  int wait_ms() const override { return starter_ ? starter_->wait_ms() : 1000; }
  void forward_output() override { links_.accept_output(); }
  std::vector<std::string> messages() override { return links_.take_messages(); }
  std::vector<RankEnd> advance() override;
  std::vector<int> running() const override { return links_.running(); }
  bool any_process_alive() const override { return links_.any_process_alive(); }
  std::size_t leftovers() const override { return links_.leftovers(); }
  void signal_all(int signal) override { links_.signal_all(signal); }
  bool signal_handlers(int signal) override;
  void suspend() override { links_.suspend(); }

 private:
  void decide(HostLink&, const Frame&);
  void send_jobs();
  std::string master_address() const;

  const Hosts& hosts_of_job_;
  HostLinks links_;
  std::optional<AgentStarter> starter_;  // after the links that it ends; nothing: ssh starts the agents
  std::optional<StopRequest> stop_;
  Job job_;
};

}  // namespace rz::rzrun
