#pragma once
/// The commands of the program, and what they share.

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/open_tensors.h"
#include "tools/command_line/progress_bar.h"

namespace rz::checkpoint {

/// Each gets its own words, with its name as the first, and returns the exit status. Errors are thrown.
int inspect(int argc, const char* const* argv);
int verify(int argc, const char* const* argv);
int diff(int argc, const char* const* argv);
int merge(int argc, const char* const* argv);
int split(int argc, const char* const* argv);

// ---- what they share

struct StoredCheckpoint {
  std::string path, tag;
  bool latest = false, best = false;
  std::string written;  ///< "2026-01-31 12:00:00 UTC"
  std::uint64_t bytes = 0;
  CheckpointIndex index;
  nlohmann::json state;
};

/// Errors of CheckpointReader::open().
StoredCheckpoint read_stored_checkpoint(const std::string& path);

/// The folders of the checkpoints at a path: the path itself, or those in it by steps. Errc::config if there
/// is none.
std::vector<std::string> checkpoints_at(const std::string& path);

/// open_checkpoint() of a path that has one, else open_tensors(). Prints which of several sources is read to
/// standard error, if there were several.
TensorSource open_source(const std::string& path, TensorPart = TensorPart::weights);

/// Bytes of a tensor; 0 if the dtype is unknown.
std::uint64_t bytes_of(const StoredTensor&);

/// Lines of columns that are aligned: texts to the left, numbers to the right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

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

}  // namespace rz::checkpoint
