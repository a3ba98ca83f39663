#include "comm/os/process.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace rz {

namespace {

/// Counts fork() calls with pthread_atfork handlers, from its first use.
class ForkTracker {
 public:
  static ForkTracker& instance() {
    static ForkTracker& forks = *new ForkTracker;  // never destroyed: used by objects that outlive statics
    return forks;
  }

  std::atomic<std::uint64_t> generation{0}, count{0};
  std::mutex forking;

 private:
  ForkTracker() {
    pthread_atfork([] { instance().begin(); }, [] { instance().forking.unlock(); },
                   [] { instance().begin_child(); });
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

struct LeakedObject {
  void* object;
  LeakedObject* next;
};
std::atomic<LeakedObject*> leaked_objects{nullptr};

}  // namespace

std::uint64_t fork_generation() noexcept {
  return ForkTracker::instance().generation.load(std::memory_order_relaxed);
}

std::uint64_t fork_count() noexcept { return ForkTracker::instance().count.load(std::memory_order_relaxed); }

void unless_forked_since(std::uint64_t since, const std::function<void()>& f) {
  const std::lock_guard lock(ForkTracker::instance().forking);
  if (fork_count() == since) f();
}

void without_fork(const std::function<void()>& f) {
  const std::lock_guard lock(ForkTracker::instance().forking);
  f();
}

void leak_reachable(void* object) noexcept {
  auto* const fresh = new LeakedObject{object, leaked_objects.load()};
  while (!leaked_objects.compare_exchange_weak(fresh->next, fresh)) {
  }
}

}  // namespace rz
