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
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"

extern char** environ;

namespace rz::train_lm {
namespace {

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

/// `sh -c command`, whose standard input is `input`. Without fork(), which copies the page tables of all
/// memory, and after which memory that a child may read is not remapped.
Child spawn_shell(const std::string& command, int input) {
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
  if (error) fail_errno("posix_spawn", "/bin/sh");
  return Child(process, true);
}

}  // namespace

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Tracker::Tracker(const std::string& command, TrackerOptions options) : options_(options) {
  if (command.empty()) return;
  try {
    auto [read, write] = make_pipe();
    process_ = spawn_shell(command, read.get());
    pipe_ = std::move(write);
    ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
  } catch (const Error& e) {
    warn(concat("cannot be started: ", e.what(), "; training goes on"));
  }
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
  pipe_.close();
  buffer_.clear();
}

void Tracker::flush() {
  while (!buffer_.empty()) {
    const ssize_t written = write_without_signal(pipe_.get(), buffer_);
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

bool Tracker::has_ended(Deadline deadline) {
  if (!process_.wait(deadline)) return false;
  const int status = process_.status();
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
    warn(concat("the command has ended with exit status ", WEXITSTATUS(status)));
  if (WIFSIGNALED(status)) warn(concat("the command was ended by signal ", WTERMSIG(status)));
  return true;
}

void Tracker::end(const char* reason, std::int64_t step) {
  const auto until = Deadline::after(options_.patience);
  send("end", concat(step < 0 ? "" : concat(R"("step": )", step, ", "), R"("reason": ")", reason, '"'));
  while (active() && !buffer_.empty() && !until.expired()) {
    pollfd room{.fd = pipe_.get(), .events = POLLOUT, .revents = 0};
    ::poll(&room, 1, 20);
    flush();
  }
  close_pipe();
  if (has_ended(until)) return;
  warn(concat("the command has not ended within ",
              std::chrono::duration_cast<std::chrono::seconds>(options_.patience).count(),
              " s after its input, and is ended"));
  process_.end_within(std::chrono::seconds(1));
}

}  // namespace rz::train_lm
