#pragma once
/// The processes of one start of the ranks: launch, output, signals, ends.

#include <poll.h>

#include <list>
#include <optional>
#include <vector>

#include "tools/rzrun/exit_status.h"
#include "tools/rzrun/launch.h"
#include "tools/rzrun/output.h"
#include "tools/rzrun/processes.h"

namespace rz::rzrun {

struct Rank {
  int rank;
  pid_t pid;
  UniqueFd pidfd;
  std::optional<ExitStatus> exit_status;
};

/// The calling process must be a subreaper, and have no other children.
class RankGroup {
 public:
  /// Output goes to these consoles, which must outlive the group.
  RankGroup(Console& out, Console& err) : stdout_(out), stderr_(err) {}

  /// Starts one rank; throws as launch() does.
  void start(const Job&, int rank);

  /// Appends the descriptors that become readable when a rank has ended or printed.
  void append_descriptors(std::vector<pollfd>&) const;
  /// Forwards what the ranks have printed, as far as the consoles have room; finish_output() all of it, and
  /// their last lines.
  void forward_output();
  void finish_output();
  /// The errno of a write to a log file that failed since the last call, or 0.
  int log_error();

  /// Collects processes that have ended, and returns the ranks among them: those killed by a signal first,
  /// since a nonzero exit code is often the consequence of a lost peer.
  std::vector<const Rank*> reap();
  /// Ranks that have not ended.
  std::vector<int> running() const;
  bool any_process_alive() const;

  /// Signals the process groups of all ranks, including ended ones, and orphans reparented to this process;
  /// each process once.
  void signal_all(int signal) const;
  /// Signals the processes of the ranks that have a handler for the signal. False if none has.
  bool signal_handlers(int signal) const;

 private:
  bool is_in_group_of_a_rank(const Process&) const;

  Console &stdout_, &stderr_;
  std::vector<Rank> ranks_;
  std::list<Forwarder> forwarders_;
};

}  // namespace rz::rzrun
