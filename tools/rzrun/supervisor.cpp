#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tools/rzrun/agent.h"
#include "tools/rzrun/agent_group.h"
#include "tools/rzrun/error_file.h"
#include "tools/rzrun/exit_status.h"
#include "tools/rzrun/host_flags.h"
#include "tools/rzrun/launch.h"
#include "tools/rzrun/options.h"
#include "tools/rzrun/output.h"
#include "tools/rzrun/processes.h"
#include "tools/rzrun/rank_group.h"
#include "tools/rzrun/restart_policy.h"

namespace rz::rzrun {
namespace {

/// Signals of one kind that arrive within this time are one: timeout(1) signals rzrun and then the process
/// group of both, and a terminal that closes sends several.
constexpr std::chrono::seconds one_signal{1};

/// The other ranks have so long to print why they end, after one has exited with an error. All ranks usually
/// exit with 2 when an input is wrong, and one of them prints the reason.
std::chrono::milliseconds time_to_report(const ExitStatus& s) {
  return std::chrono::milliseconds(s.signal ? 0 : s.exit_code == 2 ? 3000 : 1000);
}

/// Once a signal has requested the end and no rank is left, the output waits so long for its reader.
constexpr std::chrono::milliseconds reader_time{5000}, reader_time_if_urgent{500};

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
        // Before signals are blocked, so that they end a slow look-up.
        processors_(options.nodes.empty() ? bindings(options, options.ranks)
                                          : std::vector<std::vector<int>>()),
        signals_(block_signals()),
        restarts_(options.max_restarts) {
    if (!is_same_stream(STDOUT_FILENO, STDERR_FILENO)) own_stderr_.emplace(STDERR_FILENO);
    if (options.nodes.empty())
      ranks_ = std::make_unique<RankGroup>(stdout_, errors());
    else
      ranks_ = std::make_unique<AgentGroup>(options, stdout_, errors());
  }

  int run() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    do run_group();
    while (wait_for_restart());
    print_story();
    deliver_output();
    return status_;
  }

 private:
  /// Starts the ranks and returns when no process of theirs is left.
  void run_group() {
    in_group_ = true;
    started_ = std::chrono::steady_clock::now();
    restart_after_.reset();
    first_failed_.reset();
    report_until_.reset();
    suspects_.clear();
    failed_.clear();
    kill_at_.reset();
    status_ = 0;
    start();
    while (ranks_->any_process_alive()) poll_once();
    ranks_->reap();  // those that ended since
    ranks_->finish_output();
    log_messages();
    flush();
    in_group_ = false;
  }

  void start() {
    Job job;
    job.options = options_;
    job.run_id = run_id_;
    job.restarts = restarts_.restarts();
    job.launch = job.restarts ? random_id() : run_id_;
    job.local_ranks = options_.ranks;
    job.devices = options_.devices;
    job.master_port = options_.master_port;
    if (!options_.master_addr.empty()) job.master_addr = options_.master_addr;
    job.processors = processors_;
    try {
      if (!job.master_port && options_.nodes.empty()) job.master_port = free_port();
      ranks_->start(job, [&] {
        handle_signals();
        return !stopped_by_;
      });
    } catch (...) {
      fail_start(start_failure_of(std::current_exception(), options_.command.front()));
    }
  }

  void fail_start(const StartFailure& failure) {
    if (stopped_by_ || first_failed_) return;
    log_error(failure.text);
    status_ = failure.status;
    restart_after_.reset();
    end_all();
  }

  /// Waits once for the next event: output, the end of a process, a signal, a reader, or the end of a period.
  void poll_once() {
    wait_for_events(poll_timeout_ms());
    handle_signals();
    const auto ends = ranks_->reap();
    log_messages();
    for (const RankEnd& end : ends)
      if (end.status.failed()) options_.nodes.empty() ? report(end) : suspect(end);
    if (!suspects_.empty() && (decide_at_->expired() || ranks_->running().empty())) decide();
    if (const auto failure = ranks_->start_failure()) fail_start(*failure);
    ranks_->forward_output();
    log_messages();
    flush();
    if (report_until_ && report_until_->expired()) end_all();
    if (kill_at_ && kill_at_->expired()) kill_all();
    if (!kill_at_ && ranks_->running().empty()) end_leftovers();
  }

  void wait_for_events(int timeout_ms) {
    std::vector<pollfd> wait{{signals_.get(), POLLIN, 0}};
    for (const Console* c : {&stdout_, &errors()}) wait.push_back({c->fd(), POLLOUT, 0});
    ranks_->append_descriptors(wait);
    if (const int most = ranks_->wait_ms(); most >= 0)
      timeout_ms = timeout_ms < 0 ? most : std::min(timeout_ms, most);
    if (::poll(wait.data(), wait.size(), timeout_ms) < 0 && errno != EINTR) fail_errno("poll");
  }

  /// After the grace period poll periodically, since dying processes may leave orphans to kill.
  int poll_timeout_ms() const {
    if (!kill_at_ && !suspects_.empty()) return decide_at_->poll_ms(60000);
    if (!kill_at_) return report_until_ ? report_until_->poll_ms(60000) : -1;
    return kill_at_->expired() ? 20 : kill_at_->poll_ms(60000);
  }

