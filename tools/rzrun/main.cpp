// rzrun itself: what its command line asks for, and the supervisor of the ranks.

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
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "tools/command_line/command_line.h"
#include "tools/rzrun/agents/agent.h"
#include "tools/rzrun/agents/agent_group.h"
#include "tools/rzrun/agents/joined_agent.h"
#include "tools/rzrun/agents/joined_group.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/ranks/error_file.h"
#include "tools/rzrun/ranks/first_failure.h"
#include "tools/rzrun/ranks/keeper.h"
#include "tools/rzrun/ranks/launch.h"
#include "tools/rzrun/ranks/output.h"
#include "tools/rzrun/ranks/rank_group.h"
#include "tools/rzrun/ranks/restart_policy.h"

namespace rz::rzrun {
namespace {

/// Signals of one kind that arrive within this time are one: timeout(1) signals rzrun and then the process
/// group of both, and a terminal that closes sends several.
constexpr std::chrono::seconds one_signal{1};

/// Once a signal has requested the end and no rank is left, the output waits so long for its reader.
constexpr std::chrono::milliseconds reader_time{5000}, reader_time_if_urgent{500};

/// Once the group is being ended after a failure, the user learns after this time what it waits for.
constexpr std::chrono::seconds silent_end{1};

const char* has_or_have(const std::vector<int>& ranks) { return ranks.size() == 1 ? " has" : " have"; }

class Supervisor {
 public:
  /// `listeners`: of node 0 of a job that the user starts on each host.
  explicit Supervisor(const JobSpec& spec, std::vector<UniqueFd> listeners = {})
      : spec_(spec),
        // Before signals are blocked, so that they end a slow look-up.
        processors_(spec.hosts.nodes.empty() ? bindings(spec.program, spec.hosts.ranks)
                                             : std::vector<std::vector<int>>()),
        signals_(block_signals()),
        restarts_(spec.max_restarts),
        run_id_(spec.run_id.empty() ? random_id() : spec.run_id),
        failures_(spec.hosts.are_several()) {
    if (!is_same_stream(STDOUT_FILENO, STDERR_FILENO)) own_stderr_.emplace(STDERR_FILENO);
    if (spec.hosts.rendezvous)
      ranks_ = std::make_unique<JoinedGroup>(spec, std::move(listeners), stdout_, errors());
    else if (spec.hosts.nodes.empty())
      ranks_ = std::make_unique<RankGroup>(stdout_, errors());
    else
      ranks_ = std::make_unique<AgentGroup>(spec, stdout_, errors());
  }

  int run() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    do run_group();
    while (wait_for_restart());
    report_cause();
    ranks_->end(status_, reason_);
    deliver_output();
    return status_;
  }

 private:
  /// Starts the ranks and returns when no process of theirs is left.
  void run_group() {
    in_group_ = true;
    started_ = std::chrono::steady_clock::now();
    restart_after_.reset();
    failures_.begin();
    notice_at_.reset();
    kill_at_.reset();
    status_ = 0;
    start();
    while (ranks_->any_process_alive()) poll_once();
    ranks_->advance();  // those that ended since
    ranks_->finish_output();
    log_messages();
    if (failures_.is_known() && !start_failed_) {  // else the ranks ended because of the start
      if (!stopped_by_) take_lost_host();
      print_story();
    }
    flush();
    in_group_ = false;
  }

  static FirstFailure::Clock::time_point now() { return FirstFailure::Clock::now(); }

  void start() {
    Job job;
    job.program = spec_.program;
    job.output = spec_.output;
    job.ranks = job.local_ranks = spec_.hosts.ranks;
    job.max_restarts = spec_.max_restarts;
    job.grace = spec_.grace;
    job.run_id = run_id_;
    job.restarts = restarts_of_group_ = restarts_.restarts();
    job.launch = job.restarts || !spec_.run_id.empty() ? random_id() : run_id_;
    job.devices = spec_.hosts.devices;
    job.master_port = spec_.hosts.master_port;
    if (!spec_.hosts.master_addr.empty()) job.master_addr = spec_.hosts.master_addr;
    job.processors = processors_;
    try {
      if (!job.master_port && !failures_.has_several_hosts()) job.master_port = free_port();
      ranks_->start(job, [&] {
        handle_signals();
        return !stopped_by_;
      });
    } catch (...) {
      fail_start(start_failure_of(std::current_exception(), spec_.program.command.front()));
    }
  }

