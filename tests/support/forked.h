#pragma once
/// A child of this process, made by fork() in the middle of a test.

#include <sys/wait.h>
#include <unistd.h>

namespace rz::test {

/// Runs `f` in a child of fork() and returns how that ended: 0 if `f` returned true and the child then ended
/// in order, 1 if it returned false; 1000 + the signal that killed it, SIGALRM after 20 s. No destructor of
/// the test's own runs in the child.
template <class F>
int in_forked_child(const F& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(f() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

/// An event that another process waits for.
class Gate {
 public:
  Gate() {
    if (pipe(ends_) != 0) _exit(3);
  }
  Gate(const Gate&) = delete;
  ~Gate() { close(ends_[0]), close(ends_[1]); }
  void open() { [[maybe_unused]] const auto n = write(ends_[1], "!", 1); }
  void wait() {
    char c = 0;
    [[maybe_unused]] const auto n = read(ends_[0], &c, 1);
  }

 private:
  int ends_[2];
};

}  // namespace rz::test
