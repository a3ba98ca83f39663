#include "tools/rzrun/ranks/output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "comm/core/text.h"

namespace rz::rzrun {

Console::Console(int fd) : fd_(fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  if (S_ISREG(status.st_mode)) kind_ = Kind::file;
  if (S_ISSOCK(status.st_mode)) kind_ = Kind::socket;
  if (!S_ISFIFO(status.st_mode) && !::isatty(fd)) return;
  // O_NONBLOCK belongs to the open file, which the ranks and a shell share, so it needs another one.
  own_ = UniqueFd(::open(concat("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (own_) kind_ = Kind::non_blocking;
}

void Console::write(std::string_view text) {
  if (!error_) queue_ += text;
}

void Console::flush() {
  while (!error_ && !pending().empty()) {
    const auto n = write_some(pending());
    if (n >= 0)
      written_ += static_cast<std::size_t>(n);
    else if (errno == EAGAIN)
      break;
    else if (errno != EINTR)
      error_ = errno;
  }
  if (error_ || pending().empty()) return drop();
  if (written_ < max_pending_bytes / 4) return;
  queue_.erase(0, written_);
  written_ = 0;
}

void Console::drop() {
  queue_.clear();
  written_ = 0;
}

std::string Console::take() {
  std::string all(pending());
  drop();
  return all;
}

void Console::close() {
  error_ = EPIPE;
  drop();
}

long Console::write_some(std::string_view text) {
  if (kind_ == Kind::socket) return ::send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (kind_ != Kind::other) return ::write(descriptor(), text.data(), text.size());
  pollfd writable{fd_, POLLOUT, 0};
  if (::poll(&writable, 1, 0) == 0) errno = EAGAIN;
  if (!writable.revents) return -1;
  // What polls as writable accepts this much without blocking.
  return ::write(fd_, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
}

bool is_same_stream(int fd, int other) {
  struct stat a {
  }, b{};
  if (::fstat(fd, &a) != 0 || ::fstat(other, &b) != 0) return false;
  return !S_ISREG(a.st_mode) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

Forwarder::Forwarder(UniqueFd pipe, Console* console, UniqueFd log, std::string prefix)
    : pipe_(std::move(pipe)), console_(console), log_(std::move(log)), prefix_(std::move(prefix)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

void Forwarder::pump() {
  if (!waits()) read_some();
}

void Forwarder::finish() {
  while (read_some()) {
  }
  pipe_.close();
  if (!partial_.empty()) print_line(partial_);
  partial_.clear();
}

bool Forwarder::read_some() {
  if (!pipe_) return false;
  char bytes[1 << 16];
  const auto n = ::read(pipe_.get(), bytes, sizeof bytes);
  if (n > 0) {
    forward({bytes, static_cast<std::size_t>(n)});
    return static_cast<bool>(pipe_);
  }
  if (n == 0) pipe_.close();
  return n < 0 && errno == EINTR;
}

void Forwarder::forward(std::string_view bytes) {
  for (auto rest = bytes; log_ && !rest.empty();) {
    const auto n = ::write(log_.get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {  // a full disk must not stop the job
      log_error_ = errno;
      log_.close();
    }
    rest.remove_prefix(n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  if (!console_) return;
  if (prefix_.empty()) return to_console(bytes);
  partial_ += bytes;
  print_lines();
}

void Forwarder::print_lines() {
  std::size_t begin = 0;
  for (std::size_t end; (end = partial_.find('\n', begin)) != std::string::npos; begin = end + 1)
    print_line(std::string_view(partial_).substr(begin, end - begin));
  partial_.erase(0, begin);
  if (partial_.size() >= max_line_bytes) {
    print_line(partial_);
    partial_.clear();
  }
}

void Forwarder::print_line(std::string_view line) {
  std::string text = prefix_;
  text.append(line).push_back('\n');
  to_console(text);
}

void Forwarder::to_console(std::string_view text) {
  if (!console_) return;
  console_->write(text);
  const int error = console_->error();
  if (error == 0) return;
  console_ = nullptr;
  // If the read end is closed, then without a log file closing the pipe gives the rank SIGPIPE, as without
  // rzrun. A full disk must not stop the job.
  if (!log_ && error == EPIPE) pipe_.close();
}

}  // namespace rz::rzrun