  void fail_start(const StartFailure& failure) {
    if (stopped_by_ || failures_.is_known()) return;
    log_error(failure.text);
    start_failed_ = true;
    reason_ = failure.text;
    status_ = failure.status;
    restart_after_.reset();
    end_all();
  }

  /// Waits once for the next event: output, the end of a process, a signal, a reader, or the end of a period.
  void poll_once() {
    wait_for_events(poll_timeout_ms());
    handle_signals();
    const auto ends = ranks_->advance();
    log_messages();
    if (const auto request = ranks_->stop_request()) stop(request->signal, request->where);
    for (const RankEnd& end : ends)
      if (end.status.failed() || end.state) take_failure(end);
    if (!stopped_by_) failures_.decide(!ranks_->running().empty(), kill_at_.has_value(), now());
    if (const auto first = failures_.take()) take_first(*first);
    if (const auto failure = ranks_->start_failure()) fail_start(*failure);
    ranks_->forward_output();
    log_messages();
    flush();
    if (failures_.is_reported(now())) end_all();
    if (notice_at_ && notice_at_->expired()) print_notice();
    if (kill_at_ && kill_at_->expired()) kill_all();
    if (!kill_at_ && ranks_->running().empty()) end_leftovers();
  }

  void wait_for_events(int timeout_ms) {
    std::vector<pollfd> wait{{signals_.get(), POLLIN, 0}};
    for (const Console* c : {&stdout_, &errors()}) wait.push_back({c->fd(), POLLOUT, 0});
    ranks_->append_descriptors(wait);
    if (const int longest = ranks_->wait_ms(); longest >= 0)
      timeout_ms = timeout_ms < 0 ? longest : std::min(timeout_ms, longest);
    if (::poll(wait.data(), wait.size(), timeout_ms) < 0 && errno != EINTR) fail_errno("poll");
  }

