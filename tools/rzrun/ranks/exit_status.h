#pragma once
/// How a process ended, and its description for messages.

#include <string>
#include <vector>

namespace rz::rzrun {

struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  ///< not 0: the signal that killed the process
  bool core_dumped = false;
  bool operator==(const ExitStatus&) const = default;
  bool failed() const { return signal || exit_code; }
  /// The code a shell would report: the exit code, or 128 + signal.
  int shell_status() const { return signal ? 128 + signal : exit_code; }
};

ExitStatus exit_status_of_wait(int status);

/// "exited with 3", "killed by SIGSEGV (Segmentation fault)".
std::string describe(const ExitStatus&);

/// Number of kills by the kernel's out-of-memory killer in the cgroup of this process (v2: memory.events, v1:
/// memory.oom_control), or on the whole machine (/proc/vmstat) if neither file exists.
class OomCounter {
 public:
  OomCounter();
  /// For tests: files that may contain a line "oom_kill N"; the first one that has such a line is used.
  explicit OomCounter(std::vector<std::string> files);
  /// True if the number has increased since construction.
  bool increased() const;

 private:
  long read() const;
  std::vector<std::string> files_;
  long before_;
};

}  // namespace rz::rzrun
