#include "tools/rzrun/hosts/connector.h"

#include <signal.h>

#include <filesystem>
#include <tuple>
#include <utility>

#include "comm/core/environment.h"
#include "comm/core/text.h"
#include "tools/command_line/shell_words.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::hosts {

std::vector<std::string> ssh_words() {
  return {"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"};
}

std::string own_path() { return std::filesystem::read_symlink("/proc/self/exe"); }

std::vector<std::string> remote_command(std::vector<std::string> shell, const std::string& host,
                                        const std::string& program, const std::string& folder) {
  if (is_this_host(host)) return {program, "--agent"};
  const std::string ports = environment_variable("RZ_PORTS").value_or("");
  shell.push_back(host);
  shell.push_back(concat(folder.empty() ? "" : concat("cd ", quoted_for_shell(folder), " && exec "),
                         ports.empty() ? "" : concat("env RZ_PORTS=", quoted_for_shell(ports), " "),
                         quoted_for_shell(program), " --agent"));
  return shell;
}

Connector::Connector(const std::vector<std::string>& words, const EnvironmentVariables& variables,
                     std::optional<int> errors)
    : name(words.front()) {
  auto [child_in, to_child] = make_pipe();
  auto [from_child, child_out] = make_pipe();
  UniqueFd child_err;
  if (!errors) {
    std::tie(err, child_err) = make_pipe();
    errors = child_err.get();
  }
  const auto run = [&] {
    default_signals();
    return exec_or_say(words, variables);
  };
  process = Child(run,
                  {.in = child_in.get(),
                   .out = child_out.get(),
                   .err = *errors,
                   .own_group = true,  // Ctrl-C is for this program alone
                   .signal_if_orphaned = SIGTERM},
                  name);
  group = process.pid();
  out = std::move(from_child);
  in = std::move(to_child);
}

void Connector::kill_group() const {
  if (process.pid() > 0) ::kill(-group, SIGKILL);
}

}  // namespace rz::hosts
