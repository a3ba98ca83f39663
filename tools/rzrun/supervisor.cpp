#include "tools/rzrun/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tools/rzrun/exit_status.h"
#include "tools/rzrun/launch.h"
#include "tools/rzrun/output.h"
#include "tools/rzrun/processes.h"
#include "tools/rzrun/rank_group.h"
#include "tools/rzrun/restart_policy.h"

namespace rz::rzrun {
namespace {

void log_error(const std::string& line) {
  const std::string text = "rzrun: " + line + "\n";
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0)
    return;  // standard error is closed: the message is lost
}

UniqueFd block_signals() {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  for (int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD}) sigaddset(&set, s);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) fail_errno("signalfd");
  return fd;
}

/// "rank 3 has", "ranks 0, 3 have".
std::string ranks_have(const std::vector<int>& ranks) {
  std::string list;
  for (int r : ranks) list += (list.empty() ? "" : ", ") + concat(r);
  return ranks.size() == 1 ? concat("rank ", list, " has") : concat("ranks ", list, " have");
}

std::string seconds(std::chrono::milliseconds t) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", std::chrono::duration<double>(t).count());
  return text;
}

class Supervisor {
 public:
  explicit Supervisor(const Options& options)
      : options_(options),
        signals_(block_signals()),
        stdout_(STDOUT_FILENO, signals_.get()),
        stderr_(STDERR_FILENO, signals_.get()),
        restarts_(options.max_restarts) {}

