#include "comm/os/thread_team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "comm/os/process.h"
#include "comm/os/spin.h"

namespace rz {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int late_rounds = 4;  // in a row: a thread that sleeps misses one or two short runs
constexpr std::chrono::milliseconds min_placement_interval{1}, max_placement_interval{256};

/// Processors that thread `tid` may use; none if the kernel does not show them.
cpu_set_t allowed_processors(pid_t tid) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(tid, sizeof set, &set) != 0) CPU_ZERO(&set);  // also if there are over 1024
  return set;
}

}  // namespace

struct ThreadTeam::State {
  State(int size, bool places) : members(static_cast<std::size_t>(size)), places(places) {}
  ~State() {
    stop = true;
    round.fetch_add(1, std::memory_order_release);
    round.notify_all();
    for (auto& t : threads) t.join();
  }

  struct alignas(64) Member {
    std::atomic<unsigned> begun{0};  // the last round whose part has begun, on this thread or the caller's
    std::atomic<pid_t> tid{0};       // 0 until the thread has run
    std::atomic<int> processor{-1};  // on which it began a part last
    int late = 0;                    // rounds in a row in which the caller ran its part
  };

  const Creator creator{};
  std::vector<Member> members;  // the first is the caller
  const bool places;            // late threads on other processors
  std::mutex turn;
  const FunctionRef* work = nullptr;
  alignas(64) std::atomic<unsigned> round{0};  // incremented to start a run
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<int> running{0};  // parts that have not ended in this run
  Clock::time_point next_placement{};
  Clock::duration placement_interval = min_placement_interval;
  std::vector<std::thread> threads;

  /// True if part `i` of round `r` had not begun: it belongs to the calling thread now. A thread that is late
  /// for an earlier round gets none, since somebody has begun each part of that round.
  bool begin(std::size_t i, unsigned r) {
    unsigned before = r - 1;
    return members[i].begun.compare_exchange_strong(before, r, std::memory_order_acq_rel);
  }

  void run_member(std::size_t i) {
    Member& self = members[i];
    self.tid.store(gettid(), std::memory_order_release);
    unsigned seen = 0;
    for (;;) {
      spin_then_wait(round, seen);
      seen = round.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      if (!begin(i, seen)) continue;
      if (const int cpu = sched_getcpu(); cpu != self.processor.load(std::memory_order_relaxed))
        self.processor.store(cpu, std::memory_order_relaxed);
      (*work)(static_cast<int>(i));
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }

  /// Runs the parts that no thread has begun. True if a thread has missed several rounds.
  bool run_missed(FunctionRef f, unsigned r) {
    int missed = 0;
    bool late = false;
    for (std::size_t i = 1; i < members.size(); ++i) {
      if (!begin(i, r)) {
        members[i].late = 0;
        continue;
      }
      f(static_cast<int>(i));
      ++missed;
      late |= ++members[i].late >= late_rounds;
    }
    if (missed > 0) running.fetch_sub(missed, std::memory_order_acq_rel);
    return late;
  }

  /// Moves late threads away from the processors of the caller and of the threads that are on time. Kernels
  /// do not do it soon: they see two threads that are always busy, and some prefer few processors in a guest.
  void place_late_threads() {
    const auto now = Clock::now();
    if (now < next_placement) return;
    placement_interval = now - next_placement > 16 * max_placement_interval
                             ? min_placement_interval
                             : std::min<Clock::duration>(2 * placement_interval, max_placement_interval);
    next_placement = now + placement_interval;
    cpu_set_t used;
    CPU_ZERO(&used);
    const auto use = [&](int cpu) {
      if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &used);
    };
    use(sched_getcpu());
    for (std::size_t i = 1; i < members.size(); ++i)
      if (members[i].late == 0) use(members[i].processor.load(std::memory_order_relaxed));
    for (std::size_t i = 1; i < members.size(); ++i) {
      const pid_t tid = members[i].tid.load(std::memory_order_acquire);
      if (members[i].late < late_rounds || tid == 0) continue;
      const cpu_set_t allowed = allowed_processors(tid);
      cpu_set_t taken, free;
      CPU_AND(&taken, &allowed, &used);
      CPU_XOR(&free, &allowed, &taken);
      if (CPU_COUNT(&free) == 0 || sched_setaffinity(tid, sizeof free, &free) != 0) continue;
      sched_setaffinity(tid, sizeof allowed, &allowed);
    }
  }
};

ThreadTeam::ThreadTeam(int threads) {
  require(threads >= 1, Errc::invalid_argument, "a team needs at least 1 thread, got ", threads);
  state_.reset(new State(threads, environment().thread_placement));
  for (int i = 1; i < threads; ++i)
    state_->threads.push_back(
        helper_thread([s = state_.get(), i] { s->run_member(static_cast<std::size_t>(i)); }));
}

ThreadTeam::~ThreadTeam() {
  if (!state_->creator.is_this_process()) leak_reachable(state_.release());  // it has no threads to join
}

int ThreadTeam::size() const { return static_cast<int>(state_->members.size()); }

void ThreadTeam::run(FunctionRef f) {
  State& s = *state_;
  if (size() == 1 || !s.creator.is_this_generation()) {
    for (int i = 0; i < size(); ++i) f(i);
    return;
  }
  const std::lock_guard turn(s.turn);
  s.work = &f;
  s.running.store(size() - 1, std::memory_order_relaxed);
  const unsigned round = s.round.fetch_add(1, std::memory_order_release) + 1;
  s.round.notify_all();
  f(0);
  if (s.run_missed(f, round) && s.places) s.place_late_threads();
  for (int left; (left = s.running.load(std::memory_order_acquire)) != 0;) spin_then_wait(s.running, left);
}

}  // namespace rz
