#include "comm/os/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "comm/core/error.h"

namespace rz {
namespace {

constexpr std::size_t max_output = std::size_t{1} << 20;
/// Between two looks at a child, if the kernel has no pidfd_open().
constexpr int poll_ms = 5;
constexpr std::chrono::seconds time_to_kill{10};

void redirect(int from, int to) {
  if (from == ChildOptions::inherited) return;
  const int fd = from == ChildOptions::null ? ::open("/dev/null", O_RDWR | O_CLOEXEC) : from;
  if (fd == to)
    ::fcntl(fd, F_SETFD, 0);
  else
    ::dup2(fd, to);
}

void set_up(const ChildOptions& o, pid_t parent) {
  if (o.own_group) ::setpgid(0, 0);
  if (o.signal_if_orphaned) {
    ::prctl(PR_SET_PDEATHSIG, o.signal_if_orphaned);
    if (::getppid() != parent) ::_exit(1);
  }
  redirect(o.in, STDIN_FILENO);
  redirect(o.out, STDOUT_FILENO);
  redirect(o.err, STDERR_FILENO);
}

int status_of(const std::function<int()>& main) noexcept {
  try {
    return main();
  } catch (...) {
    return 1;
  }
}

}  // namespace

Child::Child(const std::function<int()>& main, const ChildOptions& options, const std::string& name) {
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork", name);
  if (pid == 0) {
    set_up(options, parent);
    ::_exit(status_of(main));
  }
  if (options.own_group) ::setpgid(pid, pid);  // parent and child both call it, so that neither can run ahead
  *this = Child(pid, options.own_group);
}

Child::Child(pid_t pid, bool own_group)
    : pid_(pid), own_group_(own_group), pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this == &other) return *this;
  kill();
  pid_ = std::exchange(other.pid_, 0);
  std::tie(own_group_, status_) = std::tie(other.own_group_, other.status_);
  pidfd_ = std::move(other.pidfd_);
  return *this;
}

bool Child::wait(Deadline deadline) {
  while (pid_ > 0) {
    const pid_t ended = ::waitpid(pid_, &status_, WNOHANG);
    if (ended != 0 && !(ended < 0 && errno == EINTR)) {
      if (ended < 0) status_ = -1;
      pid_ = 0;
    } else if (deadline.expired()) {
      return false;
    } else {
      pollfd end{pidfd(), POLLIN, 0};
      ::poll(&end, 1, deadline.poll_ms(pidfd_ ? 1000 : poll_ms));
    }
  }
  return true;
}

bool Child::is_over() const {
  if (pid_ <= 0) return true;
  siginfo_t info{};
  const int failed = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
  return failed ? errno != EINTR : info.si_pid != 0;
}

void Child::forget() {
  pid_ = 0;
  pidfd_.close();
}

void Child::signal(int signal) const {
  if (pid_ > 0) ::kill(own_group_ ? -pid_ : pid_, signal);
}

void Child::end_within(std::chrono::milliseconds grace) {
  signal(SIGTERM);
  if (!wait(Deadline::after(grace))) kill();
}

void Child::kill() {
  signal(SIGKILL);
  wait(Deadline::after(time_to_kill));
}

std::pair<UniqueFd, UniqueFd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("pipe2");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void default_signals() {
  for (const int s : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2, SIGCHLD})
    ::signal(s, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

int exec_program(const std::vector<std::string>& words, const EnvironmentVariables& variables) {
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  return errno;
}

int exec_or_say(const std::vector<std::string>& words, const EnvironmentVariables& variables) {
  const int error = exec_program(words, variables);
  const std::string line = concat("cannot start '", words.front(), "': ", std::strerror(error), "\n");
  [[maybe_unused]] const auto n = ::write(STDERR_FILENO, line.data(), line.size());
  return 127;
}

std::string output_of(const std::vector<std::string>& words, Deadline end) try {
  auto [read, write] = make_pipe();
  const auto run = [&] {
    default_signals();
    return exec_program(words) ? 127 : 0;
  };
  const Child child(run, {.in = ChildOptions::null, .out = write.get(), .err = ChildOptions::null});
  write.close();
  std::string text;
  char bytes[4096];
  for (pollfd wait{read.get(), POLLIN, 0}; text.size() < max_output && !end.expired();) {
    if (::poll(&wait, 1, end.poll_ms(1000)) <= 0) continue;
    const auto n = ::read(read.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(bytes, static_cast<std::size_t>(n));
  }
  return text;
} catch (const Error&) {
  return "";
}

}  // namespace rz
