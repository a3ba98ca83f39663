#pragma once
/// The library's own threads.

#include <csignal>
#include <thread>
#include <utility>

namespace rz {

/// While it lives, the calling thread blocks every signal but those of its own faults (SIGSEGV, SIGBUS,
/// SIGFPE, SIGILL, SIGTRAP, SIGSYS). A thread that is made meanwhile blocks them for ever.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// A thread that takes no signals: the handlers of the program that uses the library run on that program's
/// threads. Every thread that the library starts is one.
template <class F>
std::thread helper_thread(F&& f) {
  const SignalsBlocked blocked;
  return std::thread(std::forward<F>(f));
}

}  // namespace rz
