#include "tools/rzrun/ranks/keeper.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <optional>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tools/rzrun/ranks/exit_status.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz::rzrun {
namespace {

/// Processes that the kernel cannot end must not keep this one.
constexpr std::chrono::seconds time_to_kill{10};

/// A terminal signals all processes of a group itself, and the child alone answers Ctrl-Z. Returns the last
/// signal, or `last` if there is none.
int pass_signals_on(const UniqueFd& signals, pid_t child, int last) {
  signalfd_siginfo info;
  while (::read(signals.get(), &info, sizeof info) == sizeof info)
    if (const auto s = static_cast<int>(info.ssi_signo); s != SIGCHLD) {
      if (s != SIGTSTP && s != SIGCONT) last = s;
      if (info.ssi_code != SI_KERNEL) ::kill(child, s);
    }
  return last;
}

/// Reaps processes, which may be orphans of ranks; the status of the child once it has ended. Once Ctrl-Z has
/// stopped the child, which has told its agents, this process stops too, and a shell sees it.
std::optional<ExitStatus> reap(pid_t child) {
  std::optional<ExitStatus> ended;
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) {
    if (pid == child && !WIFSTOPPED(status)) ended = exit_status_of_wait(status);
    if (pid != child || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTSTP) continue;
    stop_as_by_terminal();
    ::kill(child, SIGCONT);
  }
  return ended;
}

bool has_children() {
  siginfo_t ignored;
  return ::waitid(P_ALL, 0, &ignored, WEXITED | WNOHANG | WNOWAIT) == 0;
}

/// Each that ends may leave children to this process, which is a subreaper.
void kill_children() {
  if (!has_children()) return;  // usually; /proc takes milliseconds
  const auto end = Deadline::after(time_to_kill);
  for (auto all = children(); !all.empty() && !end.expired(); all = children()) {
    for (const pid_t pid : all) ::kill(pid, SIGKILL);
    ::usleep(2000);
    reap(-1);
  }
}

}  // namespace

void stop_as_by_terminal() {
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, SIGTSTP);
  ::raise(SIGTSTP);
  ::sigprocmask(SIG_UNBLOCK, &one, nullptr);  // here it stops
  ::sigprocmask(SIG_BLOCK, &one, nullptr);
}

UniqueFd block_signals() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD, SIG_DFL);  // one that is ignored is inherited, and no end of a child would be seen
  sigset_t set;
  sigemptyset(&set);
  for (int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2, SIGCHLD, keeper_lost})
    sigaddset(&set, s);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) fail_errno("signalfd");
  return fd;
}

int run_kept(const std::function<int()>& work) {
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, nullptr, &before);
  UniqueFd signals = block_signals();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t keeper = ::getpid(), child = ::fork();
  if (child < 0) fail_errno("fork");
  if (child == 0) {
    signals.close();
    ::prctl(PR_SET_NAME, "rz-supervisor");  // `pkill -9 rzrun` must leave one of both
    ::prctl(PR_SET_PDEATHSIG, keeper_lost);
    if (::getppid() != keeper) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return work();
  }
  int passed = 0;
  std::optional<ExitStatus> ended;
  while (!(ended = reap(child))) {
    pollfd wait{signals.get(), POLLIN, 0};
    ::poll(&wait, 1, -1);
    passed = pass_signals_on(signals, child, passed);
  }
  kill_children();
  if (ended->signal && ended->signal != passed)
    std::fprintf(stderr, "rzrun: its process that runs the ranks was %s; the ranks are ended\n",
                 describe(*ended).c_str());
  return ended->shell_status();
}

}  // namespace rz::rzrun
