#pragma once
/// Times a case on one rank.

#include <vector>

#include "bench/harness/buffers.h"
#include "bench/harness/case.h"
#include "bench/harness/options.h"

namespace rz::bench {

/// How the operations of an iteration are started and completed.
enum class TimingMode {
  one_operation,       ///< one operation; the iteration waits for it
  several_operations,  ///< -m: several operations in flight; the iteration waits for all
  stream,              ///< on a device: iterations are enqueued, and the run waits for all of them
  graph,               ///< -G: all iterations are captured in a CUDA graph, which is replayed
};
TimingMode timing_mode(const Options&, Device);

/// Times of one rank, in microseconds per operation.
struct Timed {
  double mean_us = 0;
  std::vector<double> iterations_us;  ///< empty unless Options::times_iterations()
};

/// Starts operation `index` of the rotation.
Work start_operation(const Collective&, BufferRotation&, int index);
/// Starts `count` operations from `first` on as one group.
Work start_group(const Collective&, Communicator&, BufferRotation&, int first, int count);

/// Times the iterations of a case in the mode selected by the options.
class Timing {
 public:
  Timing(const Collective&, const Options&, Communicator&, const Stream&);

  /// Runs one warm-up operation first. Collective.
  Timed time(BufferRotation) const;

 private:
  /// State of one run: its buffers and the operations started.
  struct Run {
    BufferRotation rotation;
    std::vector<Work> works;
  };

  Timed time_iterations(Run&) const;
  double time_graph(Run&) const;
  /// Each of these runs iteration `i` and returns the microseconds until its operations were submitted.
  double iterate(Run&, int i) const;
  double run_one_operation(Run&, int i) const;
  double run_several_operations(Run&, int i) const;
  double enqueue(Run&, int i) const;
  double per_operation(double us_of_all) const;

  const Collective& collective_;
  const Options& options_;
  Communicator& comm_;
  const Stream stream_;
  const TimingMode mode_;
};

}  // namespace rz::bench
