#include "sharding/io/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/io/disk.h"
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

}  // namespace rz
