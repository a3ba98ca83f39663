#pragma once
/// The ranks of this host: launch, output, signals, ends.

#include <list>
#include <optional>
#include <vector>

#include "tools/rzrun/ranks/exit_status.h"
#include "tools/rzrun/ranks/keeper.h"
#include "tools/rzrun/ranks/output.h"
#include "tools/rzrun/ranks/processes.h"
#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

/// The calling process must be a subreaper, and have no other children.
class RankGroup : public Ranks {
 public:
  /// Output goes to these consoles, which must outlive the group.
  RankGroup(Console& out, Console& err) : stdout_(out), stderr_(err) {}
  ~RankGroup() override;

  void start(const Job&, const std::function<bool()>& go_on) override;
  void append_descriptors(std::vector<pollfd>&) const override;
  void forward_output() override;
  void finish_output() override;
  std::vector<std::string> messages() override;
  std::vector<RankEnd> advance() override;
  int size() const override { return size_; }
  std::vector<int> running() const override;
  bool any_process_alive() const override;
  std::size_t leftovers() const override;
  void signal_all(int signal) override;
  bool signal_handlers(int signal) override;
  void suspend() override { stop_as_by_terminal(); }

 private:
  struct Rank {
    int rank;
    pid_t pid;
    UniqueFd pidfd, flight;
    std::optional<ExitStatus> exit_status;
    char state = 0;  ///< of its processes when all ranks began to be ended
  };

  void start_rank(const Job&, int local_rank);
  void choose_error_folder(const Job&);
  void note_states(const std::vector<Process>&);
  RankEnd end_of(const Rank&) const;
  bool is_in_group_of_a_rank(const Process&) const;

  Console &stdout_, &stderr_;
  std::vector<Rank> ranks_;
  int size_ = 0;
  std::list<Forwarder> forwarders_;
  std::optional<OomCounter> oom_;
  std::string log_dir_, error_folder_;
  int log_error_ = 0;       // why output is missing in log files; -1: that has been reported
  bool is_ending_ = false;  // signal_all() was called: signals are no failures of the ranks
  UniqueFd folder_lock_;    // of own_folder_
  std::string own_folder_;  // a temporary one, without --log-dir
};

}  // namespace rz::rzrun
