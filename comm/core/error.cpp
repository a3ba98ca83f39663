#include "comm/core/error.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace rz {

void throw_error(Errc code, const std::string& what) { throw Error(code, what); }

const char* name(Errc code) {
  switch (code) {
    case Errc::invalid_argument:
      return "invalid argument";
    case Errc::config:
      return "configuration";
    case Errc::timeout:
      return "timeout";
    case Errc::peer_lost:
      return "peer lost";
    case Errc::aborted:
      return "aborted";
    case Errc::mismatch:
      return "mismatch";
    case Errc::rendezvous:
      return "rendezvous";
    case Errc::system:
      return "system";
    case Errc::io:
      return "input/output";
    case Errc::unsupported:
      return "unsupported";
    case Errc::unsynchronised:
      return "unsynchronised";
    case Errc::cancelled:
      return "cancelled";
    case Errc::diverged:
      return "diverged";
  }
  return "unknown";
}

void fail_errno(const char* call, const std::string& about) {
  const int error = errno;
  fail(Errc::system, call, about.empty() ? "" : " ", about, ": ", std::strerror(error), " (errno ", error,
       ")");
}

namespace {

/// Which limit an allocation may have met.
std::string memory_limit() {
  const auto limited = [](auto resource, const char* what, const char* flag) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::string();
    return concat("; ", what, " is limited to ", human_bytes(limit.rlim_cur), ": raise it (ulimit ", flag,
                  ")");
  };
  const std::string limits =
      limited(RLIMIT_AS, "the address space", "-v") + limited(RLIMIT_DATA, "the size of the data", "-d");
  return limits.empty() ? "; use less, or fewer ranks on this machine" : limits;
}

}  // namespace

std::string one_line(const std::exception& e) {
  std::string line = e.what();
  if (dynamic_cast<const std::bad_alloc*>(&e)) line = "out of memory" + memory_limit();
  const auto* system = dynamic_cast<const std::system_error*>(&e);
  if (system && system->code() == std::errc::resource_unavailable_try_again)
    line +=
        "; a thread could not start: raise the limits of processes and memory (ulimit -u, ulimit -v, "
        "pids.max)";
  std::ranges::replace(line, '\n', ' ');
  return line;
}

}  // namespace rz
