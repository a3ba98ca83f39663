#pragma once
/// Starts shell scripts under rzrun, and reads what they leave.

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "tests/support/folder.h"
#include "tests/support/program.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz::test {

/// rzrun with these flags runs the script on every rank.
inline std::vector<std::string> rzrun(std::vector<std::string> flags, const std::string& script) {
  flags.insert(flags.begin(), built("rzrun"));
  for (const auto& word : {std::string("sh"), std::string("-c"), script}) flags.push_back(word);
  return flags;
}

/// The process that runs the ranks: the child of the one that was started.
inline pid_t child_of(pid_t keeper) {
  for (const auto& process : rz::rzrun::processes())
    if (process.parent == keeper) return process.pid;
  return -1;
}

/// The processes that rzrun started and that have not ended.
inline std::vector<pid_t> ranks_of(const Program& rzrun_itself) {
  std::vector<pid_t> found;
  const pid_t supervisor = child_of(rzrun_itself.pid());
  for (const auto& process : rz::rzrun::processes())
    if (process.parent == supervisor) found.push_back(process.pid);
  return found;
}

inline std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

inline std::string content(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

/// A shell command that ends once the files exist.
inline std::string until(const std::vector<std::string>& files) {
  std::string command;
  for (const std::string& file : files) command += "until [ -e " + file + " ]; do sleep 0.02; done; ";
  return command;
}

}  // namespace rz::test
