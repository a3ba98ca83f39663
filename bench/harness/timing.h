#pragma once
/// Times a case on one rank.

#include <vector>

#include "bench/harness/buffers.h"
#include "bench/harness/case.h"
#include "bench/harness/options.h"

namespace rz::bench {

/// How the operations of an iteration are started and waited for.
enum class TimingMode {
  one_operation,       ///< one operation, which the iteration waits for
  several_operations,  ///< -m: several in flight, which the iteration waits for
  stream,              ///< on a device: iterations are enqueued; the run waits for all
  graph,               ///< -G: all iterations are captured in a CUDA graph, which is replayed
};
TimingMode timing_mode(const Options&, Device);

/// Of one rank, per operation, in microseconds.
struct Timed {
  double mean_us = 0;
  std::vector<double> iterations_us;  ///< with Options::times_iterations(), else empty
};

/// Starts operation `index` of the rotation.
Work start_operation(const Collective&, BufferRotation&, int index);
/// Starts `count` operations from `first` on as one group.
Work start_group(const Collective&, Communicator&, BufferRotation&, int first, int count);

/// Times the iterations of cases in the mode that the options choose.
class Timing {
 public:
  Timing(const Collective&, const Options&, Communicator&, const Stream&);

  /// One operation that is not timed comes first. Every rank calls it together.
  Timed time(BufferRotation) const;

 private:
  /// A run of iterations: what they use and what they have started.
  struct Run {
    BufferRotation rotation;
    std::vector<Work> works;
  };

  Timed time_iterations(Run&) const;
  double time_graph(Run&) const;
  /// Each runs iteration `i` and returns the microseconds until its operations were submitted.
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
