#include "bench/lower_bound/pair.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <exception>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz::bench::lower_bound {
namespace {

/// A forked process, which is killed when this object is destroyed.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  Child(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

 private:
  pid_t pid_;
};

[[noreturn]] void be_rank_1(PairState& state, pid_t parent, std::chrono::milliseconds timeout,
                            const std::function<void(PairRank&)>& rank_main) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  try {
    bind_process(processors_for(1, 2));
    PairRank self(state, 1, 0, timeout);
    rank_main(self);
    self.barrier();
  } catch (const std::exception& e) {
    std::strncpy(state.why, e.what(), sizeof state.why - 1);
    state.failed.store(true, std::memory_order_release);
    ::_exit(1);
  }
  ::_exit(0);
}

}  // namespace

void PairRank::wait_longer(const std::atomic<std::uint64_t>& count, std::uint64_t min_count) const {
  const auto end = Deadline::after(timeout_);
  while (count.load(std::memory_order_acquire) < min_count) {
    if (state.failed.load(std::memory_order_acquire)) fail(Errc::aborted, "rank ", peer, ": ", state.why);
    // WNOWAIT: does not reap the process, so that its id is not reused before Child waits for it.
    siginfo_t gone{};
    const bool lost =
        peer_process_ > 0 &&
        ::waitid(P_PID, static_cast<id_t>(peer_process_), &gone, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        gone.si_pid != 0;
    if (count.load(std::memory_order_acquire) >= min_count)
      return;  // the peer may have ended after its last count
    if (lost && !state.failed)
      fail(Errc::peer_lost, "rank ", peer, " ended; its process was ", peer_process_);
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
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork");
  if (pid == 0) be_rank_1(state, parent, timeout, rank_main);
  const Child child(pid);
  bind_process(processors_for(0, 2));
  PairRank self(state, 0, pid, timeout);
  rank_main(self);
  self.barrier();
}

}  // namespace rz::bench::lower_bound
