#pragma once
/// rzrun's records of the hosts of a job: the connection to the agent of each, and what it has reported.

#include <functional>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/agents/join_request.h"
#include "tools/rzrun/hosts/connector.h"
#include "tools/rzrun/ranks/output.h"
#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

/// One host.
struct HostLink {
  std::string host;
  hosts::Connector connector{};  ///< without a process if the agent has connected by itself
  int node = 0, first_rank = 0, local_ranks = 0;
  std::vector<int> slots{};  ///< that a filter chose
  FrameStream stream;
  std::string banner{};  ///< what a shell printed before the agent began
  Console error_lines{};
  Forwarder errors{UniqueFd(), nullptr, UniqueFd(), ""};  ///< what the connector prints
  Silence silence{};
  std::chrono::seconds time_to_begin;  ///< for its first word
  Deadline ready_by = Deadline::after(time_to_begin);
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

/// All hosts that this process has an agent on, and the ranks there, with the verbs of Ranks.
class HostLinks {
 public:
  /// Takes frames of kind `hello`, `join` and `stop`: which hosts take part is its decision. An Error that it
  /// throws loses the host.
  using Decide = std::function<void(HostLink&, const Frame&)>;

  /// Output of the ranks goes to these consoles, which must outlive this object.
  HostLinks(Console& out, Console& err, Decide decide)
      : stdout_(out), stderr_(err), decide_(std::move(decide)) {}
  HostLinks(const HostLinks&) = delete;
  /// Ends the agents, which end what they run, and their connectors.
  ~HostLinks();

  std::list<HostLink> all;

  /// A host whose agent this command starts.
  HostLink& start(const std::string& host, const std::vector<std::string>& words);
  /// A host whose agent has connected, and must begin to send frames within this time.
  HostLink& add(FrameStream, const std::string& address, std::chrono::seconds time_to_begin);

  /// Another job begins. `waits`: until send_job(), or until it is signalled, it waits for agents.
  void begin_job(bool waits);
  bool is_waiting() const { return is_waiting_; }
  /// From then on the ranks of this agent run, until it reports that they have ended.
  void send_job(HostLink&, Job, const Variables&);
  void lose(HostLink&, const std::string& why);
  bool any_lost() const;

  void print(const std::string& line) { messages_.push_back(line); }
  void fail(const StartFailure& failure) { failure_ = failure; }
  bool has_failed() const { return failure_.has_value(); }

  /// Receives and sends what can be without waiting, and finds lost hosts.
  void advance();
  std::vector<RankEnd> take_ends();
  std::optional<StartFailure> take_failure() { return std::exchange(failure_, {}); }
  std::vector<std::string> take_messages() { return std::exchange(messages_, {}); }
  void append_descriptors(std::vector<pollfd>&) const;
  void accept_output();
  std::vector<int> running() const;
  bool any_process_alive() const;
  std::size_t leftovers() const;
  void signal_all(int signal);
  void signal_handlers(int signal);
  void suspend();

 private:
  void receive(HostLink&);
  void collect_lines(HostLink&);
  void handle(HostLink&, const Frame&);
  void watch(HostLink&);
  std::string why_ended(HostLink&);

  Console &stdout_, &stderr_;
  const Decide decide_;
  std::optional<StartFailure> failure_;
  std::vector<std::string> messages_;
  std::vector<RankEnd> ends_;
  bool is_waiting_ = false, is_killed_ = false;
  Deadline next_beat_ = Deadline::after({});
  OwnStop own_stop_;
};

}  // namespace rz::rzrun
