#include "comm/os/process.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string_view>
#include <system_error>

#include "comm/core/text.h"

namespace rz {

// Usable before and after all dynamic initialization.
constinit std::atomic<std::uint64_t> process_detail::generation{0};

namespace {

constinit std::atomic<std::uint64_t> count{0};
constinit std::mutex forking;

/// Counts fork() calls, from the start of the program or the dlopen() of the library on.
[[maybe_unused]] const int counted = pthread_atfork(
    [] {
      forking.lock();
      count.fetch_add(1, std::memory_order_relaxed);
    },
    [] { forking.unlock(); },
    [] {
      process_detail::generation.fetch_add(1, std::memory_order_relaxed);
      forking.unlock();
    });

struct LeakedObject {
  void* object;
  LeakedObject* next;
};
std::atomic<LeakedObject*> leaked_objects{nullptr};

}  // namespace

std::uint64_t fork_count() noexcept { return count.load(std::memory_order_relaxed); }

void unless_forked_since(std::uint64_t since, const std::function<void()>& f) {
  const std::lock_guard lock(forking);
  if (fork_count() == since) f();
}

void without_fork(const std::function<void()>& f) {
  const std::lock_guard lock(forking);
  f();
}

void ProcessMutex::lock() noexcept {
  const std::uint32_t mine = holder_in_this_process();
  for (std::uint32_t holder = free; !holder_.compare_exchange_weak(holder, mine, std::memory_order_acquire);
       holder = free) {
    if (holder == mine)
      holder_.wait(mine, std::memory_order_relaxed);
    else if (holder != free && holder_.compare_exchange_strong(holder, mine, std::memory_order_acquire))
      return;  // a thread of the parent held it at fork()
  }
}

void ProcessMutex::unlock() noexcept {
  holder_.store(free, std::memory_order_release);
  holder_.notify_one();
}

void leak_reachable(void* object) noexcept {
  auto* const fresh = new LeakedObject{object, leaked_objects.load()};
  while (!leaked_objects.compare_exchange_weak(fresh->next, fresh)) {
  }
}

std::string kernel_boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

std::string machine_id() {
  char host[256] = {}, space[64] = {};
  gethostname(host, sizeof host - 1);
  if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = 0;
  return concat(kernel_boot_id(), '/', host, '/', space);
}

namespace {

/// The value of a field of /proc/PID/status.
std::string status_of(const std::string& folder, std::string_view field) {
  std::ifstream file(folder + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field)) return line.substr(std::min(line.size(), field.size()));
  return "";
}

}  // namespace

ProcessState process_state(pid_t process) {
  const std::string folder = "/proc/" + std::to_string(process);
  const std::string code = status_of(folder, "State:	"), tracer = status_of(folder, "TracerPid:	");
  ProcessState state{.code = code.empty() ? '?' : code[0], .traced = !tracer.empty() && tracer != "0"};
  std::error_code ended;
  for (const auto& thread : std::filesystem::directory_iterator(folder + "/task", ended))
    state.ready |= status_of(thread.path().string(), "State:	").starts_with('R');
  return state;
}

}  // namespace rz
