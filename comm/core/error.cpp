#include "comm/core/error.h"

#include <cerrno>
#include <cstring>

namespace rz {

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

}  // namespace rz
