#include "tests/emulated_gpu/fiber.h"

#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <new>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace rz::emulated {

namespace {

namespace context = boost::context::detail;
constexpr std::size_t stack_bytes = 64 << 10, guard_bytes = 4 << 10;

// Notifies the sanitizer of a switch to another stack, and of its end.
#if defined(__SANITIZE_ADDRESS__)
void leaving(void** fake, const void* bottom, std::size_t bytes) {
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
void arrived(void* fake, const void** bottom, std::size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, bottom, bytes);
}
#else
void leaving(void**, const void*, std::size_t) {}
void arrived(void*, const void**, std::size_t*) {}
#endif

}  // namespace

struct Fiber::Entry {
  static void run(context::transfer_t from) {
    auto* const self = static_cast<Fiber*>(from.data);
    self->outside_ = from.fctx;
    arrived(nullptr, &self->outer_stack_, &self->outer_bytes_);
    self->function_(self->argument_);
    self->ended_ = true;
    leaving(nullptr, self->outer_stack_, self->outer_bytes_);
    context::jump_fcontext(self->outside_, nullptr);
  }
};

// A guard page below every stack.
Fiber::Fiber() {
  void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard_bytes, PROT_NONE);
  stack_ = static_cast<std::byte*>(memory) + guard_bytes;
}

Fiber::~Fiber() { munmap(stack_ - guard_bytes, guard_bytes + stack_bytes); }

void Fiber::start(Function f, void* argument) {
  function_ = f;
  argument_ = argument;
  ended_ = false;
  fake_inside_ = nullptr;
  inside_ = context::make_fcontext(stack_ + stack_bytes, stack_bytes, Entry::run);
}

void Fiber::resume() {
  void* fake = nullptr;
  leaving(&fake, stack_, stack_bytes);
  inside_ = context::jump_fcontext(inside_, this).fctx;
  arrived(fake, nullptr, nullptr);
}

void Fiber::leave() {
  leaving(&fake_inside_, outer_stack_, outer_bytes_);
  const context::transfer_t back = context::jump_fcontext(outside_, nullptr);
  arrived(fake_inside_, &outer_stack_, &outer_bytes_);
  outside_ = back.fctx;
}

namespace {
// Only the thread that runs the machine acquires and releases stacks (machine.h), so there is no lock.
std::vector<std::unique_ptr<Fiber>>& spare() {
  static auto* const fibers = new std::vector<std::unique_ptr<Fiber>>();  // never destroyed
  return *fibers;
}
}  // namespace

std::unique_ptr<Fiber> Fiber::acquire() {
  if (spare().empty()) return std::make_unique<Fiber>();
  auto fiber = std::move(spare().back());
  spare().pop_back();
  return fiber;
}

void Fiber::release(std::unique_ptr<Fiber> fiber) { spare().push_back(std::move(fiber)); }

}  // namespace rz::emulated
