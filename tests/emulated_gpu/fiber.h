#pragma once
/// A function on its own stack that can be suspended and resumed, by any thread, one at a time.

#include <cstddef>
#include <memory>

namespace rz::emulated {

class Fiber {
 public:
  using Function = void (*)(void*);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes resume() begin f(argument). Only when the last function has ended or is abandoned, in which case
  /// none of its objects is destroyed.
  void start(Function f, void* argument);
  /// Runs until the function calls leave() or returns.
  void resume();
  bool ended() const { return ended_; }
  /// Within the function that this fiber runs: back to resume().
  void leave();

  /// Stacks of ended fibers are reused.
  static std::unique_ptr<Fiber> acquire();
  static void release(std::unique_ptr<Fiber>);

 private:
  struct Entry;
  std::byte* stack_;
  void* inside_ = nullptr;   // state of the suspended function
  void* outside_ = nullptr;  // where resume() was called
  Function function_ = nullptr;
  void* argument_ = nullptr;
  bool ended_ = true;
  // The address sanitizer's state of both stacks.
  void* fake_inside_ = nullptr;
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
};

}  // namespace rz::emulated
