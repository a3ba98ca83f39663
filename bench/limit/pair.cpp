#include "bench/limit/pair.h"

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

namespace rz::bench::limit {
namespace {

/// A forked process, which does not outlive this object.
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

[[noreturn]] void be_rank_1(Meeting& meeting, pid_t parent, std::chrono::milliseconds timeout,
                            const std::function<void(Seat&)>& rank_main) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  try {
    bind_process(processors_for(1, 2));
    Seat seat(meeting, 1, 0, timeout);
    rank_main(seat);
    seat.meet();
  } catch (const std::exception& e) {
    std::strncpy(meeting.why, e.what(), sizeof meeting.why - 1);
    meeting.failed.store(true, std::memory_order_release);
    ::_exit(1);
  }
  ::_exit(0);
}

}  // namespace

void Seat::wait_longer(const std::atomic<std::uint64_t>& count, std::uint64_t at_least) const {
  const auto end = Deadline::after(timeout_);
  while (count.load(std::memory_order_acquire) < at_least) {
    if (meeting.failed.load(std::memory_order_acquire)) fail(Errc::aborted, "rank ", peer, ": ", meeting.why);
    // Not reaped: its id stays its own until whoever forked it is done.
    siginfo_t gone{};
    const bool lost =
        peer_process_ > 0 &&
        ::waitid(P_PID, static_cast<id_t>(peer_process_), &gone, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        gone.si_pid != 0;
    if (count.load(std::memory_order_acquire) >= at_least) return;  // it may have ended after its last word
    if (lost && !meeting.failed)
      fail(Errc::peer_lost, "rank ", peer, " ended; its process was ", peer_process_);
    if (end.expired())
      fail(Errc::timeout, "rank ", rank, " waited ", timeout_.count(), " ms for rank ", peer,
           "; is the machine busy? -T allows more");
    sched_yield();  // so late, others may be waiting for this processor
  }
}

void Seat::meet() {
  publish(meeting.here[rank], ++meetings_);
  wait_for(meeting.here[peer], meetings_);
}

void run_pair(Meeting& meeting, std::chrono::milliseconds timeout,
              const std::function<void(Seat&)>& rank_main) {
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork");
  if (pid == 0) be_rank_1(meeting, parent, timeout, rank_main);
  const Child child(pid);
  bind_process(processors_for(0, 2));
  Seat seat(meeting, 0, pid, timeout);
  rank_main(seat);
  seat.meet();
}

}  // namespace rz::bench::limit
