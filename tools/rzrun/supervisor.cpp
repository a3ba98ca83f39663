#include "tools/rzrun/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <list>
#include <optional>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tools/rzrun/exit_status.h"
#include "tools/rzrun/launch.h"
#include "tools/rzrun/output.h"

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
  for (int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}) sigaddset(&set, s);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) fail_errno("signalfd");
  return fd;
}

/// Processes whose parent is this one: the ranks, and orphans reparented to this process, a subreaper.
std::vector<pid_t> children() {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::string stat;
    std::getline(std::ifstream(entry.path() / "stat"), stat);
    char state = 0;
    int parent = 0;
    const auto after_name = stat.rfind(')');
    if (after_name != std::string::npos &&
        std::sscanf(stat.c_str() + after_name + 1, " %c %d", &state, &parent) == 2 && parent == ::getpid() &&
        state != 'Z')
      found.push_back(pid);
  }
  return found;
}

struct Rank {
  int rank;
  pid_t pid;
  UniqueFd pidfd;
  std::optional<ExitStatus> exit_status;
};

class Supervisor {
 public:
  explicit Supervisor(const Options& options)
      : options_(options),
        signals_(block_signals()),
        stdout_(STDOUT_FILENO, signals_.get()),
        stderr_(STDERR_FILENO, signals_.get()) {}

  int run() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (!options_.log_dir.empty()) make_log_dir();
    start();
    while (any_process_alive()) poll_once();
    for (auto& f : forwarders_) f.finish();
    return status_;
  }

 private:
  void make_log_dir() {
    std::error_code error;
    std::filesystem::create_directories(options_.log_dir, error);
    require(!error, Errc::config, "--log-dir ", options_.log_dir, ": ", error.message());
  }

  void start() {
    const Job job{options_, options_.master_port ? options_.master_port : free_port(), random_id()};
    for (int rank = 0; rank < options_.ranks; ++rank) {
      try {
        add_rank(rank, launch(job, rank));
      } catch (const LaunchError& e) {
        log_error(concat("cannot start '", options_.command.front(), "': ", std::strerror(e.error)));
        status_ = e.error == ENOENT ? 127 : 126;
        return end_all();
      } catch (const Error& e) {
        log_error(concat("cannot start rank ", rank, ": ", e.what()));
        status_ = 1;
        return end_all();
      }
    }
  }

  void add_rank(int rank, ChildProcess l) {
    const std::string prefix = options_.prefix ? concat("[", rank, "] ") : "";
    if (l.out) forwarders_.emplace_back(std::move(l.out), &stdout_, std::move(l.out_log), prefix);
    if (l.err) forwarders_.emplace_back(std::move(l.err), &stderr_, std::move(l.err_log), prefix);
    ranks_.push_back({rank, l.pid, std::move(l.pidfd), {}});
  }

  /// Waits once for the next event: output, the end of a process, a signal, or the end of the grace period.
  void poll_once() {
    std::vector<pollfd> wait{{signals_.get(), POLLIN, 0}};
    for (const auto& r : ranks_) wait.push_back({r.exit_status ? -1 : r.pidfd.get(), POLLIN, 0});
    for (const auto& f : forwarders_) wait.push_back({f.fd(), POLLIN, 0});
    if (::poll(wait.data(), wait.size(), poll_timeout_ms()) < 0 && errno != EINTR) fail_errno("poll");
    handle_signals();
    reap();
    for (auto& f : forwarders_) f.pump();
    if (ending_ && kill_at_.expired()) kill_all(SIGKILL);
    if (!ending_ && all_ended()) end_leftovers();
  }

  /// After the grace period poll periodically, since dying processes may leave orphans to kill.
  int poll_timeout_ms() const {
    if (!ending_) return -1;
    return kill_at_.expired() ? 20 : kill_at_.poll_ms(60000);
  }

  void handle_signals() {
    signalfd_siginfo info;
    while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
      const int s = static_cast<int>(info.ssi_signo);
      if (s == SIGCHLD) continue;
      if (!interrupted_) {
        log_error(concat("SIG", sigabbrev_np(s), ": ending ", options_.ranks,
                         " ranks (once more kills them at once)"));
        if (!status_) status_ = 128 + s;
      } else {
        kill_at_ = Deadline::after({});
      }
      interrupted_ = true;
      end_all();
    }
  }

  void reap() {
    std::vector<Rank*> ended;
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
      for (auto& r : ranks_)
        if (r.pid == pid) {
          r.exit_status = exit_status_of_wait(status);
          ended.push_back(&r);
        }
    // If several ranks ended in one iteration, report those killed by a signal first: a nonzero exit code is
    // often the consequence of a lost peer.
    std::stable_partition(ended.begin(), ended.end(),
                          [](const Rank* r) { return r->exit_status->signal != 0; });
    for (const Rank* r : ended)
      if (r->exit_status->failed()) report(*r);
  }

  void report(const Rank& r) {
    if (interrupted_) return;
    if (first_failed_ >= 0) {
      if (!(r.exit_status->signal == SIGTERM || r.exit_status->signal == SIGKILL))
        log_error(concat("rank ", r.rank, " ", describe(*r.exit_status), " after that"));
      return;
    }
    if (ending_) return;
    first_failed_ = r.rank;
    status_ = r.exit_status->shell_status();
    log_error(concat("rank ", r.rank, " of ", options_.ranks, " failed first: ", describe(*r.exit_status),
                     oom_hint(*r.exit_status), log_hint(r.rank)));
    end_all();
  }

  std::string oom_hint(const ExitStatus& f) const {
    if (f.signal != SIGKILL || !oom_.increased()) return "";
    return "; the kernel's out-of-memory killer struck meanwhile: use less memory or fewer ranks";
  }

  std::string log_hint(int rank) const {
    return options_.log_dir.empty() ? "" : "; its log: " + log_path(options_, rank, "stderr");
  }

  bool all_ended() const {
    for (const auto& r : ranks_)
      if (!r.exit_status) return false;
    return true;
  }

  bool any_process_alive() const { return !all_ended() || !children().empty(); }

  void end_leftovers() {
    const auto left = children();
    if (left.empty()) return;
    log_error(concat("ending ", left.size(), left.size() == 1 ? " process" : " processes",
                     " that the ranks left behind"));
    end_all();
  }

  void end_all() {
    if (!ending_) {
      ending_ = true;
      kill_at_ = Deadline::after(options_.grace);
      kill_all(SIGTERM);
    } else if (kill_at_.expired()) {
      kill_all(SIGKILL);
    }
  }

  /// Signals the process groups of all ranks, including ended ones, and orphans reparented to this process.
  void kill_all(int signal) {
    for (const auto& r : ranks_) ::kill(-r.pid, signal);
    for (pid_t pid : children()) ::kill(pid, signal);
    if (signal == SIGTERM)
      for (const auto& r : ranks_) ::kill(-r.pid, SIGCONT);  // a stopped process must handle SIGTERM too
  }

  const Options& options_;
  UniqueFd signals_;
  Console stdout_, stderr_;
  OomCounter oom_;
  std::vector<Rank> ranks_;
  std::list<Forwarder> forwarders_;
  int status_ = 0;
  int first_failed_ = -1;
  bool interrupted_ = false;
  bool ending_ = false;
  Deadline kill_at_ = Deadline::after({});
};

}  // namespace

int supervise(const Options& options) { return Supervisor(options).run(); }

}  // namespace rz::rzrun
