#pragma once
/// Threads of the library.

#include <csignal>
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

/// Starts a thread that blocks signals, so that signal handlers of the embedding program run on that
/// program's threads. The library creates all its threads here.
template <class F>
std::thread helper_thread(F&& f) {
  const SignalsBlocked blocked;
  return std::thread(std::forward<F>(f));
}

}  // namespace rz
