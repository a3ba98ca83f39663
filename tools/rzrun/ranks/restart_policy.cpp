#include "tools/rzrun/ranks/restart_policy.h"

#include <algorithm>
#include <cstdio>

#include "comm/core/error.h"

namespace rz::rzrun {

using std::chrono::milliseconds;

namespace {
constexpr std::chrono::seconds short_lifetime{10};
constexpr milliseconds min_pause{100}, max_pause{10000};
}  // namespace

std::string seconds(milliseconds t) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", std::chrono::duration<double>(t).count());
  return text;
}

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

std::string RestartPolicy::explain(const ExitStatus& failure, std::optional<milliseconds> pause) const {
  if (max_restarts_ == 0) return "";
  const std::string count = concat(restarts_, " of ", max_restarts_);
  if (!pause)
    return why_final(failure).empty() ? concat("; no restart is left after ", count)
                                      : concat("; no restart: ", why_final(failure));
  return concat("; restart ", count, pause->count() ? " in " + seconds(*pause) : "");
}

}  // namespace rz::rzrun
