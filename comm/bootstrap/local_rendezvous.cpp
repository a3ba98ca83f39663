#include "comm/bootstrap/local_rendezvous.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <vector>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/handshake.h"
#include "comm/net/random.h"
#include "comm/os/fd.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"

namespace rz {

namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

std::string contents_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
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
  const auto runtime = environment_variable("XDG_RUNTIME_DIR");
  if (runtime && is_ours(*runtime)) return *runtime;
  std::error_code error;
  const fs::path temporary = fs::temp_directory_path(error);
  if (error) {
    fail(Errc::rendezvous, "the ranks of this host meet in a temporary directory, but TMPDIR='",
         environment_variable("TMPDIR").value_or(""), "' is none here (", error.message(),
         "); set TMPDIR or XDG_RUNTIME_DIR to a directory that they share, or set MASTER_ADDR and "
         "MASTER_PORT");
  }
  return temporary;
}

// Versions of the library that judged by process ids removed directories named "ringzero-…".
std::string job_prefix() { return concat("ringzero.", geteuid(), '.'); }

fs::path job_directory(const std::string& job) { return base_directory() / (job_prefix() + hash(job)); }

/// Another user has made something of this name, which can be guessed.
bool is_taken(const fs::path& directory) {
  struct stat s {};
  return lstat(directory.c_str(), &s) == 0 && s.st_uid != geteuid();
}

