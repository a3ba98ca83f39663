#pragma once
/// The command line of the _perf programs: that of nccl-tests.

#include <string>
#include <vector>

#include "comm/core/types.h"
#include "tools/command_line/command_line.h"

namespace rz::bench {

struct Collective;

enum class Average { rank0, mean, min, max };

struct Options {
  std::vector<std::string> arguments;  ///< as given, for the report
  int threads = 1;
  int gpus = 1;       ///< ranks a thread, each on a device of its own
  bool cuda = false;  ///< device memory
  bool null_stream = false;
  int graph = 0;  ///< replays of a captured graph of all iterations; 0: none
  std::size_t min_bytes = 32 << 20, max_bytes = 32 << 20, step_bytes = 1 << 20;
  double step_factor = 1;  ///< above 1 it replaces step_bytes
  int iterations = 20, warmup = 1, aggregated = 1, cycles = 1, checks = 1;
  bool separate = false;  ///< the aggregated operations are calls of their own, not one group
  std::vector<ReduceOp> ops;
  std::vector<DType> dtypes;
  int root = 0;      ///< -1: each in turn
  int blocking = 0;  ///< 1: wait and barrier an inner iteration; 2: wait; 3: a barrier an outer iteration
  bool cpu_time = false;
  Average average = Average::mean;
  int registered = 0;
  bool timestamps = false;
  std::string json;
  double timeout_s = 0;
  std::string backend;    ///< empty: RZ_BACKEND's
  std::string algorithm;  ///< empty: RZ_ALGORITHM's
  bool verbose = false;   ///< before each row, which algorithm it takes, and why
  bool memory_report = false;
  int misalign = 0;  ///< elements that buffers start after their natural place
  bool per_iteration = false, percentiles = false;
  int skipped = 0;  ///< first iterations that these two leave out

  /// A clock is read at each iteration's end.
  bool times_iterations() const { return per_iteration || percentiles; }

  /// The operations of an iteration are one group. Those that are waited for one by one are none.
  bool grouped() const { return aggregated > 1 && !separate && blocking != 1 && blocking != 2; }

  std::size_t next_size(std::size_t bytes) const;
};

using ParsedOptions = Parsed<Options>;

/// Errc::config, one line, for whatever is wrong.
ParsedOptions parse_options(const Collective&, int argc, const char* const* argv);

/// nccl-tests' words: "float", "bfloat16", …
const char* type_name(DType);

}  // namespace rz::bench