  /// Writes what the readers accept.
  void flush() {
    stdout_.flush();
    const int error = stdout_.error();
    if (error && error != EPIPE && error != EBADF && !std::exchange(stdout_failed_, true))
      log_error(concat("standard output: ", std::strerror(error), "; the ranks' output is not printed"));
    errors().flush();
  }

  std::size_t pending() {
    return stdout_.pending().size() + (own_stderr_ ? own_stderr_->pending().size() : 0);
  }

  /// Waits until the readers have accepted all output. A signal that ends the job limits the wait.
  void deliver_output() {
    const bool was_urgent = !urgent_.empty();
    const auto time = was_urgent ? reader_time_if_urgent : std::min(options_.grace, reader_time);
    ended_ = true;
    std::optional<Deadline> end;
    for (std::size_t left = pending(), before = 0; left > 0; before = left, left = pending()) {
      if (stopped_by_ && (!end || left < before)) end = Deadline::after(time);
      wait_for_events(end ? end->poll_ms(60000) : -1);
      handle_signals();
      flush();
      if ((end && end->expired()) || (!was_urgent && !urgent_.empty())) return drop_output();
    }
  }

  void drop_output() {
    const std::size_t bytes = pending();
    std::size_t lines = 0;
    if (bytes == 0) return;
    for (Console* c : {&stdout_, own_stderr_ ? &*own_stderr_ : nullptr}) {
      if (!c) continue;
      lines += static_cast<std::size_t>(std::ranges::count(c->pending(), '\n'));
      c->drop();
    }
    log_error(concat("SIG", sigabbrev_np(stopped_by_), ": ", bytes, " bytes (", lines,
                     " lines) of output are dropped, since nothing reads them"));
  }

  /// Standard output and standard error may be one pipe or terminal, whose lines then stay whole.
  Console& errors() { return own_stderr_ ? *own_stderr_ : stdout_; }

  void log_messages() {
    for (const std::string& line : ranks_->messages()) log_error(line);
  }

  void log_error(const std::string& line) {
    errors().write("rzrun: " + line + "\n");
    errors().flush();
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
    auto& forwarded = s == SIGUSR1 ? usr1_ : usr2_;
    if (forwarded && !forwarded->expired()) return;
    forwarded.reset();
    if (in_group_ && ranks_->signal_handlers(s))
      forwarded = Deadline::after(one_signal);
    else
      log_error(concat("SIG", sigabbrev_np(s), ": not forwarded, since no rank has a handler for it"));
  }

  void stop(int s) {
    const auto now = std::chrono::steady_clock::now();
    if (stopped_by_) {
      if (now - stopped_at_ < one_signal) return;
      urgent_ = concat("SIG", sigabbrev_np(s), " once more");
      kill_at_ = Deadline::after({});
    } else {
      log_error(concat(
          "SIG", sigabbrev_np(s),
          ended_
              ? concat(": waiting for the reader of ", pending(), " bytes of output (once more drops them)")
              : concat(": ending ", options_.ranks, " ranks (once more kills them at once)")));
      stopped_by_ = s;
      stopped_at_ = now;
      if (!status_ || restart_after_) status_ = 128 + s;
      restart_after_.reset();
    }
    end_all();
  }

  /// Ends of ranks on several hosts arrive in any order. One that exits because a peer is lost must not hide
  /// that peer, so an exit is not taken for the first failure until a moment later.
  void suspect(const RankEnd& end) {
    if (first_failed_ || stopped_by_ || kill_at_) return report(end);
    if (suspects_.empty()) decide_at_ = Deadline::after(time_to_report(end.status));
    suspects_.push_back(end);
    if (end.status.signal || !end.lost.empty()) decide();
  }

  void decide() {
    const auto score = [](const RankEnd& e) { return !e.lost.empty() ? 2 : e.status.signal ? 1 : 0; };
    const auto first = std::ranges::max_element(suspects_, {}, score);  // of equal ones the earliest
    std::rotate(suspects_.begin(), first, first + 1);
    for (const RankEnd& end : std::exchange(suspects_, {})) report(end);
    if (report_until_ && decide_at_->expired()) report_until_ = decide_at_;  // they have had their time
  }

  void report(const RankEnd& end) {
    if (stopped_by_) return;
    if (!end.lost.empty()) is_host_lost_ = true;
    failed_.push_back(end);
    if (first_failed_) {
      const bool ended = end.status.signal == SIGTERM || end.status.signal == SIGKILL;
      if (!end.lost.empty())
        log_error(concat(describe_loss(end), " after that"));
      else if (!ended && end.status != *first_failed_)
        log_error(concat("rank ", end.rank, on_host(end), " ", describe(end.status), " after that"));
      return;
    }
    if (kill_at_) return;
    first_failed_ = end.status;
    status_ = end.status.shell_status();
    if (!is_host_lost_)
      restart_after_ = restarts_.next(end.status, std::chrono::steady_clock::now() - started_);
    const std::string what = end.lost.empty()
                                 ? concat("rank ", end.rank, " of ", options_.ranks, on_host(end),
                                          " failed first: ", describe(end.status), oom_hint(end))
                                 : describe_loss(end);
    log_error(concat(what, restart_hint(end), end.lost.empty() ? log_hint(end.rank) : ""));
    report_until_ = Deadline::after(time_to_report(end.status));
  }

