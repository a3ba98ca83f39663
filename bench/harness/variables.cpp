#include "bench/harness/variables.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz::bench {
namespace {

constexpr std::string_view prefix = "NCCL_TESTS_", min_bandwidth = "NCCL_TESTS_MIN_BW";

/// What nccl-tests does by a variable that is refused, and what to do instead.
struct Refused {
  std::string_view name;
  std::string_view collective;  ///< the only one whose program reads it; empty: all do
  std::string_view why;
};

constexpr std::string_view of_groups =
    "divides the ranks into groups in nccl-tests; this program measures one group of all ranks: unset it, "
    "and "
    "start a job of its own for each group";
constexpr std::string_view of_counts =
    "chooses what each rank sends to each other in nccl-tests; here these are one, two or three thirds of an "
    "equal share: unset it";

constexpr Refused refused[] = {
    {"NCCL_TESTS_SPLIT", "", of_groups},
    {"NCCL_TESTS_SPLIT_MASK", "", of_groups},
    {"NCCL_TESTS_DEVICE", "",
     "is the first CUDA device of a process in nccl-tests: unset it, and set CUDA_VISIBLE_DEVICES to the "
     "devices instead"},
    {"NCCL_TESTS_ALLTOALLV_SPREAD", "alltoallv", of_counts},
    {"NCCL_TESTS_ALLTOALLV_MATRIX_FILE", "alltoallv", of_counts},
    {"NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "alltoallv", of_counts},
    {"NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY", "alltoallv",
     "prints the bandwidth of each rank in nccl-tests, which this program does not: unset it"},
};

void check(std::string_view name, std::string_view value, const Collective& collective) {
  if (name == min_bandwidth) return;
  const Refused* known = std::ranges::find(refused, name, &Refused::name);
  if (known == std::end(refused)) {
    std::string names(min_bandwidth);
    for (const Refused& r : refused) names += concat(", ", r.name);
    fail(Errc::config, name, " is no variable of nccl-tests, which has ", names, "; unset it");
  }
  require(!known->collective.empty() && known->collective != collective.name, Errc::config, name, "='", value,
          "' ", known->why);
}

}  // namespace

std::optional<double> min_bandwidth_from_environment(const Collective& collective) {
  std::optional<double> limit;
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view entry = *variable;
    const std::size_t equals = entry.find('=');
    if (!entry.starts_with(prefix) || equals == entry.npos || equals + 1 == entry.size()) continue;
    const std::string_view name = entry.substr(0, equals), value = entry.substr(equals + 1);
    check(name, value, collective);
    if (name != min_bandwidth) continue;
    limit = parse_number<double>(std::string(value));
    require(limit && std::isfinite(*limit) && (*limit >= 0 || *limit == -1), Errc::config, name, "='", value,
            "' is no bandwidth in GB/s");
    if (*limit == -1) limit.reset();
  }
  return limit;
}

}  // namespace rz::bench
