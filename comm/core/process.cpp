#include "comm/core/process.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace rz {

namespace {

/// Follows the forks of this process from its first use on.
class Forks {
 public:
  static Forks& of_this_process() {
    static Forks& forks = *new Forks;  // never destroyed: what outlives statics asks, too
    return forks;
  }

  std::atomic<std::uint64_t> generation{0}, count{0};
  std::mutex forking;

 private:
  Forks() {
    pthread_atfork([] { of_this_process().begin(); }, [] { of_this_process().forking.unlock(); },
                   [] { of_this_process().begin_child(); });
  }
  void begin() {
    forking.lock();
    count.fetch_add(1, std::memory_order_relaxed);
  }
  void begin_child() {
    generation.fetch_add(1, std::memory_order_relaxed);
    forking.unlock();
  }
};

struct Kept {
  void* object;
  Kept* next;
};
std::atomic<Kept*> kept{nullptr};

}  // namespace

std::uint64_t generation() noexcept {
  return Forks::of_this_process().generation.load(std::memory_order_relaxed);
}

std::uint64_t forks() noexcept { return Forks::of_this_process().count.load(std::memory_order_relaxed); }

void unless_forked_since(std::uint64_t since, const std::function<void()>& f) {
  const std::lock_guard lock(Forks::of_this_process().forking);
  if (forks() == since) f();
}

void keep_for_ever(void* object) noexcept {
  auto* const fresh = new Kept{object, kept.load()};
  while (!kept.compare_exchange_weak(fresh->next, fresh)) {
  }
}

}  // namespace rz
