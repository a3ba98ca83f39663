#pragma once
/// A fixed team of threads that runs one function on all members at once. GEMM and element-wise kernels share
/// one team per stream, so that two pools do not compete for cores.

#include <memory>

namespace rz {

/// Non-owning reference to a callable `void(int member)`. No allocation; valid for the duration of the call.
class FunctionRef {
 public:
  template <class F>
  FunctionRef(const F& f)  // NOLINT: implicit by design
      : object_(&f), call_([](const void* o, int member) { (*static_cast<const F*>(o))(member); }) {}
  void operator()(int member) const { call_(object_, member); }

 private:
  const void* object_;
  void (*call_)(const void*, int);
};

class ThreadTeam {
 public:
  /// `threads` includes the caller of run(). Errc::invalid_argument if it is less than 1.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const;
  /// Calls f(0) … f(size-1), each on its own thread, and returns when all have returned. `f` must not throw.
  /// Runs are serialized: a second caller blocks until the first run has ended.
  void run(FunctionRef f);

 private:
  void end() noexcept;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
