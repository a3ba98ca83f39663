#pragma once
/// Progress on a terminal.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "comm/core/text.h"

namespace rz {

/// A bar of `width` characters; the part `done`, from 0 to 1, is full.
inline std::string progress_bar(double done, int width) {
  std::string bar;
  for (int i = 0; i < width; ++i) bar += i < static_cast<int>(width * done) ? "█" : "░";
  return bar;
}

/// A line on standard error that is redrawn in place, if that is a terminal. It is erased at the end.
class ProgressLine {
 public:
  ProgressLine() = default;
  ProgressLine(const ProgressLine&) = delete;
  ~ProgressLine() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
  }

  void show(std::uint64_t done, std::uint64_t all, const std::string& what = "") {
    const auto now = std::chrono::steady_clock::now();
    if (!terminal_ || now < next_) return;
    next_ = now + std::chrono::milliseconds(100), drawn_ = true;
    const double part = all == 0 ? 1 : static_cast<double>(done) / static_cast<double>(all);
    std::fprintf(stderr, "\r\x1b[K%s %3d%%  %s", progress_bar(part, 24).c_str(), static_cast<int>(part * 100),
                 what.c_str());
    std::fflush(stderr);
  }

 private:
  bool terminal_ = ::isatty(STDERR_FILENO) == 1, drawn_ = false;
  std::chrono::steady_clock::time_point next_{};
};

/// Text becomes tokens: a ProgressLine; if standard error is no terminal, a line there every ten seconds.
class TokenizeProgress {
 public:
  explicit TokenizeProgress(const char* program) : program_(program) {}

  void show(std::uint64_t bytes, std::uint64_t all_bytes, std::uint64_t tokens) {
    const auto now = Clock::now();
    const double past = std::chrono::duration<double>(now - start_).count();
    const double left =
        bytes == 0 ? 0 : past * static_cast<double>(all_bytes - bytes) / static_cast<double>(bytes);
    const std::string what =
        concat(human_bytes(bytes), " of ", human_bytes(all_bytes), "  ",
               static_cast<std::uint64_t>(static_cast<double>(tokens) / std::max(past, 1e-9)),
               " tokens/s  ETA ", static_cast<std::uint64_t>(left + 0.5), " s");
    line_.show(bytes, all_bytes, what);
    if (::isatty(STDERR_FILENO) == 1 || now < next_) return;
    next_ = now + interval;
    std::fprintf(stderr, "%s: tokenizing: %s\n", program_, what.c_str());
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds interval{10};
  const char* program_;
  ProgressLine line_;
  Clock::time_point start_ = Clock::now(), next_ = start_ + interval;
};

}  // namespace rz
