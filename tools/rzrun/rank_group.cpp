#include "tools/rzrun/rank_group.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "comm/core/text.h"

namespace rz::rzrun {

void RankGroup::start(const Job& job, int rank) {
  ChildProcess p = launch(job, rank);
  const std::string prefix = job.options.prefix ? concat("[", rank, "] ") : "";
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

int RankGroup::log_error() {
  int error = 0;
  for (auto& f : forwarders_)
    if (const int e = f.log_error()) error = e;
  return error;
}

std::vector<const Rank*> RankGroup::reap() {
  std::vector<const Rank*> ended;
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
    for (auto& r : ranks_)
      if (r.pid == pid && !r.exit_status) {
        r.exit_status = exit_status_of_wait(status);
        ended.push_back(&r);
      }
  std::stable_partition(ended.begin(), ended.end(),
                        [](const Rank* r) { return r->exit_status->signal != 0; });
  return ended;
}

std::vector<int> RankGroup::running() const {
  std::vector<int> found;
  for (const auto& r : ranks_)
    if (!r.exit_status) found.push_back(r.rank);
  return found;
}

bool RankGroup::any_process_alive() const { return !running().empty() || !children().empty(); }

bool RankGroup::is_in_group_of_a_rank(const Process& p) const {
  return std::ranges::any_of(ranks_, [&](const Rank& r) { return r.pid == p.group; });
}

void RankGroup::signal_all(int signal) const {
  for (const auto& r : ranks_) ::kill(-r.pid, signal);
  for (const Process& p : processes())
    if (p.parent == ::getpid() && !is_in_group_of_a_rank(p)) ::kill(p.pid, signal);
  if (signal == SIGTERM)
    for (const auto& r : ranks_) ::kill(-r.pid, SIGCONT);  // a stopped process must handle SIGTERM too
}

bool RankGroup::signal_handlers(int signal) const {
  std::vector<pid_t> receivers;
  for (const Process& p : processes())
    if (is_in_group_of_a_rank(p) && handles_signal(p.pid, signal)) receivers.push_back(p.pid);
  // All at once, so that a signal reaches the ranks within one update of theirs.
  for (pid_t pid : receivers) ::kill(pid, signal);
  return !receivers.empty();
}

}  // namespace rz::rzrun
