#pragma once
/// Decides whether a group of ranks that failed is started again.

#include <chrono>
#include <optional>
#include <string>

#include "tools/rzrun/ranks/exit_status.h"

namespace rz::rzrun {

/// Why a failure with this status would happen again, or must not be followed by a restart; empty for any
/// other. Such are 2 (wrong input), 126 and 127 (the program cannot be executed), 130 and 143 (the rank
/// handled SIGINT or SIGTERM and ended, as it was requested to). A rank that a signal killed may always be
/// restarted.
std::string why_final(const ExitStatus&);

/// "0.1 s".
std::string seconds(std::chrono::milliseconds);

/// Counts the restarts of a job. A group that fails within 10 s of its start is restarted after a pause, 0.1
/// s at first; the pause doubles up to 10 s as long as groups fail that early.
class RestartPolicy {
 public:
  explicit RestartPolicy(int max_restarts) : max_restarts_(max_restarts) {}

  /// The pause before the next restart, which is counted; nullopt if there is to be none. `lifetime`: from
  /// the start of the group to its first failure.
  std::optional<std::chrono::milliseconds> next(const ExitStatus& failure,
                                                std::chrono::steady_clock::duration lifetime);
  /// What follows the failure, as the end of a sentence about it: "; restart 1 of 3 in 0.1 s". `pause`: that
  /// of next(). Empty if there are no restarts at all.
  std::string explain(const ExitStatus& failure, std::optional<std::chrono::milliseconds> pause) const;
  int restarts() const { return restarts_; }
  int max_restarts() const { return max_restarts_; }

 private:
  int max_restarts_;
  int restarts_ = 0;
  std::chrono::milliseconds pause_{0};  // before the latest restart
};

}  // namespace rz::rzrun