  int run() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    do run_group();
    while (wait_for_restart());
    return status_;
  }

 private:
  /// Starts the ranks and returns when no process of theirs is left.
  void run_group() {
    group_.emplace(stdout_, stderr_);
    oom_.emplace();
    started_ = std::chrono::steady_clock::now();
    restart_after_.reset();
    first_failed_.reset();
    kill_at_.reset();
    status_ = 0;
    start();
    while (group_->any_process_alive()) poll_once();
    group_->reap();  // those that ended since
    group_->finish_output();
    group_.reset();
  }

  void start() {
    try {
      const Job job = new_job(options_, run_id_, restarts_.restarts());
      for (int rank = 0; rank < options_.ranks; ++rank) group_->start(job, rank);
    } catch (const LaunchError& e) {
      log_error(concat("cannot start '", options_.command.front(), "': ", std::strerror(e.error)));
      status_ = e.error == ENOENT ? 127 : 126;
      end_all();
    } catch (const Error& e) {
      if (e.code() == Errc::config) throw;
      log_error(concat("cannot start the ranks: ", e.what()));
      status_ = 1;
      end_all();
    }
  }

  /// Waits once for the next event: output, the end of a process, a signal, or the end of the grace period.
  void poll_once() {
    std::vector<pollfd> wait{{signals_.get(), POLLIN, 0}};
    group_->append_descriptors(wait);
    if (::poll(wait.data(), wait.size(), poll_timeout_ms()) < 0 && errno != EINTR) fail_errno("poll");
    handle_signals();
    for (const Rank* r : group_->reap())
      if (r->exit_status->failed()) report(*r);
    group_->forward_output();
    if (kill_at_ && kill_at_->expired()) kill_all();
    if (!kill_at_ && group_->running().empty()) end_leftovers();
  }

  /// After the grace period poll periodically, since dying processes may leave orphans to kill.
  int poll_timeout_ms() const {
    if (!kill_at_) return -1;
    return kill_at_->expired() ? 20 : kill_at_->poll_ms(60000);
  }

  void handle_signals() {
    signalfd_siginfo info;
    while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
      const int s = static_cast<int>(info.ssi_signo);
      if (s == SIGUSR1 || s == SIGUSR2)
        forward(s);
      else if (s != SIGCHLD)
        stop(s);
    }
  }

  void forward(int s) {
    if (!group_ || !group_->signal_handlers(s))
      log_error(concat("SIG", sigabbrev_np(s), ": not forwarded, since no rank has a handler for it"));
  }

  void stop(int s) {
    if (stopped_by_) {
      kill_at_ = Deadline::after({});
    } else {
      log_error(concat("SIG", sigabbrev_np(s), ": ending ", options_.ranks,
                       " ranks (once more kills them at once)"));
      stopped_by_ = s;
      if (!status_ || restart_after_) status_ = 128 + s;
      restart_after_.reset();
    }
    end_all();
  }

  void report(const Rank& r) {
    if (stopped_by_) return;
    if (first_failed_) {
      if (!(r.exit_status->signal == SIGTERM || r.exit_status->signal == SIGKILL))
        log_error(concat("rank ", r.rank, " ", describe(*r.exit_status), " after that"));
      return;
    }
    if (kill_at_) return;
    first_failed_ = r.rank;
    status_ = r.exit_status->shell_status();
    restart_after_ = restarts_.next(*r.exit_status, std::chrono::steady_clock::now() - started_);
    log_error(concat("rank ", r.rank, " of ", options_.ranks, " failed first: ", describe(*r.exit_status),
                     oom_hint(*r.exit_status), restart_hint(*r.exit_status), log_hint(r.rank)));
    end_all();
  }

  std::string oom_hint(const ExitStatus& f) const {
    if (f.signal != SIGKILL || !oom_->increased()) return "";
    return "; the kernel's out-of-memory killer struck meanwhile: use less memory or fewer ranks";
  }

  std::string restart_hint(const ExitStatus& f) const {
    if (restarts_.max_restarts() == 0) return "";
    const std::string count = concat(restarts_.restarts(), " of ", restarts_.max_restarts());
    if (!restart_after_)
      return why_final(f).empty() ? concat("; no restart is left after ", count)
                                  : concat("; no restart: ", why_final(f));
    return concat("; restart ", count, restart_after_->count() ? " in " + seconds(*restart_after_) : "");
  }

  std::string log_hint(int rank) const {
    if (options_.log_dir.empty()) return "";
    const int before = restarts_.restarts() - (restart_after_ ? 1 : 0);
    return "; its log: " + log_path(options_, before, rank, "stderr");
  }

  void end_leftovers() {
    const auto left = children();
    if (left.empty()) return;
    log_error(concat("ending ", left.size(), left.size() == 1 ? " process" : " processes",
                     " that the ranks left behind"));
    end_all();
  }

  void end_all() {
    if (!group_) return;
    if (!kill_at_) {
      kill_at_ = Deadline::after(options_.grace);
      killed_ = false;
      group_->signal_all(SIGTERM);
    } else if (kill_at_->expired()) {
      kill_all();
    }
  }

  void kill_all() {
    const auto running = group_->running();
    if (!killed_ && !running.empty())
      log_error(concat(ranks_have(running), " not ended since SIGTERM: SIGKILL (--grace ",
                       seconds(options_.grace), ")"));
    killed_ = true;
    group_->signal_all(SIGKILL);
  }

  /// Waits out the pause before a restart; false if there is to be none.
  bool wait_for_restart() {
    if (!restart_after_) return false;
    const Deadline end = Deadline::after(*restart_after_);
    while (restart_after_ && !end.expired()) {
      pollfd wait{signals_.get(), POLLIN, 0};
      if (::poll(&wait, 1, end.poll_ms(60000)) < 0 && errno != EINTR) fail_errno("poll");
      handle_signals();
    }
    return restart_after_.has_value();
  }

  const Options& options_;
  UniqueFd signals_;
  Console stdout_, stderr_;
  RestartPolicy restarts_;
  const std::string run_id_ = random_id();
  int status_ = 0;
  int stopped_by_ = 0;  // the signal that requested the end of the job

  // Of the latest group.
  std::optional<RankGroup> group_;  // empty during the pause before a restart
  std::optional<OomCounter> oom_;
  std::chrono::steady_clock::time_point started_;
  std::optional<std::chrono::milliseconds> restart_after_;
  std::optional<int> first_failed_;
  std::optional<Deadline> kill_at_;  // set: the group is being ended
  bool killed_ = false;
};

}  // namespace

int supervise(const Options& options) { return Supervisor(options).run(); }

}  // namespace rz::rzrun
