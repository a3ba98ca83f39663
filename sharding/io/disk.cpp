#include "sharding/io/disk.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/io/text.h"

namespace rz {

void fail_on_disk(const std::string& path, const char* what) {
  fail(Errc::io, escaped(path), ": ", what, ": ", std::strerror(errno));
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

bool path_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

void remove_path(const std::string& path) {
  std::error_code problem;
  std::filesystem::remove_all(path, problem);
  require(!problem, Errc::io, path, ": cannot be removed: ", problem.message());
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_on_disk(to, "cannot be given its name");
}

bool lock(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB) == 0; }

bool is_linked(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_nlink > 0;
}

void sync_folder(const std::string& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) fail_on_disk(folder, "cannot be opened");
  // EINVAL: the file system does not support syncing a directory.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail_on_disk(folder, "cannot be synced");
}

}  // namespace rz
