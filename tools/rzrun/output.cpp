#include "tools/rzrun/output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace rz::rzrun {

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

bool Console::write(std::string_view text) {
  while (!text.empty() && !closed_) {
    std::array<pollfd, 2> wait{{{fd_, POLLOUT, 0}, {interrupt_, POLLIN, 0}}};
    if (::poll(wait.data(), wait.size(), -1) < 0) continue;
    if (!wait[0].revents) return true;  // a signal is pending: drop the rest and handle it
    // A pipe that polls as writable accepts this much without blocking.
    const auto n = ::write(fd_, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (n >= 0)
      text.remove_prefix(static_cast<std::size_t>(n));
    else if (errno != EINTR && errno != EAGAIN)
      closed_ = true;
  }
  return !closed_;
}

Forwarder::Forwarder(UniqueFd pipe, Console* console, UniqueFd log, std::string prefix)
    : pipe_(std::move(pipe)), console_(console), log_(std::move(log)), prefix_(std::move(prefix)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

void Forwarder::pump() { read_some(); }

void Forwarder::finish() {
  while (read_some()) {
  }
  pipe_.reset();
  if (!partial_.empty()) print_line(partial_);
  partial_.clear();
}

bool Forwarder::read_some() {
  if (!pipe_) return false;
  char bytes[1 << 16];
  const auto n = ::read(pipe_.get(), bytes, sizeof bytes);
  if (n > 0) {
    forward({bytes, static_cast<std::size_t>(n)});
    return open();
  }
  if (n == 0) pipe_.reset();
  return n < 0 && errno == EINTR;
}

void Forwarder::forward(std::string_view bytes) {
  for (auto rest = bytes; log_ && !rest.empty();) {
    const auto n = ::write(log_.get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) log_.reset();  // a full disk must not stop the job
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
  if (!console_ || console_->write(text)) return;
  console_ = nullptr;
  // The read end is closed. Without a log file, closing the pipe gives the rank SIGPIPE, as without rzrun.
  if (!log_) pipe_.reset();
}

}  // namespace rz::rzrun
