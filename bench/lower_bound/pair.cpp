#include "bench/lower_bound/pair.h"

#include <sched.h>
#include <signal.h>

#include <cstring>
#include <exception>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz::bench::lower_bound {
namespace {

int be_rank_1(PairState& state, std::chrono::milliseconds timeout,
              const std::function<void(PairRank&)>& rank_main) {
  try {
    bind_process(processors_for(1, 2));
    PairRank self(state, 1, nullptr, timeout);
    rank_main(self);
    self.barrier();
    return 0;
  } catch (const std::exception& e) {
    std::strncpy(state.why, e.what(), sizeof state.why - 1);
    state.failed.store(true, std::memory_order_release);
    return 1;
  }
}

}  // namespace

void PairRank::wait_longer(const std::atomic<std::uint64_t>& count, std::uint64_t min_count) const {
  const auto end = Deadline::after(timeout_);
  while (count.load(std::memory_order_acquire) < min_count) {
    if (state.failed.load(std::memory_order_acquire)) fail(Errc::aborted, "rank ", peer, ": ", state.why);
    const bool lost = peer_process_ && peer_process_->ended();
    if (count.load(std::memory_order_acquire) >= min_count)
      return;  // the peer may have ended after its last count
    if (lost && !state.failed) fail(Errc::peer_lost, "rank ", peer, " ended");
    if (end.expired())
      fail(Errc::timeout, "rank ", rank, " waited ", timeout_.count(), " ms for rank ", peer,
           "; is the machine busy? -T allows more");
    sched_yield();  // another process may need this core
  }
}

void PairRank::barrier() {
  publish(state.barrier[rank], ++barriers_);
  wait_for(state.barrier[peer], barriers_);
}

void run_pair(PairState& state, std::chrono::milliseconds timeout,
              const std::function<void(PairRank&)>& rank_main) {
  Child peer([&] { return be_rank_1(state, timeout, rank_main); }, {.signal_if_orphaned = SIGKILL});
  bind_process(processors_for(0, 2));
  PairRank self(state, 0, &peer, timeout);
  rank_main(self);
  self.barrier();
}

}  // namespace rz::bench::lower_bound
