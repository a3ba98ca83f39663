#pragma once
/// Errors of all layers: one exception type with a code and, where known, the culprit rank. A message states
/// the failure, the place (rank, peer, file, key) and the remedy.

#include <exception>
#include <stdexcept>
#include <string>

#include "text.h"

namespace rz {

enum class Errc {
  invalid_argument,  ///< invalid arguments; the call had no effect
  config,            ///< a file, flag or environment variable is missing or malformed
  timeout,           ///< a deadline passed
  peer_lost,         ///< a rank died or departed; culprit() names it
  aborted,           ///< abort() was called; culprit() names the rank
  mismatch,          ///< ranks called different collectives, or passed different arguments
  rendezvous,        ///< the ranks could not find each other
  system,            ///< a system call failed; the message has its name and the text of errno
  io,                ///< a file is damaged or has unexpected content
  unsupported,       ///< not available in this build or on this machine
  unsynchronised,    ///< step() was called with gradients that were not reduced over the ranks
  cancelled,         ///< another rank, which culprit() names, renews the group or cancels the update
  diverged,          ///< a loss, a norm or a weight is not finite
};

const char* name(Errc);

class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& what, int culprit = -1)
      : std::runtime_error(what), code_(code), culprit_(culprit) {}
  Errc code() const noexcept { return code_; }
  /// The rank that caused the failure, or -1.
  int culprit() const noexcept { return culprit_; }

 private:
  Errc code_;
  int culprit_;
};

/// Not inline: sources that include this header may be compiled without exceptions.
[[noreturn]] void throw_error(Errc, const std::string& what);

/// Throws Error(code, concat(parts...)).
template <class... T>
[[noreturn]] void fail(Errc code, const T&... parts) {
  throw_error(code, concat(parts...));
}

/// Throws unless `ok`. The parts are joined only on failure.
template <class... T>
void require(bool ok, Errc code, const T&... parts) {
  if (!ok) fail(code, parts...);
}

/// Throws Errc::system with the name of the call, `about`, and the text of errno.
[[noreturn]] void fail_errno(const char* call, const std::string& about = {});

/// The message of an exception of any kind in one line, for programs that end with it. One of the standard
/// library is described with the limit and the remedy where they are known: "std::bad_alloc" says neither.
std::string one_line(const std::exception&);

}  // namespace rz
