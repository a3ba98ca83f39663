#include "tools/rzrun/ranks/exit_status.h"

#include <sys/wait.h>

#include <cstring>
#include <fstream>

#include "comm/core/text.h"

namespace rz::rzrun {
namespace {

/// Lines of /proc/self/cgroup are "id:controllers:path"; in cgroup v2 controllers is empty.
std::vector<std::string> oom_files() {
  std::vector<std::string> files;
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    // In a container the path may be that of the host; the root of the mount is then the group of the
    // container.
    if (controllers.empty())
      for (const auto& p : {path, std::string()}) files.push_back("/sys/fs/cgroup" + p + "/memory.events");
    if (controllers == "memory")
      for (const auto& p : {path, std::string()})
        files.push_back("/sys/fs/cgroup/memory" + p + "/memory.oom_control");
  }
  files.push_back("/proc/vmstat");
  return files;
}

}  // namespace

ExitStatus exit_status_of_wait(int status) {
  if (WIFSIGNALED(status)) return {0, WTERMSIG(status), static_cast<bool>(WCOREDUMP(status))};
  return {WEXITSTATUS(status), 0, false};
}

std::string describe(const ExitStatus& f) {
  if (!f.signal) return concat("exited with ", f.exit_code);
  const char* name = sigabbrev_np(f.signal);
  const char* meaning = sigdescr_np(f.signal);
  return concat("killed by ", name ? concat("SIG", name) : concat("signal ", f.signal),
                meaning ? concat(" (", meaning, ")") : "", f.core_dumped ? ", core dumped" : "");
}

OomCounter::OomCounter() : OomCounter(oom_files()) {}
OomCounter::OomCounter(std::vector<std::string> files) : files_(std::move(files)), before_(read()) {}
bool OomCounter::increased() const { return read() > before_; }

long OomCounter::read() const {
  for (const auto& file : files_) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);)
      if (const auto words = words_of(line); words.size() == 2 && words[0] == "oom_kill")
        return parse_number<long>(words[1]).value_or(0);
  }
  return 0;
}

}  // namespace rz::rzrun
