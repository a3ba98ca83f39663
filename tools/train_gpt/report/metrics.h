#pragma once
/// What is told of an update: to a file, a JSON object a line, and to whoever watches.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace rz::train_gpt {

struct UpdateReport {
  std::uint64_t step = 0;  ///< from 0
  double loss = 0;         ///< mean over the global batch
  double grad_norm = 0;    ///< before clipping
  double lr = 0;
  double tokens_per_second = 0;  ///< of all ranks
  double step_ms = 0;
  double exposed_comm_ms = 0;  ///< that this rank waited for communication; NaN: a graph ran, nobody knows
  double loss_scale = 0;       ///< in f16; 0: losses are not scaled
  bool skipped = false;        ///< gradients were not finite: parameters stayed as they were
  bool diverged = false;       ///< loss or norm is not finite, and the configuration does not skip that
};

/// One line without its end; 17 significant digits for loss and norm. What is not finite becomes null.
std::string to_json(const UpdateReport&);

/// Diverged if `diverged` is set: what is not finite, and what to do.
void require_finite(const UpdateReport&);

class MetricsLog {
 public:
  /// Writes nothing without a path. Errc::io if the file cannot be made.
  explicit MetricsLog(const std::string& path);
  void write(const UpdateReport&);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

/// A bar that is redrawn in place on a terminal; elsewhere the first and last update and, in between, a line
/// for every twentieth part of the way, at most one a second, at least one every ten.
class Progress {
 public:
  Progress(std::FILE* out, bool terminal, std::uint64_t steps);
  void update(const UpdateReport&);

 private:
  bool line_is_due(const UpdateReport&) const;
  void draw_bar(const UpdateReport&);
  using Clock = std::chrono::steady_clock;
  std::FILE* out_;
  bool terminal_;
  std::uint64_t steps_, last_step_ = 0;
  Clock::time_point start_ = Clock::now(), last_line_{};
};

std::string human_duration(double seconds);  ///< "59 s", "2 min 05 s", "3 h 20 min"

}  // namespace rz::train_gpt
