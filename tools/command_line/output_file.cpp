#include "tools/command_line/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"

namespace rz {

OutputFile::OutputFile(const std::string& flag, const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (!file_) fail(Errc::config, flag, " ", path, ": cannot be written: ", std::strerror(errno));
}

void OutputFile::hold(std::string_view text) {
  struct stat info {};
  if (::fstat(file_.get(), &info) == 0 && S_ISREG(info.st_mode)) write(text);
}

void OutputFile::write(std::string_view text) {
  struct stat info {};
  const bool is_regular = ::fstat(file_.get(), &info) == 0 && S_ISREG(info.st_mode);
  if (is_regular && ::lseek(file_.get(), 0, SEEK_SET) != 0) fail_errno("lseek", path_);
  std::string whole(text);  // a process that is killed before ftruncate() leaves empty lines behind the text
  if (is_regular) whole.resize(std::max(whole.size(), static_cast<std::size_t>(info.st_size)), '\n');
  for (std::string_view rest = whole; !rest.empty();) {
    const ssize_t n = ::write(file_.get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("write", path_);
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
  if (is_regular && ::ftruncate(file_.get(), static_cast<off_t>(text.size())) != 0)
    fail_errno("ftruncate", path_);
}

void OutputFile::try_write(std::string_view text) noexcept {
  try {
    write(text);
  } catch (const std::exception&) {
  }
}

}  // namespace rz
