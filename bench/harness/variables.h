#pragma once
/// Variables of nccl-tests, NCCL_TESTS_…: each is applied, or refused by name.

#include <optional>

#include "bench/collectives.h"

namespace rz::bench {

/// The part of a bandwidth that is enough, as in nccl-tests.
constexpr double enough_bandwidth = 0.9;

/// NCCL_TESTS_MIN_BW: the average bus bandwidth in GB/s that a run must reach, but for a tenth of it; nothing
/// if it is not set, or -1. Errc::config names any other of nccl-tests that would change what this
/// collective's program measures, one that nccl-tests does not have, and a value that is no number.
std::optional<double> min_bandwidth_from_environment(const Collective&);

}  // namespace rz::bench
