#include "comm/os/helper_thread.h"

#include <pthread.h>
#include <sys/resource.h>

#include <cstring>

#include "comm/core/error.h"

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
  fail(Errc::system, "cannot start a thread: ", std::strerror(error),
       "; processes and threads of this user (ulimit -u): ", limit(RLIMIT_NPROC),
       ", address space in bytes (ulimit -v): ", limit(RLIMIT_AS),
       "; raise these limits, or the pids.max of the container, or use fewer threads and ranks on this host");
}

void name_this_thread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

}  // namespace rz
