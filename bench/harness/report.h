#pragma once
/// Text output in the format of nccl-tests, and JSON output for -J.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/collectives.h"
#include "bench/harness/devices.h"
#include "bench/harness/options.h"
#include "bench/support/statistics.h"

namespace rz::bench {

struct Figure {
  double us = 0, alg_bw = 0, bus_bw = 0;
  std::optional<std::size_t> wrong;  ///< empty if not checked
  std::vector<double> samples;       ///< with -I: times of the iterations of rank 0, us
  std::optional<Summary> slowest;    ///< with --percentiles: times of the slowest rank of each iteration, us
};

struct Row {
  std::size_t bytes = 0, count = 0;
  std::string type, op;
  int root = -1;
  Figure out_of_place, in_place;
  std::string when;  ///< with -S
};

std::string start_lines(const Collective&, const Options&);
std::string device_lines(const std::vector<DeviceLine>&);
std::string header_lines(const Options&);
/// The 13 columns of nccl-tests; then, if present, p50, p99 and maximum out of place and in place; then date
/// and time.
std::string row_line(const Row&);
std::string sample_lines(const Row&, int skipped);

/// All results of a run, with the closing lines and the JSON document.
struct Results {
  std::string start_time, end_time;
  std::vector<DeviceLine> devices;
  std::vector<Row> rows;  ///< with -N 0, which has no end: those of the latest cycle
  int failed_checks = 0;
  std::optional<double> min_bandwidth;  ///< NCCL_TESTS_MIN_BW
  std::string error;                    ///< why the run has failed

  void add(Row);
  /// The average over all rows that were added.
  double average_bus_bandwidth() const;
  bool too_slow() const;
  bool failed() const { return failed_checks > 0 || too_slow(); }
  std::string closing_lines(const Collective&) const;

 private:
  double bus_bandwidths_ = 0;
  std::size_t figures_ = 0;
};

/// "2026-11-21 05:20:00" in local time.
std::string now();

/// JSON version 3 of nccl-tests, without the device groups: there is one here.
std::string json_text(const Collective&, const Options&, const Results&);

}  // namespace rz::bench
