#include "sharding/io/durable_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/io/disk.h"
#include "sharding/io/temporary_name.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// Removes temporary files of processes that were killed. Failures to remove one are ignored.
void sweep_stale(const std::string& folder, const TemporaryName& name) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    if (!name.matches(entry->d_name)) continue;
    const std::string path = name.in_folder(entry->d_name);
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file && lock(file.get())) ::unlink(path.c_str());
  }
}

std::string proc_fd_path(int fd) { return concat("/proc/self/fd/", fd); }

/// Opens a file without a name. Returns -1 where the file system does not support it or /proc is missing.
UniqueFd open_nameless(const std::string& folder) {
  UniqueFd fd(::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
  if (fd && ::access(proc_fd_path(fd.get()).c_str(), F_OK) != 0) fd.close();
  if (fd) lock(fd.get());  // before it has a name that another process may sweep
  return fd;
}

}  // namespace

struct DurableFile::State {
  explicit State(std::string p) : path(std::move(p)), folder(folder_of(path)), name(path, ".tmp") {}
  ~State() {
    if (!temporary.empty()) ::unlink(temporary.c_str());
  }

  /// Another process may remove the file between open() and lock(); then retry with another name.
  void open_named() {
    do {
      temporary = name.fresh();
      fd = UniqueFd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      if (!fd && errno != EEXIST) {
        temporary.clear();
        fail_on_disk(path, "cannot be written beside");
      }
    } while (!fd || (!lock(fd.get()) && errno == EWOULDBLOCK) || !is_linked(fd.get()));
  }

  /// linkat() cannot replace an existing file, rename() can. So the file gets a temporary name first.
  void link_temporary_name() {
    for (;;) {
      temporary = name.fresh();
      if (::linkat(AT_FDCWD, proc_fd_path(fd.get()).c_str(), AT_FDCWD, temporary.c_str(),
                   AT_SYMLINK_FOLLOW) == 0)
        return;
      const int reason = errno;
      temporary.clear();
      errno = reason;
      if (reason != EEXIST) fail_on_disk(path, "cannot be given its name");
    }
  }

  const std::string path, folder;
  const TemporaryName name;
  UniqueFd fd;
  std::string temporary;  // empty: the file has no name
};

void remove_stale_temporary_files(const std::string& path) {
  sweep_stale(folder_of(path), TemporaryName(path, ".tmp"));
}

DurableFile::DurableFile(std::string path, Temporary temporary)
    : state_(std::make_unique<State>(std::move(path))) {
  State& s = *state_;
  sweep_stale(s.folder, s.name);
  if (temporary == Temporary::automatic) s.fd = open_nameless(s.folder);
  if (!s.fd) s.open_named();
}

DurableFile::~DurableFile() = default;

void DurableFile::write(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(state_->fd.get(), from, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_on_disk(state_->path, "cannot be written");
    from += n, bytes -= static_cast<std::size_t>(n);
  }
}

void DurableFile::commit() {
  State& s = *state_;
  if (::fchmod(s.fd.get(), 0644) != 0 || ::fsync(s.fd.get()) != 0) fail_on_disk(s.path, "cannot be finished");
  if (s.temporary.empty()) s.link_temporary_name();
  if (::rename(s.temporary.c_str(), s.path.c_str()) != 0) fail_on_disk(s.path, "cannot be given its name");
  s.temporary.clear();
  sync_folder(s.folder);
}

void make_folders(const std::string& path) {
  std::vector<fs::path> above;  // parents of the missing directories
  for (fs::path p = fs::absolute(path).lexically_normal(); !fs::exists(p) && p != p.parent_path();
       p = p.parent_path())
    above.push_back(p.parent_path());
  std::error_code problem;
  fs::create_directories(path, problem);
  require(!problem, Errc::io, path, ": cannot be made: ", problem.message());
  for (const auto& folder : above) sync_folder(folder.string());
}

}  // namespace rz
