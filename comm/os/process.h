#pragma once
/// fork() copies objects whose threads, sockets and shared memory stay the parent's. What a child may not end
/// knows its creator.

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <functional>

namespace rz {

/// How many calls of fork() lie between the first process that this one comes of and itself. A clone() that
/// runs no handlers of pthread_atfork() goes unseen.
std::uint64_t fork_generation() noexcept;

/// The process that made the object whose member this is.
class Creator {
 public:
  /// Whether this process made the object. Asks the system.
  bool is_this_process() const noexcept { return process_ == ::getpid(); }
  /// The same by generation(): for calls that take less time than the system does.
  bool is_this_generation() const noexcept { return generation_ == fork_generation(); }
  pid_t process() const noexcept { return process_; }

 private:
  pid_t process_ = ::getpid();
  std::uint64_t generation_ = fork_generation();
};

/// How often this process, and those that it was forked from, have called fork().
std::uint64_t fork_count() noexcept;

/// Calls `f` unless this process has forked since forks() was `since`. No fork() begins until `f` returns.
void unless_forked_since(std::uint64_t since, const std::function<void()>& f);

/// Holds an object for ever that this process cannot end, reachable, so that no tool takes it for lost.
void leak_reachable(void* object) noexcept;

/// Deletes an object in the process that made it. In a child of fork() the object stays as it is: its threads
/// are not there, and a lock of it may be held for ever.
template <class T>
struct DeletedByCreator {
  Creator creator{};
  void operator()(T* object) const noexcept {
    creator.is_this_process() ? delete object : leak_reachable(object);
  }
};

}  // namespace rz
