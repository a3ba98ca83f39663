#pragma once
/// `rzrun --agent`: runs the ranks of one host for another rzrun.

#include <chrono>
#include <optional>
#include <string>

#include "comm/core/deadline.h"
#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/flags/starters.h"
#include "tools/rzrun/ranks/keeper.h"
#include "tools/rzrun/ranks/output.h"
#include "tools/rzrun/ranks/rank_group.h"

namespace rz::rzrun {

/// Reads frames from the standard input and writes frames to the standard output, as frames.h has them; with
/// RZ_AGENT=HOST:PORT[,HOST:PORT…] over a connection to the rzrun there (agent_sockets.h). At the end of its
/// input, after 10 s without a frame, or at SIGTERM, it ends the ranks: SIGTERM, and after the grace period
/// of the job SIGKILL. Returns the exit status of the agent. Call it once, from a single-threaded process.
int run_agent();

/// What differs between the agents: where the output of the ranks goes, and what a signal and the end of the
/// connection mean.
class AgentRole {
 public:
  virtual ~AgentRole() = default;
  /// The job of a frame.
  virtual Job job_of(const std::string& payload) = 0;
  /// A frame that Agent has no use for.
  virtual void handle(const Frame&) = 0;
  virtual void handle_signal(int signal) = 0;
  /// The connection has ended, for this reason; once. No reason: the keeper was killed.
  virtual void lose(const std::string& why) = 0;
  /// Forwards the output of the ranks; `all`: no process of theirs is left.
  virtual void forward_output(bool all) = 0;
  virtual void append_descriptors(std::vector<pollfd>&) const = 0;
  virtual void print(const std::string& line) = 0;
};

/// A port that is free now, or 0 and why there is none: only the first host needs one.
void write_free_port(WireWriter&);

/// The ranks of one host, as rzrun at the other end of the frames requests.
class Agent {
 public:
  /// `out` and `err`: for the output of the ranks. They and the role outlive the agent.
  Agent(AgentRole&, FrameStream, Console& out, Console& err);
  /// Until the end: of the connection, at a signal, or by a frame.
  void run();

  FrameStream& stream() { return stream_; }
  RankGroup& ranks() { return group_; }
  /// Stops this process, as Ctrl-Z does, with word to the other end.
  void suspend();
  /// A job has been started, and some process of it is left.
  bool is_active() const { return is_active_; }
  bool has_devices_of_slurm() const { return devices_.has_value(); }
  /// A line if this process was itself stopped for too long; else empty.
  std::string own_stop() const { return own_stop_.text(); }
  /// Ends the ranks, and then the agent.
  void end();
  /// Kills the ranks at once.
  void kill() { is_killing_ = true; }
  /// Waits until output can be written, or a signal has come, which is true.
  bool wait_for_output(const std::vector<pollfd>& outputs) const;

 private:
  void wait(int timeout_ms);
  void handle(const Frame&);
  void turn();
  int timeout_ms() const;
  void handle_signals();
  void lose_keeper();
  void start(const std::string& payload);
  void watch_ranks();

  AgentRole& role_;
  UniqueFd signals_ = block_signals();
  FrameStream stream_;
  RankGroup group_;
  OwnStop own_stop_;
  Silence silence_;
  Deadline next_beat_ = Deadline::after(Silence::beat_time);
  bool ending_ = false;  // rzrun is gone, or requested the end of the agent
  bool is_active_ = false;
  bool is_killing_ = false, has_reported_left_ = false, is_lost_ = false;
  std::optional<Deadline> kill_at_;
  std::chrono::milliseconds grace_{};
  const GivenDevices devices_ = devices_of_slurm();
};

}  // namespace rz::rzrun
