#include "sharding/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/os/fd.h"
#include "sharding/io/disk.h"
#include "sharding/io/temporary_name.h"
#include "sharding/io/text.h"

namespace rz {

struct InputFile::State {
  std::string path;
  UniqueFd fd;
  std::uint64_t size = 0;
};

InputFile InputFile::open(const std::string& path) {
  auto state = std::make_shared<State>();
  state->path = path;
  // O_NONBLOCK: the open of a named pipe would wait for a writer.
  state->fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!state->fd) fail_on_disk(path, "cannot be opened");
  struct stat info {};
  if (::fstat(state->fd.get(), &info) != 0) fail_on_disk(path, "cannot be read");
  require(S_ISREG(info.st_mode), Errc::io, escaped(path), ": not a regular file");
  state->size = static_cast<std::uint64_t>(info.st_size);
  InputFile file;
  file.state_ = std::move(state);
  return file;
}

const std::string& InputFile::path() const { return state_->path; }
std::uint64_t InputFile::size() const { return state_->size; }

void InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(state_->fd.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_on_disk(path(), "cannot be read");
    require(n > 0, Errc::io, escaped(path()), ": ends at byte ", offset, ", ", out.size(), " bytes early");
    out = out.subspan(static_cast<std::size_t>(n)), offset += static_cast<std::uint64_t>(n);
  }
}

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

  /// Writes to the end, or until the file system refuses a direct write. Returns what is left.
  std::string_view append(std::string_view bytes, bool direct) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && direct && errno == EINVAL) break;
      if (n < 0) fail_on_disk(path, "cannot be written");
      bytes.remove_prefix(static_cast<std::size_t>(n));
      size += static_cast<std::size_t>(n);
      if (direct) direct_bytes += static_cast<std::size_t>(n);
    }
    return bytes;
  }

  /// Whole blocks of the file, from memory that is aligned like them. Returns what is left.
  std::string_view append_direct(std::string_view blocks) {
    const int flags = ::fcntl(fd.get(), F_GETFL);
    if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags | O_DIRECT) != 0) return blocks;
    const std::string_view left = append(blocks, true);
    if (::fcntl(fd.get(), F_SETFL, flags) != 0) fail_on_disk(path, "cannot be written");
    return left;
  }

  const std::string path, folder;
  const TemporaryName name;
  UniqueFd fd;
  std::string temporary;  // empty: the file has no name
  std::size_t size = 0, direct_bytes = 0;
  bool may_be_direct = true;  // the file system has not refused it
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
  State& s = *state_;
  std::string_view rest(static_cast<const char*>(data), bytes);
  const std::size_t head = round_up(s.size, direct_alignment) - s.size;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(data) + head) % direct_alignment == 0;
  if (aligned && s.may_be_direct && bytes >= head + min_direct) {
    s.append(rest.substr(0, head), false);
    rest.remove_prefix(head);
    const std::size_t blocks = rest.size() / direct_alignment * direct_alignment;
    const std::size_t left = s.append_direct(rest.substr(0, blocks)).size();
    s.may_be_direct = left == 0;
    rest.remove_prefix(blocks - left);
  }
  s.append(rest, false);
}

std::size_t DurableFile::direct_bytes() const { return state_->direct_bytes; }

void DurableFile::commit() {
  State& s = *state_;
  if (::fchmod(s.fd.get(), 0644) != 0 || ::fsync(s.fd.get()) != 0) fail_on_disk(s.path, "cannot be finished");
  if (s.temporary.empty()) s.link_temporary_name();
  if (::rename(s.temporary.c_str(), s.path.c_str()) != 0) fail_on_disk(s.path, "cannot be given its name");
  s.temporary.clear();
  sync_folder(s.folder);
}

void write_durably(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(text);
  file.commit();
}

void copy_durably(const std::string& from, const std::string& to) {
  std::error_code absent;
  if (fs::equivalent(from, to, absent)) return;
  std::ifstream in(from, std::ios::binary);
  require(in.good(), Errc::io, from, ": cannot be opened");
  DurableFile out(to);
  std::vector<char> block(std::size_t{1} << 20);
  while (in.read(block.data(), static_cast<std::streamsize>(block.size())), in.gcount() > 0)
    out.write(block.data(), static_cast<std::size_t>(in.gcount()));
  require(in.eof(), Errc::io, from, ": cannot be read");
  out.commit();
}

void make_folders(const std::string& path) {
  std::vector<fs::path> above;  // parents of the missing directories
  std::error_code problem;
  for (fs::path p = fs::absolute(path, problem).lexically_normal();
       !path_exists(p.string()) && p != p.parent_path(); p = p.parent_path())
    above.push_back(p.parent_path());
  fs::create_directories(path, problem);
  require(!problem, Errc::io, path, ": cannot be made: ", problem.message());
  for (const auto& folder : above) sync_folder(folder.string());
}

// ---- folders

namespace {

/// Removes what killed processes left while they wrote this path.
void remove_stale_folders(const fs::path& path) {
  std::error_code problem;
  for (fs::directory_iterator entry(folder_of(path.string()), problem), end; !problem && entry != end;
       entry.increment(problem)) {
    if (LockedNames::name_of_lock(entry->path().filename().string()) != path.filename().string()) continue;
    if (auto names = LockedNames::of_killed(entry->path().string())) names->remove();
  }
}

void check_absent(const std::string& path) {
  std::error_code ignored;
  const bool empty =
      fs::is_directory(fs::symlink_status(path, ignored)) && fs::is_empty(path, ignored) && !ignored;
  require(empty || !path_exists(path), Errc::io, path, ": exists already; choose another name, or remove it");
}

/// Without a '/' at its end, which would hide the name.
std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

struct DurableFolder::State {
  explicit State(const std::string& p) : path(p), names(p), folder(names.partial()) {}
  ~State() {
    try {
      names.remove();
    } catch (const Error&) {  // the next one of this path tries again
    }
  }
  const std::string path;
  LockedNames names;
  const std::string folder;
};

DurableFolder::DurableFolder(const std::string& given) {
  const std::string path = without_slash(given);
  check_absent(path);
  make_folders(folder_of(path));
  remove_stale_folders(path);
  state_ = std::make_unique<State>(path);
  make_folders(state_->folder);
}

DurableFolder::~DurableFolder() = default;

const std::string& DurableFolder::folder() const { return state_->folder; }

void DurableFolder::commit() {
  check_absent(state_->path);
  rename_path(state_->folder, state_->path);
  sync_folder(folder_of(state_->path));
}

}  // namespace rz
