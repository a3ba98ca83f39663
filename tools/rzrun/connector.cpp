#include "tools/rzrun/connector.h"

#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "comm/core/error.h"
#include "tools/rzrun/launch.h"

namespace rz::rzrun {
namespace {

std::string in_quotes(const std::string& path) {
  std::string text = "'";
  for (const char c : path) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

std::string own_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, HOST_NAME_MAX);
  return name;
}

bool is_this_host(const std::string& name) {
  const std::string own = own_name();
  return name == "localhost" || name == "127.0.0.1" || name == own || name == own.substr(0, own.find('.'));
}

std::vector<std::string> agent_command(const Options& o, const std::string& host) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  if (is_this_host(host)) return {self, "--agent"};
  std::vector<std::string> words;
  for (const auto word : words_of(o.rsh)) words.emplace_back(word);
  if (words.empty()) {
    words = {"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"};
    if (o.ssh_port) words.insert(words.end(), {"-p", concat(o.ssh_port)});
  }
  for (const auto word : words_of(o.launcher_args)) words.emplace_back(word);
  words.push_back(host);
  words.push_back(
      concat("cd ", in_quotes(std::filesystem::current_path()), " && exec ", in_quotes(self), " --agent"));
  return words;
}

Variables forwarded_environment() {
  static constexpr std::string_view own[] = {
      "HOME",    "USER",   "LOGNAME",   "SHELL", "MAIL",     "HOSTNAME",     "HOST",
      "PWD",     "OLDPWD", "SHLVL",     "_",     "TMPDIR",   "TERM",         "TTY",
      "DISPLAY", "TMUX",   "TMUX_PANE", "STY",   "WINDOWID", "RZ_SECRET_FD", "RZ_FLIGHT_FD"};
  static constexpr std::string_view own_prefixes[] = {"SSH_", "XDG_", "DBUS_", "WAYLAND_", "BASH_FUNC_"};
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

Connector start_connector(const std::vector<std::string>& words) {
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
