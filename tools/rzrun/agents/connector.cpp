#include "tools/rzrun/agents/connector.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"
#include "tools/rzrun/ranks/launch.h"

namespace rz::rzrun {

Variables forwarded_environment() {
  static constexpr std::string_view own[] = {
      "HOME",    "USER",   "LOGNAME",   "SHELL", "MAIL",     "HOSTNAME",     "HOST",
      "PWD",     "OLDPWD", "SHLVL",     "_",     "TMPDIR",   "TERM",         "TTY",
      "DISPLAY", "TMUX",   "TMUX_PANE", "STY",   "WINDOWID", "RZ_SECRET_FD", "RZ_FLIGHT_FD"};
  static constexpr std::string_view own_prefixes[] = {"SSH_", "XDG_", "DBUS_", "WAYLAND_"};
  Variables found;
  for (char** v = environ; *v; ++v) {
    const std::string_view text = *v;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (std::ranges::count(own, name) || std::ranges::any_of(own_prefixes, begins)) continue;
    found.emplace_back(name, text.substr(equals + 1));
  }
  return found;
}

Connector start_connector(const std::vector<std::string>& words, const Variables& variables) {
  auto [child_in, to_child] = make_pipe();
  auto [from_child, child_out] = make_pipe();
  auto [errors, child_err] = make_pipe();
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork", words.front());
  if (pid == 0) {
    ::setpgid(0, 0);  // Ctrl-C is for rzrun alone
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    default_signals();
    ::dup2(child_in.get(), STDIN_FILENO);
    ::dup2(child_out.get(), STDOUT_FILENO);
    ::dup2(child_err.get(), STDERR_FILENO);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> argv;
    for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    const std::string line = concat("cannot start '", words.front(), "': ", std::strerror(errno), "\n");
    if (::write(STDERR_FILENO, line.data(), line.size()) < 0) ::_exit(126);
    ::_exit(127);
  }
  ::setpgid(pid, pid);
  return {pid, UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), std::move(from_child),
          std::move(to_child), std::move(errors)};
}

}  // namespace rz::rzrun
