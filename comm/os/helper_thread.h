#pragma once
/// Threads of the library.

#include <chrono>
#include <csignal>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace rz {

/// Scope in which the calling thread blocks every signal except synchronous faults (SIGSEGV, SIGBUS, SIGFPE,
/// SIGILL, SIGTRAP, SIGSYS). Threads created in the scope inherit the mask for their lifetime.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// Name of the calling thread in /proc/PID/task/TID/comm and in debuggers: at most 15 characters.
void name_this_thread(const char* name) noexcept;

/// Throws the error of helper_thread() for an errno value of pthread_create(3).
[[noreturn]] void fail_no_thread(int error);

/// Starts a thread that blocks signals, so that signal handlers of the embedding program run on that
/// program's threads. The library creates all its threads here. Errc::system names the limits if there can be
/// no more threads.
template <class F>
std::thread helper_thread(F&& f) {
  const SignalsBlocked blocked;
  try {
    return std::thread(std::forward<F>(f));
  } catch (const std::system_error& e) {
    fail_no_thread(e.code().value());
  }
}

/// Runs `f` in a new thread and returns true once it has returned. False if it has not within `limit`: it
/// then continues in the background, so `f` must own everything it accesses. `f` must not throw.
bool run_with_timeout(std::chrono::milliseconds limit, std::function<void()> f);

}  // namespace rz
