#pragma once
/// How a process ended, and in which words that is told.

#include <string>
#include <vector>

namespace rz::rzrun {

struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  ///< not 0: a signal ended it
  bool core_dumped = false;
  bool failed() const { return signal || exit_code; }
  /// As a shell has it: the code, or 128 + signal.
  int shell_status() const { return signal ? 128 + signal : exit_code; }
};

ExitStatus exit_status_of_wait(int status);

/// "exited with 3", "killed by SIGSEGV (Segmentation fault)".
std::string describe(const ExitStatus&);

/// Counts what the kernel's out-of-memory killer has done in this process's cgroup (v2: memory.events, v1:
/// memory.oom_control), or on the whole machine (/proc/vmstat) where there is neither.
class OomCounter {
 public:
  OomCounter();
  /// For tests: files that hold a line "oom_kill N"; the first that does counts.
  explicit OomCounter(std::vector<std::string> files);
  /// True if there were kills since the construction.
  bool increased() const;

 private:
  long read() const;
  std::vector<std::string> files_;
  long before_;
};

}  // namespace rz::rzrun
