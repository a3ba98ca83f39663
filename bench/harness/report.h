#pragma once
/// What the tools print, in nccl-tests' format, and what they write with -J.

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
  std::optional<std::size_t> wrong;  ///< none: not checked
  std::vector<double> samples;       ///< with -I: of rank 0's iterations, us
  std::optional<Summary> slowest;    ///< with --percentiles: of the slowest rank of each iteration, us
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
/// nccl-tests' 13 words; then, if the row has them, p50, p99 and worst out of place and in place; then its
/// date and time.
std::string row_line(const Row&);
std::string sample_lines(const Row&, int skipped);

/// Everything that a run found. Its last lines, and its JSON.
struct Results {
  std::string start_time, end_time;
  std::vector<DeviceLine> devices;
  std::vector<Row> rows;
  int failed_checks = 0;

  double average_bus_bandwidth() const;
  std::string closing_lines(const Collective&) const;
};

/// "2026-11-21 05:20:00" in local time.
std::string now();

/// nccl-tests' JSON, version 3, less what has one value here: the group of a device, and the check of the
/// average bandwidth. Errc::system if the file cannot be written.
void write_json(const std::string& path, const Collective&, const Options&, const Results&);

}  // namespace rz::bench
