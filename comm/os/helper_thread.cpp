#include "comm/os/helper_thread.h"

#include <pthread.h>
#include <sys/resource.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/os/cgroup.h"

namespace rz {

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void fail_no_thread(int error) {
  const auto limit = [](auto resource) {
    rlimit l{};
    getrlimit(resource, &l);
    return l.rlim_cur == RLIM_INFINITY ? std::string("unlimited") : concat(l.rlim_cur);
  };
  const auto in_cgroup = cgroup_processes();
  fail(Errc::system, "cannot start a thread: ", std::strerror(error),
       "; processes and threads of this user (ulimit -u): ", limit(RLIMIT_NPROC),
       ", further ones in the control group (pids.max): ", in_cgroup ? concat(*in_cgroup) : "unlimited",
       ", address space in bytes (ulimit -v): ", limit(RLIMIT_AS),
       "; raise these limits, or the pids.max of the container, or use fewer threads and ranks on this host");
}

void name_this_thread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

bool run_with_timeout(std::chrono::milliseconds limit, std::function<void()> f) {
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
  };
  const auto ending = std::make_shared<Ending>();
  std::thread thread = helper_thread([ending, f = std::move(f)]() mutable {
    f();
    f = nullptr;  // releases its captures before completion is signalled
    {
      const std::lock_guard lock(ending->mutex);
      ending->reached = true;
    }
    ending->changed.notify_all();
  });
  bool reached = false;
  {
    std::unique_lock lock(ending->mutex);
    reached = ending->changed.wait_until(lock, Deadline::after(limit).at(), [&] { return ending->reached; });
  }
  if (reached)
    thread.join();
  else
    thread.detach();
  return reached;
}

}  // namespace rz