  /// The last line: why the job failed, once more, where ranks have printed after the first failure or have
  /// left a report. It is the first failure, or that of the rank that its report blames. With
  /// TORCHELASTIC_ERROR_FILE the line is rzrun's own report, for a launcher that started it.
  void print_story() {
    if (failed_.empty() || stopped_by_) return;
    auto cause = failed_.begin();
    const auto blamed = std::ranges::find(failed_, cause->culprit, &RankEnd::rank);
    if (cause->culprit >= 0 && blamed != failed_.end()) cause = blamed;
    std::string line = cause->lost.empty()
                           ? concat("rank ", cause->rank, " of ", options_.ranks, on_host(*cause), " ",
                                    describe(cause->status), oom_hint(*cause))
                           : describe_loss(*cause);
    if (!cause->error.empty()) line += ": " + cause->error;
    std::ranges::replace(line, '\n', ' ');
    if (!cause->error.empty() || (failed_.size() > 1 && !options_.nodes.empty()))
      log_error("first failure: " + line);
    if (const char* path = std::getenv("TORCHELASTIC_ERROR_FILE"); path && *path)
      write_error_file(path, line, status_);
  }

  static std::string on_host(const RankEnd& end) {
    return end.host.empty() ? "" : concat(" on host ", end.host);
  }

  static std::string describe_loss(const RankEnd& end) {
    return concat("host ", end.host, " is lost: ", end.lost);
  }

  static std::string oom_hint(const RankEnd& end) {
    return end.memory_kill
               ? "; the kernel's out-of-memory killer struck meanwhile: use less memory or fewer ranks"
               : "";
  }

  std::string restart_hint(const RankEnd& end) const {
    if (restarts_.max_restarts() == 0) return "";
    const ExitStatus& f = end.status;
    if (!end.lost.empty()) return "; no restart: a host is gone";
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
    const std::size_t left = ranks_->leftovers();
    if (left == 0) return;
    if (!first_failed_)
      log_error(
          concat("ending ", left, left == 1 ? " process" : " processes", " that the ranks left behind"));
    end_all();
  }

  void end_all() {
    if (!in_group_) return;
    if (!kill_at_) {
      kill_at_ = Deadline::after(options_.grace);
      killed_ = false;
      ranks_->signal_all(SIGTERM);
    } else if (kill_at_->expired()) {
      kill_all();
    }
  }

  void kill_all() {
    const auto running = ranks_->running();
    if (!killed_ && !running.empty())
      log_error(concat(ranks_have(running), " not ended since SIGTERM: SIGKILL (",
                       urgent_.empty() ? "--grace " + seconds(options_.grace) : urgent_, ")"));
    killed_ = true;
    ranks_->signal_all(SIGKILL);
  }

  /// Waits out the pause before a restart; false if there is to be none.
  bool wait_for_restart() {
    if (!restart_after_) return false;
    const Deadline end = Deadline::after(*restart_after_);
    while (restart_after_ && !end.expired()) {
      wait_for_events(end.poll_ms(60000));
      handle_signals();
      ranks_->reap();
      flush();
    }
    return restart_after_.has_value();
  }

  const Options& options_;
  const std::vector<std::vector<int>> processors_;
  UniqueFd signals_;
  bool is_host_lost_ = false;
  Console stdout_{STDOUT_FILENO};
  std::optional<Console> own_stderr_;
  std::unique_ptr<Ranks> ranks_;  // after the consoles that it has
  bool stdout_failed_ = false;
  RestartPolicy restarts_;
  const std::string run_id_ = random_id();
  int status_ = 0;
  int stopped_by_ = 0;  // the signal that requested the end of the job
  std::chrono::steady_clock::time_point stopped_at_;
  std::string urgent_;                   // not empty: the later signal that requested the end at once
  std::optional<Deadline> usr1_, usr2_;  // until then the same signal is not forwarded again
  bool ended_ = false;                   // only output is left

  // Of the latest group.
  bool in_group_ = false;  // false during the pause before a restart
  std::chrono::steady_clock::time_point started_;
  std::optional<std::chrono::milliseconds> restart_after_;
  std::optional<ExitStatus> first_failed_;
  std::optional<Deadline> report_until_;
  std::vector<RankEnd> failed_;        // the first failure, and those after it
  std::vector<RankEnd> suspects_;      // failures of which one will be the first
  std::optional<Deadline> decide_at_;  // while there are some
  std::optional<Deadline> kill_at_;    // set: the group is being ended
  bool killed_ = false;
};

}  // namespace

int supervise(const Options& options) {
  if (options.agent) return run_agent();
  if (options.dry_run) return print_help(describe_plan(options));
  return Supervisor(options).run();
}

}  // namespace rz::rzrun
