#include "tools/rzrun/rank_group.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"

namespace rz::rzrun {

StartFailure start_failure_of(const std::exception_ptr& thrown, const std::string& program) {
  try {
    std::rethrow_exception(thrown);
  } catch (const LaunchError& e) {
    return {e.error == ENOENT ? 127 : 126, concat("cannot start '", program, "': ", std::strerror(e.error))};
  } catch (const std::exception& e) {
    const auto* error = dynamic_cast<const Error*>(&e);
    if (error && error->code() == Errc::config) return {2, one_line(e)};
    return {1, concat("cannot start the ranks: ", one_line(e))};
  }
}

void RankGroup::start(const Job& job, const std::function<bool()>& go_on) {
  ranks_.clear();
  forwarders_.clear();
  oom_.emplace();
  log_dir_ = job.options.log_dir;
  make_log_folder(job);
  for (int r = 0; r < job.local_ranks && go_on(); ++r) start_rank(job, r);
}

void RankGroup::start_rank(const Job& job, int local_rank) {
  const int rank = job.first_rank + local_rank;
  ChildProcess p = launch(job, local_rank);
  std::string prefix;
  if (!job.host.empty())
    prefix = concat("[", job.host, ":", rank, "] ");
  else if (job.options.prefix)
    prefix = concat("[", rank, "] ");
  if (p.out) forwarders_.emplace_back(std::move(p.out), &stdout_, std::move(p.out_log), prefix);
  if (p.err) forwarders_.emplace_back(std::move(p.err), &stderr_, std::move(p.err_log), prefix);
  ranks_.push_back({rank, p.pid, std::move(p.pidfd), {}});
}

void RankGroup::append_descriptors(std::vector<pollfd>& wait) const {
  for (const auto& r : ranks_) wait.push_back({r.exit_status ? -1 : r.pidfd.get(), POLLIN, 0});
  for (const auto& f : forwarders_) wait.push_back({f.fd(), POLLIN, 0});
}

void RankGroup::forward_output() {
  for (auto& f : forwarders_) f.pump();
}

void RankGroup::finish_output() {
  for (auto& f : forwarders_) f.finish();
}

std::vector<std::string> RankGroup::messages() {
  std::vector<std::string> lines;
  for (auto& f : forwarders_)
    if (const int error = f.log_error())
      lines.push_back(concat("--log-dir ", log_dir_, ": ", std::strerror(error),
                             "; output is missing in a log file from here on"));
  return lines;
}

std::vector<RankEnd> RankGroup::reap() {
  std::vector<RankEnd> ended;
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
    for (auto& r : ranks_)
      if (r.pid == pid && !r.exit_status) {
        r.exit_status = exit_status_of_wait(status);
        const bool memory_kill = r.exit_status->signal == SIGKILL && oom_->increased();
        ended.push_back({r.rank, *r.exit_status, "", memory_kill, ""});
      }
  std::ranges::stable_partition(ended, [](const RankEnd& e) { return e.status.signal != 0; });
  return ended;
}

std::vector<int> RankGroup::running() const {
  std::vector<int> found;
  for (const auto& r : ranks_)
    if (!r.exit_status) found.push_back(r.rank);
  return found;
}

std::size_t RankGroup::leftovers() const { return children().size(); }
bool RankGroup::any_process_alive() const { return !running().empty() || !children().empty(); }

bool RankGroup::is_in_group_of_a_rank(const Process& p) const {
  return std::ranges::any_of(ranks_, [&](const Rank& r) { return r.pid == p.group; });
}

void RankGroup::signal_all(int signal) {
  for (const auto& r : ranks_) ::kill(-r.pid, signal);
  for (const Process& p : processes())
    if (p.parent == ::getpid() && !is_in_group_of_a_rank(p)) ::kill(p.pid, signal);
  if (signal == SIGTERM)
    for (const auto& r : ranks_) ::kill(-r.pid, SIGCONT);  // a stopped process must handle SIGTERM too
}

bool RankGroup::signal_handlers(int signal) {
  std::vector<pid_t> receivers;
  for (const Process& p : processes())
    if (is_in_group_of_a_rank(p) && handles_signal(p.pid, signal)) receivers.push_back(p.pid);
  // All at once, so that a signal reaches the ranks within one update of theirs.
  for (pid_t pid : receivers) ::kill(pid, signal);
  return !receivers.empty();
}

}  // namespace rz::rzrun
