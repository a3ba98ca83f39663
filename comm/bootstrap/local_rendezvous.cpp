#include "comm/bootstrap/local_rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "comm/bootstrap/machine_id.h"
#include "comm/core/error.h"
#include "comm/net/handshake.h"
#include "comm/net/random.h"
#include "comm/os/fd.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"

namespace rz {

namespace {

namespace fs = std::filesystem;

struct Process {
  std::string command, start;
  int parent = 0;
};

/// From /proc/<pid>/stat: "pid (command) state parent … start …".
std::optional<Process> find_process(int pid) {
  std::ifstream in(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  const auto open = line.find('('), close = line.rfind(')');
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  Process p{line.substr(open + 1, close - open - 1), "", 0};
  std::istringstream rest(line.substr(close + 1));
  std::string field;
  for (int i = 3; rest >> field; ++i) {
    if (i == 4) p.parent = std::atoi(field.c_str());
    if (i == 22) p.start = field;
  }
  return p;
}

/// 64-bit FNV-1a: job ids may contain characters that file names cannot.
std::string hash(const std::string& text) {
  std::uint64_t h = 0xcbf29ce484222325;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3;
  return concat(h);
}

bool is_ours(const fs::path& directory) {
  struct stat s {};
  return lstat(directory.c_str(), &s) == 0 && S_ISDIR(s.st_mode) && s.st_uid == geteuid() &&
         !(s.st_mode & 077);
}

/// Parent directory of the directories of all jobs.
fs::path base_directory() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  return runtime && is_ours(runtime) ? fs::path(runtime) : fs::temp_directory_path();
}

std::string job_prefix() { return concat("ringzero-", geteuid(), '-'); }

fs::path job_directory(const std::string& job) { return base_directory() / (job_prefix() + hash(job)); }

void make_private(const fs::path& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
    fail_errno("mkdir", concat(directory.string(), " (XDG_RUNTIME_DIR or TMPDIR can name another place)"));
  require(is_ours(directory), Errc::rendezvous, directory.string(),
          " belongs to another user, or other users may access it; remove it, or set XDG_RUNTIME_DIR or "
          "MASTER_ADDR");
}

/// Contents of the file "current".
struct Current {
  int pid = 0;
  std::string start, name, processes;
};

std::optional<Current> read_entry(const fs::path& file) {
  Current c;
  std::ifstream in(file);
  if (!(in >> c.pid >> c.start >> c.name >> c.processes)) return std::nullopt;
  return c;
}

bool is_alive(const Current& c) {
  const auto process = find_process(c.pid);
  return process && process->start == c.start;
}

std::optional<Current> read_current(const fs::path& directory) {
  auto c = read_entry(directory / "current");
  if (c && !is_alive(*c)) c.reset();
  return c;
}

/// Identifies the set of processes in which a pid is unique: machine and pid namespace.
std::string visible_processes() {
  std::error_code ignored;
  return concat(machine_id(), '/', fs::read_symlink("/proc/self/ns/pid", ignored).string());
}

void write_current(const fs::path& directory, const std::string& name) {
  const fs::path temporary = directory / ("new-" + name);
  std::ofstream out(temporary);
  out << getpid() << ' ' << find_process(getpid()).value_or(Process{}).start << ' ' << name << ' '
      << visible_processes() << '\n';
  out.close();
  require(static_cast<bool>(out), Errc::rendezvous, "cannot write ", temporary.string());
  fs::rename(temporary, directory / "current");
}

fs::path registered_name(const fs::path& place, int rank) { return place / concat("seat-", rank); }

bool register_rank(const fs::path& place, int rank) {
  const UniqueFd fd(
      open(registered_name(place, rank).c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  return static_cast<bool>(fd);
}

/// Calls `f` until it returns true; returns false at the deadline.
template <class F>
bool poll_until(Deadline deadline, const F& f) {
  for (unsigned polls = 0;; ++polls) {
    if (f()) return true;
    if (deadline.expired()) return false;
    local_rendezvous_backoff.wait(polls);
  }
}

/// Renames the directory before it removes its files, so that under its own name it always has all
/// registrations or does not exist. A restarted rank that still follows the old "current" thus cannot
/// register in it.
void remove_directory(const fs::path& directory, const std::string& name) noexcept {
  std::error_code ignored;
  const auto current = read_current(directory);
  if (current && current->name == name) fs::remove(directory / "current", ignored);
  const fs::path retired = directory / ("old-" + name);
  fs::rename(directory / name, retired, ignored);
  fs::remove_all(retired, ignored);
  fs::remove(directory, ignored);  // only if it is empty
}

/// Removes a job's files if the process that wrote "current" is dead. A new process of the same job may write
/// "current" at the same time.
void remove_stale_directories(const fs::path& directory, const std::string& visible) {
  const auto is_dead = [&](const std::optional<Current>& c) {
    return c && c->processes == visible && !is_alive(*c);
  };
  if (!is_dead(read_entry(directory / "current"))) return;
  const fs::path retired = directory / ("old-" + net::random_hex());
  std::error_code error;
  fs::rename(directory / "current", retired, error);
  if (error) return;
  const auto dead = read_entry(retired);
  if (!is_dead(dead)) return fs::rename(retired, directory / "current", error);
  fs::remove_all(directory / dead->name, error);
  fs::remove(retired, error);
  fs::remove(directory, error);  // only if it is empty
}

/// Removes the directories of killed jobs of this user. No other job uses such a directory.
void sweep_stale(const fs::path& base) {
  const std::string visible = visible_processes();
  std::error_code error;
  fs::directory_iterator entry(base, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    if (entry->path().filename().string().rfind(job_prefix(), 0) == 0 && is_ours(entry->path()))
      remove_stale_directories(entry->path(), visible);
}

std::shared_ptr<Store> root_store(const fs::path& directory, const std::string& job, int size,
                                  Deadline deadline) {
  sweep_stale(directory.parent_path());
  make_private(directory);
  if (!read_current(directory)) {  // files of a dead job
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(directory, ignored))
      fs::remove_all(entry.path(), ignored);
  }
  const std::string name = net::random_hex();
  make_private(directory / name);
  // From here on, the store's deleter removes the directory, also after an exception.
  const auto files = file_store((directory / name).string());
  const std::shared_ptr<Store> store(files.get(), [files, directory, name, creator = Creator()](Store*) {
    if (creator.is_this_process()) remove_directory(directory, name);
  });
  register_rank(directory / name, 0);
  write_current(directory, name);
  std::vector<int> missing;
  const bool complete = poll_until(deadline, [&] {
    missing.clear();
    for (int r = 1; r < size; ++r)
      if (!fs::exists(registered_name(directory / name, r))) missing.push_back(r);
    return missing.empty();
  });
  require(complete, Errc::timeout, "rank ", net::list_ranks(missing), " of ", size, " did not register in ",
          directory.string(), ", the rendezvous of job '", job, "', before the deadline");
  return store;
}

std::shared_ptr<Store> joining_rank_store(const fs::path& directory, const std::string& job, int rank,
                                          Deadline deadline) {
  fs::path place;
  const bool found = poll_until(deadline, [&] {
    const auto current = read_current(directory);
    if (!current || !is_ours(directory)) return false;
    place = directory / current->name;
    return register_rank(place, rank);
  });
  require(found, Errc::timeout, "rank 0 did not open ", directory.string(), ", the rendezvous of job '", job,
          "', before the deadline");
  return file_store(place.string());
}

}  // namespace

std::shared_ptr<Store> local_rendezvous_store(const std::string& job, int rank, int size, Deadline deadline) {
  const fs::path directory = job_directory(job);
  return rank == 0 ? root_store(directory, job, size, deadline)
                   : joining_rank_store(directory, job, rank, deadline);
}

std::string launcher_process_id() {
  for (int pid = getppid(); pid > 1;) {
    const auto process = find_process(pid);
    if (!process) break;
    if (process->command.rfind("hydra_pmi_prox", 0) == 0) return concat(pid, '/', process->start);
    pid = process->parent;
  }
  const auto parent = find_process(getppid());
  return concat(getppid(), '/', parent ? parent->start : "");
}

}  // namespace rz