/// Where ranks look for a directory: at its name, or, if that is taken, at longer ones that are this user's.
std::vector<fs::path> candidates(const fs::path& directory) {
  if (!is_taken(directory)) return {directory};
  std::vector<fs::path> all;
  std::error_code error;
  fs::directory_iterator entry(directory.parent_path(), error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    if (entry->path().string().starts_with(directory.string() + ".") && is_ours(entry->path()))
      all.push_back(entry->path());
  return all;
}

/// Another process may remove the directory after it has been found to exist, hence several tries.
void make_private(const fs::path& directory) {
  for (int tries = 0; tries < 100; ++tries) {
    if (is_ours(directory)) return;
    if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
      fail_errno("mkdir", concat(directory.string(), " (XDG_RUNTIME_DIR or TMPDIR can name another place)"));
  }
  fail(Errc::rendezvous, directory.string(),
       " belongs to another user, or other users may access it; remove it, or set XDG_RUNTIME_DIR or "
       "MASTER_ADDR");
}

/// Returns false if another open file has the lock.
bool try_lock(int file, int operation, const fs::path& name) {
  while (flock(file, operation | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR)
      fail_errno("flock", concat(name.string(), " (XDG_RUNTIME_DIR or TMPDIR can name another place)"));
  }
  return true;
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

/// Locks the directory of a job while its contents change. Empty if there is none, or if another process has
/// the lock. The holder of a lock may have removed the directory, so the name must still be that of the file.
UniqueFd try_lock_directory(const fs::path& directory) {
  UniqueFd file(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat locked {
  }, named{};
  if (!file || !try_lock(file.get(), LOCK_EX, directory) || fstat(file.get(), &locked) != 0 ||
      stat(directory.c_str(), &named) != 0 || locked.st_ino != named.st_ino || locked.st_dev != named.st_dev)
    return {};
  return file;
}

/// A process, by its number in its own pid namespace.
struct ProcessName {
  std::string id, space;
  bool operator==(const ProcessName&) const = default;
};

ProcessName process_name() {
  std::error_code ignored;
  return {concat(getpid()), fs::read_symlink("/proc/self/ns/pid", ignored).string()};
}

/// Registration of a rank: a file that its process has locked while its store exists. The kernel removes the
/// lock with the process, in whichever namespace that is.
fs::path registration(const fs::path& place, int rank) { return place / concat("rank-", rank); }

/// Empty if the rank is registered already.
UniqueFd register_rank(const fs::path& place, int rank) {
  const fs::path name = registration(place, rank);
  UniqueFd file(open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (!file) {
    require(errno == EEXIST || errno == ENOENT, Errc::rendezvous, "cannot create ", name.string(), ": ",
            std::generic_category().message(errno));
    return {};
  }
  const auto [id, space] = process_name();
  const std::string text = concat(id, '\n', space, '\n');
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    fail_errno("write", name.string());
  poll_until(Deadline::after(seconds(10)), [&] { return try_lock(file.get(), LOCK_EX, name); });
  return file;
}

/// The process that is registered as this rank; nullopt if there is none, or if it has ended. A child of
/// fork() inherits the lock, and may outlive that process.
std::optional<ProcessName> registered_process(const fs::path& place, int rank) {
  const fs::path name = registration(place, rank);
  const UniqueFd file(open(name.c_str(), O_RDWR | O_CLOEXEC));
  if (!file || try_lock(file.get(), LOCK_SH, name)) return std::nullopt;
  const auto lines = parts_of(contents_of(name), '\n');
  if (lines.size() < 2) return std::nullopt;
  const ProcessName process{lines[0], lines[1]};
  const bool visible = process.space == process_name().space;
  if (visible && !process.space.empty() && kill(std::atoi(process.id.c_str()), 0) != 0 && errno == ESRCH)
    return std::nullopt;
  return process;
}

/// Contents of the file "current": the place where the ranks of the present program meet.
struct Current {
  std::string name, kernel, job;
};

std::optional<Current> read_current(const fs::path& directory) {
  const auto lines = parts_of(contents_of(directory / "current"), '\n');
  if (lines.size() < 4) return std::nullopt;
  return Current{lines[0], lines[1], lines[2]};
}

/// Locks are seen by all processes of one kernel. Those of another one may use the same directory.
bool is_foreign(const Current& c) { return c.kernel != kernel_boot_id(); }

void write_current(const fs::path& directory, const std::string& name, const std::string& job) {
  const fs::path temporary = directory / ("new-" + name);
  std::ofstream out(temporary, std::ios::binary);
  out << name << '\n' << kernel_boot_id() << '\n' << job << '\n';
  out.close();
  require(static_cast<bool>(out), Errc::rendezvous, "cannot write ", temporary.string());
  std::error_code error;
  fs::rename(temporary, directory / "current", error);
  require(!error, Errc::rendezvous, "cannot rename ", temporary.string(), " to current: ", error.message());
}

/// Removes a place, and the directory of the job if it has no other. Needs the lock of the directory. First
/// renames the place, so that under its own name it always has all registrations or does not exist: a late
/// rank that still follows an old "current" cannot register in it. "current" is removed last: a process that
/// is killed meanwhile leaves it, and a later rank 0 removes the rest.
void remove_place(const fs::path& directory, const std::string& name) noexcept {
  std::error_code ignored;
  const fs::path retired = directory / ("old-" + name);
  fs::rename(directory / name, retired, ignored);
  fs::remove_all(retired, ignored);
  const auto current = read_current(directory);
  if (current && current->name == name) fs::remove(directory / "current", ignored);
  fs::remove(directory, ignored);  // only if it is empty
}

void remove_contents(const fs::path& directory) noexcept {
  std::error_code ignored;
  std::vector<fs::path> entries;
  for (fs::directory_iterator at(directory, ignored), end; !ignored && at != end; at.increment(ignored))
    entries.push_back(at->path());
  const fs::path last = directory / "current";
  for (const fs::path& entry : entries)
    if (entry != last) fs::remove_all(entry, ignored);
  fs::remove(last, ignored);
}

/// True if no process uses the directory. Without "current", it may be that of another kernel's process which
/// is about to write it, so it must be old.
bool is_abandoned(const fs::path& directory) {
  if (const auto current = read_current(directory))
    return !is_foreign(*current) && !registered_process(directory / current->name, 0);
  struct stat s {};
  return lstat(directory.c_str(), &s) == 0 && s.st_mtime + 60 < time(nullptr);
}

/// Removes the directories of killed jobs of this user.
void sweep_stale(const fs::path& base) {
  std::error_code error;
  fs::directory_iterator entry(base, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path directory = entry->path();
    if (directory.filename().string().rfind(job_prefix(), 0) != 0 || !is_ours(directory)) continue;
    const UniqueFd lock = try_lock_directory(directory);
    if (!lock || !is_abandoned(directory)) continue;
    remove_contents(directory);
    std::error_code ignored;
    fs::remove(directory, ignored);
  }
}

[[noreturn]] void fail_registered(int rank, const ProcessName& process, const fs::path& directory,
                                  const std::string& job) {
  fail(
      Errc::rendezvous, "process ", process.id, " of ", process.space, " is rank ", rank, " of job '", job,
      "' already (", directory.string(), "), but process ", process_name().id, " of ", process_name().space,
      " has the same rank and job in its environment; a program that a rank starts must not inherit RANK and "
      "WORLD_SIZE, or those of its launcher: unset them; two jobs need identities of their own: set "
      "RZ_LAUNCH");
}

std::shared_ptr<Store> root_store(fs::path directory, const std::string& job, int size, Deadline deadline) {
  sweep_stale(directory.parent_path());
  const auto found = candidates(directory);
  directory = found.empty() ? fs::path(directory.string() + "." + net::random_hex()) : found.front();
  UniqueFd lock;
  require(poll_until(deadline,
                     [&] {
                       make_private(directory);
                       lock = try_lock_directory(directory);
                       return static_cast<bool>(lock);
                     }),
          Errc::timeout, "another process has locked ", directory.string(), ", the rendezvous of job '", job,
          "'");
  const auto current = read_current(directory);
  const auto process =
      current && !is_foreign(*current) ? registered_process(directory / current->name, 0) : std::nullopt;
  if (process && *process != process_name()) fail_registered(0, *process, directory, job);
  if (!process) remove_contents(directory);  // of a dead job
  const std::string name = net::random_hex();
  make_private(directory / name);
  // From here on, the store's deleter removes the directory, also after an exception.
  const auto files = file_store((directory / name).string());
  const auto registered = std::make_shared<UniqueFd>();
  const std::shared_ptr<Store> store(
      files.get(), [files, directory, name, registered, creator = Creator()](Store*) noexcept {
        if (!creator.is_this_process()) return;
        UniqueFd held;
        const auto remove = [&] {
          held = try_lock_directory(directory);
          return static_cast<bool>(held);
        };
        try {
          if (poll_until(Deadline::after(seconds(1)), remove)) remove_place(directory, name);
        } catch (const Error&) {  // a later rank 0 removes it
        }
      });
  *registered = register_rank(directory / name, 0);
  write_current(directory, name, job);
  lock.close();
  std::vector<int> missing;
  const bool complete = poll_until(deadline, [&] {
    missing.clear();
    for (int r = 1; r < size; ++r) {
      std::error_code ignored;
      if (!fs::exists(registration(directory / name, r), ignored)) missing.push_back(r);
    }
    return missing.empty();
  });
  if (!complete)
    throw Error(
        Errc::timeout,
        concat("rank ", net::list_ranks(missing), " of ", size, " did not register in ", directory.string(),
               ", the rendezvous of job '", job,
               "', before the deadline; did they start this program, and do they see this directory? A "
               "program that a rank starts by itself must not inherit RANK and WORLD_SIZE, or those of its "
               "launcher: unset them"),
        missing.front());
  return store;
}

std::shared_ptr<Store> joining_rank_store(const fs::path& directory, const std::string& job, int rank,
                                          Deadline deadline) {
  fs::path place;
  const auto registered = std::make_shared<UniqueFd>();
  const char* found = "it does not exist";
  const auto joins = [&](const fs::path& at) {
    const auto current = read_current(at);
    if (!current) return false;
    found = "it is that of another job";
    if (!is_ours(at) || current->job != job) return false;
    found = "it is that of another kernel's processes";
    if (is_foreign(*current)) return false;
    place = at / current->name;
    found = "its process has ended";
    if (!registered_process(place, 0)) return false;
    found = "this rank was registered there before";
    *registered = register_rank(place, rank);
    if (*registered) return true;
    const auto process = registered_process(place, rank);
    if (process && *process != process_name()) fail_registered(rank, *process, at, job);
    return false;
  };
  const bool joined = poll_until(deadline, [&] { return std::ranges::any_of(candidates(directory), joins); });
  if (!joined)
    throw Error(Errc::timeout,
                concat("rank 0 did not open ", directory.string(), ", the rendezvous of job '", job,
                       "', before the deadline: ", found, "; the ranks of a host must share this directory"),
                0);
  const auto files = file_store(place.string());
  return {files.get(), [files, registered](Store*) {}};
}

/// A process in the numbers of the file system that is mounted at /proc.
struct Process {
  int id = 0, parent = 0;
  std::string command, start;
};

/// From /proc/<process>/stat: "id (command) state parent … start …".
std::optional<Process> find_process(const std::string& process) {
  const std::string text = contents_of("/proc/" + process + "/stat");
  const auto open = text.find('('), close = text.rfind(')');
  if (open == text.npos || close == text.npos) return std::nullopt;
  const auto fields = parts_of(text.substr(close + 1), ' ');  // fields[1] is the third of the file
  if (fields.size() < 21) return std::nullopt;
  return Process{std::atoi(text.c_str()), std::atoi(fields[2].c_str()),
                 text.substr(open + 1, close - open - 1), fields[20]};
}

/// Name of a launcher's process that starts the ranks of a host; empty for any other process.
std::string launcher_name(const Process& process) {
  constexpr std::array launchers{
      "hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec", "mpirun",     "mpispawn", "orted",
      "prted",           "prterun",         "psid",    "flux-shell", "jsmd"};
  std::error_code ignored;
  const std::string program =
      fs::read_symlink(concat("/proc/", process.id, "/exe"), ignored).filename().string();
  for (const std::string& name : {program, process.command})
    for (const std::string launcher : launchers)
      if (name.rfind(launcher, 0) == 0) return name;
  return "";
}

}  // namespace

std::shared_ptr<Store> local_rendezvous_store(const std::string& job, int rank, int size, Deadline deadline) {
  require(job.find('\n') == job.npos, Errc::config, "the identity of the job holds a line break");
  const fs::path directory = job_directory(job);
  return rank == 0 ? root_store(directory, job, size, deadline)
                   : joining_rank_store(directory, job, rank, deadline);
}

LauncherProcess find_launcher_process() {
  auto process = find_process("self");
  while (process && process->parent > 0) {
    process = find_process(concat(process->parent));
    const std::string name = process ? launcher_name(*process) : "";
    if (name.empty()) continue;
    std::error_code error;
    const auto space = fs::read_symlink(concat("/proc/", process->id, "/ns/pid"), error).string();
    const std::string id = concat(kernel_boot_id(), '/', space, '/', process->id, '/', process->start);
    return {name, error || kernel_boot_id().empty() ? "" : id};
  }
  return {};
}

}  // namespace rz
