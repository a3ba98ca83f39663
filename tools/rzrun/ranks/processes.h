#pragma once
/// The processes below this one, as /proc lists them.

#include <sys/types.h>

#include <vector>

namespace rz::rzrun {

struct Process {
  pid_t pid = 0, parent = 0, group = 0;
  char state = 0;  ///< as in /proc/PID/stat: 'T' is stopped
};

/// All processes of the machine that have not ended; zombies are left out.
std::vector<Process> processes();

/// Processes whose parent is this one: the ranks, and, if this process is a subreaper, orphans of theirs.
std::vector<pid_t> children();

/// True if the process has a handler for the signal: it neither ignores it nor is ended by it.
bool handles_signal(pid_t, int signal);

}  // namespace rz::rzrun
