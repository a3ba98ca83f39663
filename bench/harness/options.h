#pragma once
/// The command line of the _perf programs, compatible with nccl-tests.

#include <string>
#include <vector>

#include "comm/core/types.h"
#include "tools/command_line/command_line.h"

namespace rz::bench {

struct Collective;

enum class Average { rank0, mean, min, max };

struct Options {
  std::vector<std::string> arguments;  ///< as given; printed in the report
  int threads = 1;
  int gpus = 1;       ///< ranks per thread, each on its own device
  bool cuda = false;  ///< use device memory
  bool null_stream = false;
  int graph = 0;  ///< replays of a captured graph of all iterations; 0: none
  std::size_t min_bytes = 32 << 20, max_bytes = 32 << 20, step_bytes = 1 << 20;
  double step_factor = 1;  ///< if above 1, replaces step_bytes
  int iterations = 20, warmup = 1, aggregated = 1, cycles = 1, checks = 1;
  bool separate = false;  ///< the aggregated operations are separate calls, not one group
  std::vector<ReduceOp> ops;
  std::vector<DType> dtypes;
  int root = 0;      ///< -1: all ranks in turn
  int blocking = 0;  ///< 1: wait and barrier per inner iteration; 2: wait; 3: barrier per outer iteration
  bool cpu_time = false;
  Average average = Average::mean;
  int registered = 0;
  bool timestamps = false;
  std::string json;
  double timeout_s = 0;
  std::string backend;    ///< empty: from RZ_BACKEND
  std::string algorithm;  ///< empty: from RZ_ALGORITHM
  bool verbose = false;   ///< print the selected algorithm and the reason before each row
  bool memory_report = false;
  int misalign = 0;  ///< offset of the buffers, in elements
  bool per_iteration = false, percentiles = false;
  int skipped = 0;     ///< first iterations, which these two options ignore
  bool touch = false;  ///< write the input before and read the result after each iteration, outside its time

  /// True if the time of each iteration is recorded.
  bool times_iterations() const { return per_iteration || percentiles || touch; }

  /// True if the operations of an iteration form one group. With -z 1 and 2 each operation is waited for, so
  /// they do not.
  bool grouped() const { return aggregated > 1 && !separate && blocking != 1 && blocking != 2; }

  std::size_t next_size(std::size_t bytes) const;
};

using ParsedOptions = Parsed<Options>;

/// Errors are Errc::config, in one line.
ParsedOptions parse_options(const Collective&, int argc, const char* const* argv);

/// Type names of nccl-tests: "float", "bfloat16", …
const char* type_name(DType);

}  // namespace rz::bench
