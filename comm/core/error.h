#pragma once
/// Errors of every floor: one exception type with a code, and the rank that is to blame where there is one.
/// A message says what happened, where (rank, peer, file, key), and what to do.

#include <stdexcept>
#include <string>

#include "comm/core/text.h"

namespace rz {

enum class Errc {
  invalid_argument,  ///< the caller's arguments are wrong; nothing was done
  config,            ///< a file, flag or environment variable is missing or malformed
  timeout,           ///< a deadline passed
  peer_lost,         ///< a rank died or left; culprit() names it
  aborted,           ///< somebody called abort(); culprit() names the rank that did
  mismatch,          ///< ranks called different collectives, or with different arguments
  rendezvous,        ///< the ranks could not find each other
  system,            ///< a system call failed; the message holds its name and errno's text
  io,                ///< a file's content is damaged or not what was expected
  unsupported,       ///< not available in this build or on this machine
  unsynchronised,    ///< step() with gradients that were not reduced over the ranks
};

const char* name(Errc);

class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& what, int culprit = -1)
      : std::runtime_error(what), code_(code), culprit_(culprit) {}
  Errc code() const noexcept { return code_; }
  /// The rank to blame, or -1.
  int culprit() const noexcept { return culprit_; }

 private:
  Errc code_;
  int culprit_;
};

/// Throws Error(code, concat(parts...)).
template <class... T>
[[noreturn]] void fail(Errc code, const T&... parts) {
  throw Error(code, concat(parts...));
}

/// Throws unless `ok`: for checks at a public face. The parts are only joined on failure.
template <class... T>
void require(bool ok, Errc code, const T&... parts) {
  if (!ok) fail(code, parts...);
}

/// Throws Errc::system with the name of the call, what it was about and errno's text.
[[noreturn]] void fail_errno(const char* call, const std::string& about = {});

}  // namespace rz
