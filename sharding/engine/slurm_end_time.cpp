#include "sharding/engine/slurm_end_time.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "comm/core/error.h"

namespace rz {

using std::chrono::system_clock;

namespace {
constexpr const char* end_time_variable = "SLURM_JOB_END_TIME";
/// Beyond it, system_clock would overflow: it counts nanoseconds.
constexpr std::int64_t max_seconds = 9'000'000'000;
}  // namespace

std::optional<system_clock::time_point> slurm_job_end_time_from(const Variables& variables) {
  const auto text = variables(end_time_variable);
  if (!text) return {};
  std::int64_t seconds = -1;
  const char* end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, seconds);
  require(error == std::errc() && rest == end && seconds >= 0 && seconds <= max_seconds, Errc::config,
          end_time_variable, "='", *text,
          "' is not a number of seconds since 1970; unset it to train without an end");
  if (seconds == 0) return {};
  return system_clock::time_point(std::chrono::seconds(seconds));
}

std::optional<system_clock::time_point> slurm_job_end_time() {
  return slurm_job_end_time_from([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (!value) return {};
    return value;
  });
}

}  // namespace rz
