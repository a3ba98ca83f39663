#include "comm/os/thread_team.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "comm/os/spin.h"

namespace rz {

struct ThreadTeam::State {
  explicit State(int size) : size(size) {}
  const int size;
  std::mutex turn;
  const FunctionRef* work = nullptr;
  std::atomic<unsigned> round{0};  // incremented to start a run
  std::atomic<int> running{0};     // threads that have not finished this run
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  void member(int index) {
    unsigned seen = 0;
    for (;;) {
      spin_then_wait(round, seen);
      seen = round.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      (*work)(index);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }
};

ThreadTeam::ThreadTeam(int threads) : state_(std::make_unique<State>(threads)) {
  require(threads >= 1, Errc::invalid_argument, "a team needs at least 1 thread, got ", threads);
  try {
    for (int i = 1; i < threads; ++i)
      state_->threads.push_back(helper_thread([s = state_.get(), i] { s->member(i); }));
  } catch (...) {
    end();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { end(); }

void ThreadTeam::end() noexcept {
  state_->stop = true;
  state_->round.fetch_add(1, std::memory_order_release);
  state_->round.notify_all();
  for (auto& t : state_->threads) t.join();
}

int ThreadTeam::size() const { return state_->size; }

void ThreadTeam::run(FunctionRef f) {
  if (state_->size == 1) return f(0);
  const std::lock_guard turn(state_->turn);
  state_->work = &f;
  state_->running.store(state_->size - 1, std::memory_order_relaxed);
  state_->round.fetch_add(1, std::memory_order_release);
  state_->round.notify_all();
  f(0);
  for (int left; (left = state_->running.load(std::memory_order_acquire)) != 0;)
    spin_then_wait(state_->running, left);
}

}  // namespace rz
