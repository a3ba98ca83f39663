#include "tools/rzrun/ranks/rank_group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/flight_dump.h"
#include "comm/os/flight_recorder.h"
#include "comm/transport/flight_report.h"
#include "tools/rzrun/ranks/error_file.h"
#include "tools/rzrun/ranks/stack.h"

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

std::string list_ranks(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0, last; i < ranks.size(); i = last + 1) {
    for (last = i; last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1;) ++last;
    if (last - i < 2) last = i;  // three make a range
    text += concat(i ? ", " : " ", ranks[i], last > i ? concat(" to ", ranks[last]) : "");
  }
  return text;
}

std::string describe_end(const RankEnd& end) {
  return concat(describe(end.status), end.activity.empty() ? "" : "; ", end.activity,
                end.memory_kill
                    ? "; the kernel's out-of-memory killer struck meanwhile: start fewer ranks, or "
                      "raise the limit of the container or job (docker run --memory=SIZE, sbatch "
                      "--mem=SIZE); `plan` predicts what a rank needs"
                    : "");
}

namespace {

constexpr const char *folder_begin = "rzrun_", *lock_name = "lock";

/// False if there is no such folder.
bool is_full(const std::string& folder) {
  struct statvfs s {};
  return ::statvfs(folder.c_str(), &s) == 0 && s.f_blocks > 0 &&
         (::geteuid() == 0 ? s.f_bfree : s.f_bavail) == 0;
}

/// Removes the folders of error files that rzruns of this user left behind when they were killed. Each keeps
/// the file "lock" of its folder locked as long as it lives.
void remove_stale_folders(const std::filesystem::path& temporary) {
  std::error_code error;
  std::filesystem::directory_iterator at(temporary, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::filesystem::path folder = at->path();
    struct stat s {};
    if (!folder.filename().string().starts_with(folder_begin) || ::lstat(folder.c_str(), &s) != 0 ||
        !S_ISDIR(s.st_mode) || s.st_uid != ::geteuid())
      continue;
    const UniqueFd lock(::open((folder / lock_name).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    std::error_code ignored;
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) std::filesystem::remove_all(folder, ignored);
  }
}

/// The lock has its name only once it is held.
UniqueFd lock_folder(const std::string& folder) {
  const std::string name = folder + "/" + lock_name, before = name + ".new";
  UniqueFd lock(::open(before.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (!lock || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 || ::rename(before.c_str(), name.c_str()) != 0)
    return {};
  return lock;
}

/// For a rank that a signal has killed, and so cannot write them itself.
void write_last_calls(const flight::File& file, const std::string& how) noexcept try {
  if (const std::string& folder = environment().flight; !folder.empty()) flight::dump(file, folder, how);
} catch (const std::exception&) {  // the ranks report it
}

/// Which calls the rank was in, for a line about all ranks.
void set_calls(RankEnd& end, const std::vector<flight::Position>& positions, int ranks) {
  for (const flight::Position& p : positions) {
    const bool has_all = p.size == ranks;
    if (has_all) end.last_calls.emplace_back(p.communicator, p.number);
    if (!p.running || !end.call.empty()) continue;
    end.call = p.call;
    if (has_all) end.group = p.communicator;
  }
}

}  // namespace

void RankGroup::start(const Job& job, const std::function<bool()>& go_on) {
  ranks_.clear();
  forwarders_.clear();
  oom_.emplace();
  is_ending_ = false;
  log_error_ = 0;
  size_ = job.ranks;
  log_dir_ = job.output.log_dir;
  make_log_folder(job);
  choose_error_folder(job);
  Job with_folder = job;
  with_folder.error_folder = error_folder_;
  for (int r = 0; r < job.local_ranks && go_on(); ++r) start_rank(with_folder, r);
}

RankGroup::~RankGroup() {
  std::error_code error;
  if (!own_folder_.empty()) std::filesystem::remove_all(own_folder_, error);
}

/// Beside the log files, or in a folder that ends with the job. Without one the job runs all the same.
void RankGroup::choose_error_folder(const Job& job) {
  std::error_code error;
  if (!job.output.log_dir.empty()) {
    const auto log = std::filesystem::path(log_path(job.output, job.restarts, 0, "stdout"));
    error_folder_ = std::filesystem::absolute(log.parent_path(), error).string();
  } else if (own_folder_.empty()) {
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
    if (!error) remove_stale_folders(temporary);
    std::string name = (temporary / concat(folder_begin, "XXXXXX")).string();
    if (!error && ::mkdtemp(name.data())) {
      own_folder_ = error_folder_ = name;
      folder_lock_ = lock_folder(name);
    }
  }
  for (int r = 0; r < job.local_ranks && !error_folder_.empty(); ++r)
    std::filesystem::remove(error_path(error_folder_, job.first_rank + r), error);
}

void RankGroup::start_rank(const Job& job, int local_rank) {
  const int rank = job.first_rank + local_rank;
  ChildProcess p = launch(job, local_rank);
  const auto prefix = [&](int stream) {
    if (!job.host.empty()) return concat("[", job.host, ":", rank, "] ");
    return job.output.has_prefix(local_rank, stream) ? concat("[", rank, "] ") : "";
  };
  if (p.out) forwarders_.emplace_back(std::move(p.out), &stdout_, std::move(p.out_log), prefix(Streams::out));
  if (p.err) forwarders_.emplace_back(std::move(p.err), &stderr_, std::move(p.err_log), prefix(Streams::err));
  ranks_.push_back({rank, p.pid, std::move(p.pidfd), std::move(p.flight), {}});
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
  for (auto& f : forwarders_)
    if (const int error = f.log_error(); error && !log_error_) log_error_ = error;
  if (log_error_ <= 0) return {};
  return {concat("--log-dir ", log_dir_, ": ", std::strerror(std::exchange(log_error_, -1)),
                 "; output is missing in log files")};
}

std::vector<RankEnd> RankGroup::advance() {
  std::vector<RankEnd> ended;
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
    for (auto& r : ranks_)
      if (r.pid == pid && !r.exit_status) {
        r.exit_status = exit_status_of_wait(status);
        ended.push_back(end_of(r));
      }
  if (!ended.empty() && !log_error_ && is_full(log_dir_)) log_error_ = ENOSPC;
  std::ranges::stable_partition(ended, [](const RankEnd& e) { return e.status.signal != 0; });
  return ended;
}

/// With the report that the rank wrote, or with what it was doing; one that a signal killed gets a report
/// here.
RankEnd RankGroup::end_of(const Rank& r) const {
  RankEnd end{r.rank, *r.exit_status, "", r.exit_status->signal == SIGKILL && oom_->increased(), ""};
  end.state = r.state;
  if (!end.status.failed()) return end;
  const auto recorded = flight::read_file(r.flight.get());
  const flight::Report flight = recorded ? flight::read_report(*recorded) : flight::Report();
  if (recorded && (end.status.signal == SIGKILL || (end.status.signal && !is_ending_)))
    write_last_calls(*recorded, describe(end.status));
  set_calls(end, flight.positions, size_);
  const std::string path = error_folder_.empty() ? "" : error_path(error_folder_, r.rank);
  if (const auto report = path.empty() ? std::nullopt : read_error_file(path)) {
    end.error = report->message;
    end.culprit = report->culprit;
    return end;
  }
  end.activity = flight.activity;
  if (flight.signal && flight.signal == end.status.signal) end.stack = describe_stack(flight);
  if (!path.empty() && end.status.signal && !is_ending_)
    write_error_file(
        path,
        concat("rank ", r.rank, " ", describe_end(end), end.stack.empty() ? "" : "; its stack:\n", end.stack),
        0);
  return end;
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

/// A stopped process tells more of a rank than its other processes, which wait for it.
void RankGroup::note_states(const std::vector<Process>& all) {
  for (Rank& r : ranks_)
    for (const Process& p : all)
      if (!r.exit_status && p.group == r.pid && r.state != 'T' && (p.pid == r.pid || p.state == 'T'))
        r.state = p.state;
}

void RankGroup::signal_all(int signal) {
  const auto all = processes();
  if (!std::exchange(is_ending_, true)) note_states(all);
  for (const auto& r : ranks_) ::kill(-r.pid, signal);
  for (const Process& p : all)
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
