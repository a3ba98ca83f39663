#pragma once
/// Progress of the updates on a terminal.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "sharding/lm/update_report.h"

namespace rz::train_lm {

using lm::UpdateReport;

/// On a terminal: a bar that is redrawn in place. Elsewhere: lines for the first and the last update and for
/// every twentieth of the run, at most one per second and at least one every ten seconds; with `every`, for
/// every so many updates instead, also on a terminal.
class Progress {
 public:
  /// `first_step`: of this process.
  Progress(std::FILE* out, bool terminal, std::uint64_t steps, std::uint64_t first_step = 0,
           std::optional<std::int64_t> every = {});
  void update(const UpdateReport&);

 private:
  bool line_is_due(const UpdateReport&) const;
  void draw_bar(const UpdateReport&);
  using Clock = std::chrono::steady_clock;
  std::FILE* out_;
  bool terminal_;
  std::uint64_t steps_, first_step_, last_step_;
  std::optional<std::int64_t> every_;
  Clock::time_point start_ = Clock::now(), last_line_{};
};

std::string human_duration(double seconds);  ///< "59 s", "2 min 05 s", "3 h 20 min"

}  // namespace rz::train_lm
