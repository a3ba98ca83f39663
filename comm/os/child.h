#pragma once
/// One child process: how it starts, how it ends, and what is done to one that does not end. Not thread-safe.

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz {

/// What a child has that its parent has not.
struct ChildOptions {
  static constexpr int inherited = -1, null = -2;  // the parent's, /dev/null
  /// Descriptors of the parent that become standard input, output and error.
  int in = inherited, out = inherited, err = inherited;
  /// It leads a process group, so that Ctrl-C does not reach it. Signals of Child go to the group.
  bool own_group = false;
  /// The signal that it gets when the thread that started it ends; 0: none.
  int signal_if_orphaned = 0;
};

/// Owner of a child process, which is killed and waited for with this object.
class Child {
 public:
  Child() = default;
  /// Makes a process by fork(), where `main` runs; its result is the exit status, 1 if it throws. Nothing
  /// that C's streams hold is written at its end. Errc::system, with `name`, if there is no process.
  explicit Child(const std::function<int()>& main, const ChildOptions& = {}, const std::string& name = {});
  /// Takes over a child that has been started otherwise.
  Child(pid_t pid, bool own_group);
  Child(Child&& other) noexcept { *this = std::move(other); }
  Child& operator=(Child&& other) noexcept;
  ~Child() { kill(); }

  /// 0 once it is known to have ended.
  pid_t pid() const { return pid_; }
  /// Readable when it has ended; -1 if the kernel has no such descriptors.
  int pidfd() const { return pidfd_.get(); }
  /// Whether it has ended, without a wait, and without being waited for: its number and that of its group
  /// stay its own.
  bool is_over() const;
  /// Whether it has ended, without a wait.
  bool ended() { return wait(Deadline::after(std::chrono::seconds(0))); }
  /// Waits for its end. False if it is not there by the deadline.
  bool wait(Deadline);
  /// How it ended, as waitpid() has it; -1 if somebody else has waited for it.
  int status() const { return status_; }
  /// Unless it is known to have ended.
  void signal(int signal) const;
  /// SIGTERM, and SIGKILL if it does not end within `grace`.
  void end_within(std::chrono::milliseconds grace);
  /// In a process made by fork(): drops the parent's child, which goes on.
  void forget();
  /// SIGKILL; returns when it has ended, or after 10 s, if the kernel cannot end it.
  void kill();

 private:
  pid_t pid_ = 0;
  bool own_group_ = false;
  int status_ = 0;
  UniqueFd pidfd_;
};

/// A pipe, to read and to write, that exec closes.
std::pair<UniqueFd, UniqueFd> make_pipe();

/// Blocks no signal, and handles those as usual that this process may handle or ignore.
void default_signals();

using EnvironmentVariables = std::vector<std::pair<std::string, std::string>>;

/// Sets the variables and replaces this process by a program, which is looked up in PATH. Returns errno if
/// that fails.
int exec_program(const std::vector<std::string>& words, const EnvironmentVariables& = {});
/// The same. If it fails, says why on standard error and returns 127, a shell's exit status.
int exec_or_say(const std::vector<std::string>& words, const EnvironmentVariables& = {});

/// What a program prints on standard output until it closes that, until the deadline, or until it is 1 MiB;
/// it is then killed. Empty if it cannot be started.
std::string output_of(const std::vector<std::string>& words, Deadline);

}  // namespace rz
