#include "tools/rzrun/restart_policy.h"

#include <algorithm>

namespace rz::rzrun {

using std::chrono::milliseconds;

namespace {
constexpr std::chrono::seconds short_lifetime{10};
constexpr milliseconds min_pause{100}, max_pause{10000};
}  // namespace

std::string why_final(const ExitStatus& s) {
  if (s.signal) return "";
  switch (s.exit_code) {
    case 2:
      return "status 2 is wrong input, which would fail again";
    case 126:
    case 127:
      return "the program cannot be executed";
    case 130:
    case 143:
      return "the rank was requested to stop";
    default:
      return "";
  }
}

std::optional<milliseconds> RestartPolicy::next(const ExitStatus& failure,
                                                std::chrono::steady_clock::duration lifetime) {
  if (restarts_ >= max_restarts_ || !why_final(failure).empty()) return {};
  ++restarts_;
  pause_ = lifetime >= short_lifetime ? milliseconds(0) : std::clamp(2 * pause_, min_pause, max_pause);
  return pause_;
}

}  // namespace rz::rzrun