  /// After the grace period poll periodically, since dying processes may leave orphans to kill.
  int poll_timeout_ms() const {
    if (!kill_at_) {
      const auto next = failures_.next();
      return next ? Deadline::after(*next - now()).poll_ms(60000) : -1;
    }
    const int left = kill_at_->expired() ? 20 : kill_at_->poll_ms(60000);
    return notice_at_ ? std::min(left, notice_at_->poll_ms(60000)) : left;
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
    const auto time = was_urgent ? reader_time_if_urgent : std::min(spec_.grace, reader_time);
    ended_ = true;
    std::optional<Deadline> end;
    for (std::size_t left = pending(), before = 0; left > 0; before = left, left = pending()) {
      if (stopped_by_ && (!end || left < before)) end = Deadline::after(time);
      wait_for_events(end ? end->poll_ms(60000) : -1);
      handle_signals();
      ranks_->advance();
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
      else if (s == keeper_lost)
        lose_keeper();
      else if (s == SIGTSTP)
        ranks_->suspend();
      else if (s != SIGCHLD && s != SIGCONT)
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

  void stop(int s, const std::string& where = "") {
    const auto now = std::chrono::steady_clock::now();
    if (stopped_by_) {
      if (now - stopped_at_ < one_signal) return;
      urgent_ = concat("SIG", sigabbrev_np(s), where, " once more");
      kill_at_ = Deadline::after({});
    } else {
      reason_ = concat("SIG", sigabbrev_np(s), where, ended_ ? waiting_for_reader() : ending_ranks());
      log_error(reason_);
      stopped_by_ = s;
      stopped_at_ = now;
      if (!status_ || restart_after_) status_ = 128 + s;
      restart_after_.reset();
    }
    end_all();
  }

  /// As at a SIGKILL of rzrun, which its keeper has got: at once, and without a restart.
  void lose_keeper() {
    reason_ = concat("SIGKILL: killing ", ranks_->size(), " ranks");
    log_error(reason_);
    stopped_by_ = SIGKILL;
    stopped_at_ = std::chrono::steady_clock::now();
    status_ = 128 + SIGKILL;
    urgent_ = "SIGKILL";
    restart_after_.reset();
    kill_at_ = Deadline::after({});
    killed_ = true;  // the line above has it
    end_all();
  }

  std::string waiting_for_reader() {
    return concat(": waiting for the reader of ", pending(), " bytes of output (once more drops them)");
  }

  std::string ending_ranks() const {
    const int ranks = ranks_->size();
    return ranks ? concat(": ending ", ranks, " ranks (once more kills them at once)")
                 : ": no rank has started";
  }

  void take_failure(const RankEnd& end) {
    if (stopped_by_) return;
    failures_.add(end, kill_at_.has_value(), now());
  }

  /// What FirstFailure has decided ends the group; print_story() explains it then.
  void take_first(const RankEnd& first) {
    status_ = first.status.shell_status();
    if (ranks_->why_no_restart().empty())
      restart_after_ = restarts_.next(first.status, std::chrono::steady_clock::now() - started_);
    restart_hint_ = restart_hint(first);
  }

  /// Ranks may fail before it is known that the host of the peer that they blame is lost. The status is that
  /// of a lost host even then.
  void take_lost_host() {
    const RankEnd& cause = failures_.cause();
    if (cause.lost.empty()) return;
    status_ = cause.status.shell_status();
    if (!ranks_->why_no_restart().empty()) restart_after_.reset();
    restart_hint_ = restart_hint(cause);
  }

  /// Some ranks take their time to end: a save, or no reaction at all.
  void print_notice() {
    notice_at_.reset();
    const auto running = ranks_->running();
    if (running.empty() || stopped_by_) return;
    log_error(concat("a rank has failed; ", list_ranks(running), has_or_have(running), " got SIGTERM, and ",
                     seconds(spec_.grace), " to end (--grace)"));
  }

  /// Once the group has ended: what happened, with the first failure as the last line.
  void print_story() {
    if (const std::string stack = failures_.stack(); !stack.empty()) log_error(stack);
    for (const std::string& line : failures_.later()) log_error("after the first failure " + line);
    if (const std::string line = failures_.waits(); !line.empty()) log_error(line);
    log_error(concat("first failure: ", failures_.line(ranks_->size()), restart_hint_, log_hint()));
  }

  /// To the other hosts and, with TORCHELASTIC_ERROR_FILE, to a launcher that started rzrun.
  void report_cause() {
    const std::string line = failures_.line(ranks_->size());
    if (line.empty() || stopped_by_ || start_failed_) return;
    reason_ = "first failure: " + line;
    if (const char* path = std::getenv("TORCHELASTIC_ERROR_FILE"); path && *path)
      write_error_file(path, line, status_);
  }

  std::string restart_hint(const RankEnd& end) const {
    const std::string why = ranks_->why_no_restart();
    if (restarts_.max_restarts() > 0 && !why.empty()) return "; no restart: " + why;
    return restarts_.explain(end.status, restart_after_);
  }

  std::string log_hint() const {
    const RankEnd& end = failures_.cause();
    // Of several hosts only those know the local rank.
    const bool in_file = failures_.has_several_hosts()
                             ? !spec_.output.log_dir.empty() &&
                                   (spec_.output.files.of_all | spec_.output.tees.of_all) & Streams::err
                             : spec_.output.to_file(end.rank, Streams::err);
    if (!in_file || !end.lost.empty()) return "";
    return "; its log: " + log_path(spec_.output, restarts_of_group_, end.rank, "stderr");
  }

  void end_leftovers() {
    const std::size_t left = ranks_->leftovers();
    if (left == 0) return;
    if (!failures_.is_known())
      log_error(
          concat("ending ", left, left == 1 ? " process" : " processes", " that the ranks left behind"));
    end_all();
  }

  void end_all() {
    if (!in_group_) return;
    if (!kill_at_) {
      kill_at_ = Deadline::after(spec_.grace);
      killed_ = false;
      if (failures_.is_known()) notice_at_ = Deadline::after(silent_end);
      ranks_->signal_all(SIGTERM);
    } else if (kill_at_->expired()) {
      kill_all();
    }
  }

  void kill_all() {
    const auto running = ranks_->running();
    if (!killed_ && !running.empty())
      log_error(concat(list_ranks(running), has_or_have(running), " not ended since SIGTERM: SIGKILL (",
                       urgent_.empty() ? "--grace " + seconds(spec_.grace) : urgent_, ")"));
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
      ranks_->advance();
      flush();
    }
    return restart_after_.has_value();
  }

  const JobSpec& spec_;
  const std::vector<std::vector<int>> processors_;
  UniqueFd signals_;
  Console stdout_{STDOUT_FILENO};
  std::optional<Console> own_stderr_;
  std::unique_ptr<Ranks> ranks_;  // after the consoles that it has
  bool stdout_failed_ = false;
  RestartPolicy restarts_;
  int restarts_of_group_ = 0;
  const std::string run_id_;
  int status_ = 0;
  bool start_failed_ = false;
  std::string reason_;  // of a status that is not 0
  int stopped_by_ = 0;  // the signal that requested the end of the job
  std::chrono::steady_clock::time_point stopped_at_;
  std::string urgent_;                   // not empty: the later signal that requested the end at once
  std::optional<Deadline> usr1_, usr2_;  // until then the same signal is not forwarded again
  bool ended_ = false;                   // only output is left

  // Of the latest group.
  bool in_group_ = false;  // false during the pause before a restart
  std::chrono::steady_clock::time_point started_;
  std::optional<std::chrono::milliseconds> restart_after_;
  FirstFailure failures_;
  std::string restart_hint_;         // of the first failure
  std::optional<Deadline> kill_at_;  // set: the group is being ended
  std::optional<Deadline> notice_at_;
  bool killed_ = false;
};

int run(const JobSpec& spec) {
  if (!spec.hosts.rendezvous) return Supervisor(spec).run();
  auto listeners = listen_as_node0(*spec.hosts.rendezvous);
  if (listeners.empty()) {
    auto found = find_node0(*spec.hosts.rendezvous);
    if (auto* node0 = std::get_if<FrameStream>(&found)) return run_joined_agent(spec, std::move(*node0));
    listeners = std::get<std::vector<UniqueFd>>(std::move(found));
  }
  return Supervisor(spec, std::move(listeners)).run();
}

/// Starts the ranks, forwards their output, terminates all of them when one fails or a signal arrives, starts
/// them again as the options allow, and returns the exit status of rzrun. No process started by a rank
/// survives, and none of a group lives when the next group starts. Diagnostics go to standard error. Blocks
/// signals in the calling process; call it once, from a single-threaded process.
int supervise(const Options& options) {
  if (options.agent) return run_kept(run_agent);
  const JobSpec& spec = options.job;
  for (const auto& [name, value] : spec.program.variables)  // MASTER_PORT is one of the ranks' ports
    if (name == "RZ_PORTS") ::setenv("RZ_PORTS", value.c_str(), 1);
  environment();  // a wrong variable is refused before anything starts
  for (const std::string& note : options.remarks.notes) std::fprintf(stderr, "rzrun: %s\n", note.c_str());
  if (options.dry_run)
    return print_help(
        describe_plan(spec, options.remarks.plan, spec.hosts.rendezvous ? describe_node(spec.hosts) : ""));
  return run_kept([&] { return run(spec); });
}

}  // namespace
}  // namespace rz::rzrun

int main(int argc, char** argv) {
  const auto parse_arguments = [&] { return rz::rzrun::parse_options(argc, argv); };
  return rz::run_program("rzrun", parse_arguments, rz::rzrun::supervise);
}
