#pragma once
/// The error of a call.

#include <gtest/gtest.h>

#include "comm/core/error.h"

namespace rz::test {

/// The error that `call` throws, or a test failure.
template <class F>
Error error_of(const F& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(Errc::io, "nothing was thrown");
}

}  // namespace rz::test
