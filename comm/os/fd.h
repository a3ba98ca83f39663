#pragma once
/// Owner of a file descriptor, and the limit of open files (RLIMIT_NOFILE).

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

namespace rz {

/// The descriptor, or a duplicate above those of standard input, output and error. A process may have closed
/// these, as daemons do, and still print: its text must not reach a file or socket of this library.
inline int above_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int above = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (above < 0) return fd;
  ::close(fd);
  return above;
}

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(above_standard(fd)) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) close(), fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~UniqueFd() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

/// Open files of this process, and how many it may have.
struct OpenFiles {
  std::size_t open = 0, soft = 0, hard = 0;
  /// How many must be permitted for `more` additional files: these, those that are open, and a small reserve.
  std::size_t needed(std::size_t more) const { return open + more + reserve; }
  static constexpr std::size_t reserve = 32;
};
OpenFiles open_files();

/// Ensures that `more` additional files, plus a small reserve, can be open: raises the soft limit if
/// necessary and never lowers it. Errc::system names `what` and the numbers if the hard limit is too low; the
/// message ends with `advice`.
void require_open_files(std::size_t more, const std::string& what, const std::string& advice = {});

}  // namespace rz
