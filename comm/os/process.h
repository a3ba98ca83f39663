#pragma once
/// Process ownership across fork(), and the machine of a process. A child gets copies of objects whose
/// threads, sockets and shared memory belong to the parent; such objects record their creator.

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace rz {

namespace process_detail {
extern constinit std::atomic<std::uint64_t> generation;
}

/// Number of fork() calls between the original process and this one. A clone() that bypasses pthread_atfork()
/// handlers is not counted.
inline std::uint64_t fork_generation() noexcept {
  return process_detail::generation.load(std::memory_order_relaxed);
}

/// Member of an object that records the process which created it.
class Creator {
 public:
  /// True if this process created the object. Makes a system call.
  bool is_this_process() const noexcept { return process_ == ::getpid(); }
  /// is_this_process() by fork_generation(), without a system call.
  bool is_this_generation() const noexcept { return generation_ == fork_generation(); }
  pid_t process() const noexcept { return process_; }

 private:
  pid_t process_ = ::getpid();
  std::uint64_t generation_ = fork_generation();
};

/// Number of fork() calls made by this process and its ancestors.
std::uint64_t fork_count() noexcept;

/// Calls `f` unless fork_count() has changed from `since`. Blocks fork() in other threads until `f` returns.
void unless_forked_since(std::uint64_t since, const std::function<void()>& f);

/// Calls `f` once no other such call runs, in a state that a child of fork() inherits whole: fork() in other
/// threads waits until `f` returns. `f` must not fork.
void without_fork(const std::function<void()>& f);

/// A mutex for state that a process has once; declare it `static constinit`. A child of fork() finds it free,
/// whatever threads of the parent hold it, so what it guards must be valid at any moment, or be replaced in
/// the child. (A std::mutex would be locked there for ever.) For std::lock_guard. A thread that holds it must
/// not fork.
class ProcessMutex {
 public:
  constexpr ProcessMutex() = default;
  ProcessMutex(const ProcessMutex&) = delete;
  void lock() noexcept;
  void unlock() noexcept;

 private:
  static constexpr std::uint32_t free = 0;
  static std::uint32_t holder_in_this_process() noexcept {
    return static_cast<std::uint32_t>(fork_generation()) + 1;
  }
  std::atomic<std::uint32_t> holder_{free};
};

/// Leaks an object, for processes that must not destroy it. It stays reachable, so leak checkers do not
/// report it.
void leak_reachable(void* object) noexcept;

/// Deleter that acts only in the creator process. A child of fork() leaks its copy: the object's threads do
/// not exist there, and its locks may be held forever.
template <class T>
struct DeletedByCreator {
  Creator creator{};
  void operator()(T* object) const noexcept {
    creator.is_this_process() ? delete object : leak_reachable(object);
  }
};

/// What /proc shows of a process of this host.
struct ProcessState {
  char code = '?';  ///< 'R' runs, 'S' sleeps, 'D' waits in the kernel, 'T' was stopped, 'Z' has ended; '?'
  bool traced = false;  ///< by a debugger
  bool ready = false;   ///< a thread runs, or would if it had a processor
};
ProcessState process_state(pid_t);

/// "<kernel boot id>/<host name>/<network namespace>". Ranks with equal ids can share memory.
std::string machine_id();

/// The kernel's boot id: equal in all processes of one kernel, different after a restart. Empty without
/// /proc.
std::string kernel_boot_id();

}  // namespace rz
