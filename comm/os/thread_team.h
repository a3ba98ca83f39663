#pragma once
/// A fixed team of threads that runs the parts of one piece of work. GEMM and element-wise kernels share one
/// team per stream, so that two pools do not compete for cores.

#include <memory>

namespace rz {

/// Non-owning reference to a callable `void(int part)`. No allocation; valid for the duration of the call.
class FunctionRef {
 public:
  template <class F>
  FunctionRef(const F& f)  // NOLINT: implicit by design
      : object_(&f), call_([](const void* o, int part) { (*static_cast<const F*>(o))(part); }) {}
  void operator()(int part) const { call_(object_, part); }

 private:
  const void* object_;
  void (*call_)(const void*, int);
};

/// A thread that does not run when it is needed (it sleeps, another process has its processor, or the kernel
/// has placed two threads of the team on one processor) delays nobody: the caller of run() runs its part. The
/// caller moves a thread that shares its processor to another one. For that it sets the thread's affinity for
/// a moment, within the processors that the thread may use, and restores it. RZ_THREAD_PLACEMENT=0 leaves
/// placement to the kernel.
class ThreadTeam {
 public:
  /// `threads` includes the caller of run(). Errc::invalid_argument if it is less than 1, Errc::system if
  /// they cannot be started.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const;
  /// Calls f(0) … f(size-1), each once, and returns when all have returned. f(0) runs on the calling thread;
  /// the others may run one after the other, so none may wait for another. `f` must not throw. Runs are
  /// serialized: a second caller blocks until the first run has ended. In a child of fork() the caller runs
  /// all parts.
  void run(FunctionRef f);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
