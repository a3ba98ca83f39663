#include "sharding/io/durable_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "comm/core/error.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

class UniqueFd {
 public:
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  operator int() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail_on_disk(const std::string& path, const char* what) {
  fail(Errc::io, path, ": ", what, ": ", std::strerror(errno));
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// ".model.safetensors.ringzero-XXXXXX.tmp" with X in a-z and 0-9: no other program uses such names.
class TemporaryName {
 public:
  explicit TemporaryName(const std::string& path)
      : folder_(folder_of(path) + "/"), front_("." + fs::path(path).filename().string() + ".ringzero-") {}

  bool matches(std::string_view name) const {
    return name.size() == front_.size() + digits + back.size() && name.starts_with(front_) &&
           name.ends_with(back);
  }
  std::string in_folder(std::string_view name) const { return folder_ + std::string(name); }
  std::string fresh() const {
    constexpr std::string_view alphabet = "abcdefghijklmnopqrstuvwxyz0123456789";
    std::random_device random;
    std::string name = front_;
    for (std::size_t i = 0; i < digits; ++i) name += alphabet[random() % alphabet.size()];
    return in_folder(name + std::string(back));
  }

 private:
  static constexpr std::size_t digits = 6;
  static constexpr std::string_view back = ".tmp";
  std::string folder_, front_;
};

/// The lock is held while the file is open. The kernel releases it when the process ends.
bool lock(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB) == 0; }

bool is_linked(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_nlink > 0;
}

/// Removes temporary files of processes that were killed. Failures to remove one are ignored.
void sweep_stale(const std::string& folder, const TemporaryName& name) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    if (!name.matches(entry->d_name)) continue;
    const std::string path = name.in_folder(entry->d_name);
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file >= 0 && lock(file)) ::unlink(path.c_str());
  }
}

void sync_folder(const std::string& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd < 0) fail_on_disk(folder, "cannot be opened");
  // EINVAL: the file system does not support syncing a directory.
  if (::fsync(fd) != 0 && errno != EINVAL) fail_on_disk(folder, "cannot be synced");
}

std::string proc_fd_path(int fd) { return concat("/proc/self/fd/", fd); }

/// Opens a file without a name. Returns -1 where the file system does not support it or /proc is missing.
UniqueFd open_nameless(const std::string& folder) {
  UniqueFd fd(::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
  if (fd >= 0 && ::access(proc_fd_path(fd).c_str(), F_OK) != 0) fd = UniqueFd(-1);
  if (fd >= 0) lock(fd);  // before it has a name that another process may sweep
  return fd;
}

}  // namespace

struct DurableFile::State {
  explicit State(std::string p) : path(std::move(p)), folder(folder_of(path)), name(path) {}
  ~State() {
    if (!temporary.empty()) ::unlink(temporary.c_str());
  }

  /// Another process may remove the file between open() and lock(); then retry with another name.
  void open_named() {
    do {
      temporary = name.fresh();
      fd = UniqueFd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      if (fd < 0 && errno != EEXIST) {
        temporary.clear();
        fail_on_disk(path, "cannot be written beside");
      }
    } while (fd < 0 || (!lock(fd) && errno == EWOULDBLOCK) || !is_linked(fd));
  }

  /// linkat() cannot replace an existing file, rename() can. So the file gets a temporary name first.
  void link_temporary_name() {
    for (;;) {
      temporary = name.fresh();
      if (::linkat(AT_FDCWD, proc_fd_path(fd).c_str(), AT_FDCWD, temporary.c_str(), AT_SYMLINK_FOLLOW) == 0)
        return;
      const int reason = errno;
      temporary.clear();
      errno = reason;
      if (reason != EEXIST) fail_on_disk(path, "cannot be given its name");
    }
  }

  const std::string path, folder;
  const TemporaryName name;
  UniqueFd fd{-1};
  std::string temporary;  // empty: the file has no name
};

DurableFile::DurableFile(std::string path, Temporary temporary)
    : state_(std::make_unique<State>(std::move(path))) {
  State& s = *state_;
  sweep_stale(s.folder, s.name);
  if (temporary == Temporary::automatic) s.fd = open_nameless(s.folder);
  if (s.fd < 0) s.open_named();
}

DurableFile::~DurableFile() = default;

void DurableFile::write(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(state_->fd, from, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_on_disk(state_->path, "cannot be written");
    from += n, bytes -= static_cast<std::size_t>(n);
  }
}

void DurableFile::commit() {
  State& s = *state_;
  if (::fchmod(s.fd, 0644) != 0 || ::fsync(s.fd) != 0) fail_on_disk(s.path, "cannot be finished");
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
