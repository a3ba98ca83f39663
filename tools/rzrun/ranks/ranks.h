#pragma once
/// The ranks of a job as the supervisor sees them: RankGroup has those of this host, AgentGroup those that
/// agents start on several, JoinedGroup those of several at each of which rzrun is started.

#include <poll.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/ranks/exit_status.h"
#include "tools/rzrun/ranks/launch.h"

namespace rz::rzrun {

/// The end of a rank, or the loss of a host with all its ranks.
struct RankEnd {
  int rank = 0;              ///< of a lost host: its first one
  ExitStatus status;         ///< of a lost host: exit code 255, as ssh's
  std::string host;          ///< empty if the job has one host
  bool memory_kill = false;  ///< the kernel's out-of-memory killer struck on its host meanwhile
  std::string lost;          ///< not empty: why the host is lost
  bool has_left = false;     ///< it went by itself, by the signal that `lost` names
  std::string error{};       ///< the message of its error file
  std::string activity{};    ///< what it was doing, if it gave no message (comm/transport/flight_report.h)
  std::string stack{};       ///< of a crash: one line a frame
  int culprit = -1;          ///< the rank that this message blames
  std::string call{};        ///< the collective that it was in: "all_reduce #204 (2 f32, sum) of 'world'"
  std::string group{};       ///< the communicator of that call, if it has all ranks of the job
  /// Of each communicator that has all ranks of the job, the number of the last collective.
  std::vector<std::pair<std::string, std::uint32_t>> last_calls{};
  int ranks = 1;   ///< of a lost host: how many it had
  char state = 0;  ///< of its processes (ranks/processes.h) when it was ended with the others; else 0

  bool is_of(int one) const { return rank <= one && one < rank + ranks; }
};

/// "rank 3", "ranks 0, 1, 5", "ranks 0, 2 to 7".
std::string list_ranks(std::vector<int>);

/// How the rank ended, and what it was doing: "killed by SIGSEGV (Segmentation fault); in all_reduce #204 …".
std::string describe_end(const RankEnd&);

/// Why ranks could not be started: a line for the user, and the exit status of rzrun.
struct StartFailure {
  int status;
  std::string text;
};
/// Of the exception that Ranks::start() threw.
StartFailure start_failure_of(const std::exception_ptr&, const std::string& program);

/// A signal to the rzrun or agent of another host.
struct StopRequest {
  int signal;
  std::string where;  ///< " on host n1", " from srun"
};

class Ranks {
 public:
  virtual ~Ranks() = default;

  /// Begins a job, while no rank of an earlier one has a process. RankGroup starts the ranks, and between
  /// them calls `go_on`; false ends the start. Other groups send the job in advance(), once hosts are known.
  /// What it throws start_failure_of() explains.
  virtual void start(const Job&, const std::function<bool()>& go_on) = 0;
  /// A failure to start on another host, once.
  virtual std::optional<StartFailure> start_failure() { return {}; }

  /// A request to end the job, once.
  virtual std::optional<StopRequest> stop_request() { return {}; }
  /// Why ranks that have ended cannot be started again; empty if they can.
  virtual std::string why_no_restart() const { return ""; }
  /// All ranks of the job that was started; 0 as long as hosts that take part are not known.
  virtual int size() const = 0;
  /// The job has ended so, and no other starts. `line`: the reason, or empty.
  virtual void end(int status, const std::string& line) {
    static_cast<void>(status), static_cast<void>(line);
  }

  /// Appends the descriptors that become ready when a rank has ended or printed.
  virtual void append_descriptors(std::vector<pollfd>&) const = 0;
  /// The longest wait for them; -1 if that does not matter.
  virtual int wait_ms() const { return -1; }
  /// Forwards what the ranks have printed, as far as the consoles have room; finish_output() all of it, and
  /// their last lines.
  virtual void forward_output() = 0;
  virtual void finish_output() {}
  /// Lines for standard error, such as of a log file that cannot be written; each once.
  virtual std::vector<std::string> messages() = 0;

  /// Does what need not wait: receives from hosts, admits them, sends them their jobs, collects processes
  /// that have ended. Returns the ranks that have ended: those killed by a signal first, since a nonzero exit
  /// code is often the consequence of a lost peer.
  virtual std::vector<RankEnd> advance() = 0;
  /// Ranks that have not ended.
  virtual std::vector<int> running() const = 0;
  virtual bool any_process_alive() const = 0;
  /// Once no rank is running: processes that the ranks left behind.
  virtual std::size_t leftovers() const = 0;

  /// Signals the process groups of all ranks, including ended ones, and orphans of theirs; each process once.
  virtual void signal_all(int signal) = 0;
  /// Signals the processes of the ranks that have a handler for the signal. False if none has.
  virtual bool signal_handlers(int signal) = 0;
  /// Stops this process, as Ctrl-Z does; the ranks go on.
  virtual void suspend() = 0;
};

}  // namespace rz::rzrun
