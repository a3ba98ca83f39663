#include "tools/train_lm/report/tracker.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "comm/core/text.h"

extern char** environ;

namespace rz::train_lm {
namespace {

using TrackerClock = std::chrono::steady_clock;

/// write() of this thread without SIGPIPE, which is left to the program otherwise.
ssize_t write_without_signal(int pipe, const std::string& data) {
  sigset_t broken, before, pending;
  ::sigemptyset(&broken);
  ::sigaddset(&broken, SIGPIPE);
  ::sigpending(&pending);
  const bool was_pending = ::sigismember(&pending, SIGPIPE) == 1;
  ::pthread_sigmask(SIG_BLOCK, &broken, &before);
  const ssize_t written = ::write(pipe, data.data(), data.size());
  const int error = errno;
  if (written < 0 && error == EPIPE && !was_pending) {
    const timespec now{};
    while (::sigtimedwait(&broken, nullptr, &now) < 0 && errno == EINTR) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return written;
}

/// The process of `sh -c command`, whose standard input is `input`; below 0: errno is set.
pid_t spawn_shell(const std::string& command, int input) {
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none, usual;
  ::sigemptyset(&none);
  ::sigemptyset(&usual);
  for (const int s : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD})
    ::sigaddset(&usual, s);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &usual);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::string shell = "sh", flag = "-c", words = command;
  char* const arguments[] = {shell.data(), flag.data(), words.data(), nullptr};
  pid_t process = -1;
  const int error = ::posix_spawn(&process, "/bin/sh", &files, &attributes, arguments, environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  errno = error;
  return error == 0 ? process : -1;
}

}  // namespace

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Tracker::Tracker(const std::string& command, TrackerOptions options) : options_(options) {
  if (command.empty()) return;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    warn(concat("no pipe: ", std::strerror(errno), "; training goes on"));
    return;
  }
  process_ = spawn_shell(command, ends[0]);
  const int error = errno;
  ::close(ends[0]);
  pipe_ = ends[1];
  ::fcntl(pipe_, F_SETFL, O_NONBLOCK);
  if (process_ >= 0) return;
  warn(concat("cannot be started: ", std::strerror(error), "; training goes on"));
  close_pipe();
}

Tracker::~Tracker() {
  options_.patience = std::min(options_.patience, std::chrono::milliseconds(2'000));  // other ranks may wait
  end("failed", -1);
}

void Tracker::warn(const std::string& what) {
  if (std::exchange(warned_, true)) return;
  std::fprintf(stderr, "train_lm: warning: --track: %s\n", what.c_str());
}

void Tracker::close_pipe() {
  if (pipe_ >= 0) ::close(std::exchange(pipe_, -1));
  buffer_.clear();
}

void Tracker::flush() {
  while (!buffer_.empty()) {
    const ssize_t written = write_without_signal(pipe_, buffer_);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0) {
      warn("the command has ended or closed its input, and gets no more lines; training goes on");
      return close_pipe();
    }
    buffer_.erase(0, static_cast<std::size_t>(written));
  }
}

void Tracker::send(const char* event, const std::string& members) {
  if (!active()) return;
  const std::string line = concat(R"({"event": ")", event, R"(", )", members, "}\n");
  if (buffer_.size() + line.size() > options_.max_buffered)
    warn("the command does not read its input: lines are lost until it does; training goes on");
  else
    buffer_ += line;
  flush();
}

bool Tracker::reap(TrackerClock::time_point until) {
  for (int status = 0;; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
    const pid_t ended = ::waitpid(process_, &status, WNOHANG);
    if (ended == 0 && TrackerClock::now() < until) continue;
    if (ended == 0) return false;
    process_ = -1;
    if (ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) != 0)
      warn(concat("the command has ended with exit status ", WEXITSTATUS(status)));
    if (ended > 0 && WIFSIGNALED(status)) warn(concat("the command was ended by signal ", WTERMSIG(status)));
    return true;
  }
}

void Tracker::end(const char* reason, std::int64_t step) {
  const auto until = TrackerClock::now() + options_.patience;
  send("end", concat(step < 0 ? "" : concat(R"("step": )", step, ", "), R"("reason": ")", reason, '"'));
  while (active() && !buffer_.empty() && TrackerClock::now() < until) {
    pollfd room{.fd = pipe_, .events = POLLOUT, .revents = 0};
    ::poll(&room, 1, 20);
    flush();
  }
  close_pipe();
  if (process_ < 0 || reap(until)) return;
  warn(concat("the command has not ended within ",
              std::chrono::duration_cast<std::chrono::seconds>(options_.patience).count(),
              " s after its input, and is ended"));
  const pid_t process = process_;
  ::kill(-process, SIGTERM);
  if (reap(TrackerClock::now() + std::chrono::seconds(1))) return;
  ::kill(-process, SIGKILL);
  reap(TrackerClock::now() + std::chrono::seconds(1));
}

}  // namespace rz::train_lm
