#include "tools/rzrun/ranks/processes.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

#include "comm/core/error.h"

namespace rz::rzrun {
namespace {

/// The line is "PID (NAME) STATE PARENT GROUP …", and NAME may contain anything.
std::optional<Process> process_of_stat(pid_t pid, const std::string& line) {
  Process p{.pid = pid};
  const auto after_name = line.rfind(')');
  if (after_name == std::string::npos ||
      std::sscanf(line.c_str() + after_name + 1, " %c %d %d", &p.state, &p.parent, &p.group) != 3 ||
      p.state == 'Z')
    return {};
  return p;
}

}  // namespace

std::vector<Process> processes() {
  std::vector<Process> found;
  std::error_code error;
  // An increment that fails makes the end.
  for (std::filesystem::directory_iterator entry("/proc", error), end; entry != end; entry.increment(error)) {
    const pid_t pid = std::atoi(entry->path().filename().c_str());
    if (pid <= 0) continue;
    std::string line;
    std::getline(std::ifstream(entry->path() / "stat"), line);
    if (const auto p = process_of_stat(pid, line)) found.push_back(*p);
  }
  return found;
}

std::vector<pid_t> children() {
  std::vector<pid_t> found;
  for (const Process& p : processes())
    if (p.parent == ::getpid()) found.push_back(p.pid);
  return found;
}

bool handles_signal(pid_t pid, int signal) {
  std::ifstream status(concat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigCgt:")) return std::strtoull(line.c_str() + 7, nullptr, 16) >> (signal - 1) & 1;
  return false;
}

}  // namespace rz::rzrun
