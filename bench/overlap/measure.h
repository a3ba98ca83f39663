#pragma once
/// Times the all_reduce of gradients in buckets while the ranks compute.

#include <chrono>
#include <vector>

#include "bench/support/memory.h"
#include "comm/bucket_scheduler.h"
#include "comm/communicator.h"

namespace rz::bench::overlap {

struct Plan {
  std::size_t bytes = 495'000'000, bucket_bytes = std::size_t{25} << 20;
  std::size_t members = 5;  ///< per bucket: parameters whose gradients become ready one after the other
  int iterations = 5;
  int registered = 1;  ///< argument of memory_of()
  /// Computing passes per member; 0: calibrated, so that computing takes as long as communicating.
  long passes = 0;
};

/// Milliseconds of one iteration, on one rank or as the maximum over ranks.
struct Times {
  double compute = 0;        ///< computing alone
  double communication = 0;  ///< communicating alone, all buckets launched at once
  double overlapped = 0;     ///< each bucket launched when its last member is computed
  double exposed = 0;        ///< overlapped time minus computing alone: communication that was not hidden
  double lost_compute = 0;   ///< additional time of computing while communicating
};

/// The interface that starts the collectives of the buckets.
enum class Through { communicator, scheduler };

class Measure {
 public:
  /// Allocates, checks sums (Errc::io if one is wrong) and calibrates. Collective.
  Measure(Communicator&, const Plan&);
  Measure(const Measure&) = delete;

  const BucketLayout& layout() const { return layout_; }
  /// Computing passes per member.
  long passes() const { return passes_; }

  struct Results {
    std::vector<Times> communicator, scheduler;
  };
  /// Times of each iteration, each the maximum over ranks. Phases are interleaved; a warm-up round is not
  /// counted. Collective.
  Results run();

 private:
  double compute_alone();
  double communicate(Through);
  Times overlapped(Through);
  Times iterate(Through);
  void max_over_ranks(std::vector<Times>&);
  void check();
  void calibrate(long wanted);
  Work launch(int bucket);
  /// Computes all members, starts each bucket when its last member is computed, then waits for all of them.
  /// Returns the milliseconds of the computing alone.
  double step(Through, long passes);
  double max_of(double ms);

  Communicator& comm_;
  const Plan plan_;
  BucketOptions options_;
  BucketLayout layout_;
  std::vector<int> order_;      // members in the order in which they become ready
  std::vector<Memory> memory_;  // one per bucket
  BucketScheduler scheduler_;
  long passes_ = 0;
};

}  // namespace rz::bench::overlap
