#pragma once
/// A fixed team of threads that runs one function on all its members at once: the only pool that GEMM and
/// element-wise kernels share, so that two pools never fight over the cores.

#include <memory>

namespace rz {

/// A borrowed callable `void(int member)`: no allocation, valid during the call it is passed to.
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
  /// `threads` counts the caller of run(), which works too. At least 1.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const;
  /// Calls f(0) … f(size-1), each on its own thread, and returns when all have ended. The function must not
  /// throw. One run at a time: a second caller waits its turn.
  void run(FunctionRef f);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
