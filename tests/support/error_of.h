#pragma once
/// The error of a call.

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

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

inline void expect_one_line(const std::string& text) {
  EXPECT_TRUE(std::ranges::none_of(text, [](unsigned char c) { return c < 32; })) << text;
}

/// The message of the error that `call` throws, which is one line, of this code; "" if it throws none.
template <class F>
std::string refusal(const F& call, std::optional<Errc> code = {}) {
  try {
    call();
  } catch (const Error& e) {
    const std::string line = e.what();
    expect_one_line(line);
    if (code) {
      EXPECT_EQ(e.code(), *code) << line;
    }
    return line;
  }
  return "";
}

inline void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks " << part;
}

/// `call` is refused with this code, in a line that has all parts.
template <class F>
void expect_refused(const F& call, Errc code, std::initializer_list<std::string> parts) {
  const Error e = error_of(call);
  EXPECT_EQ(e.code(), code) << e.what();
  expect_one_line(e.what());
  expect_parts(e.what(), parts);
}

}  // namespace rz::test
