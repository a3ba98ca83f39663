#pragma once
/// A function on a stack of its own that can be left in the middle and gone on with, by any thread, one at a
/// time.

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

  /// Fibers that ended are used again.
  static std::unique_ptr<Fiber> acquire();
  static void release(std::unique_ptr<Fiber>);

 private:
  struct Entry;
  std::byte* stack_;
  void* inside_ = nullptr;   // where the function stands
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
