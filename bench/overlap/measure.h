#pragma once
/// Times gradients that are all-reduced in buckets while the ranks compute.

#include <chrono>
#include <vector>

#include "bench/support/memory.h"
#include "comm/bucket_scheduler.h"
#include "comm/communicator.h"

namespace rz::bench::overlap {

struct Plan {
  std::size_t bytes = 495'000'000, bucket_bytes = std::size_t{25} << 20;
  std::size_t members = 5;  ///< a bucket's: parameters whose gradients become ready one after the other
  int iterations = 5;
  int registered = 1;  ///< of memory_of()
  long passes = 0;     ///< of compute a member; 0: so many that computing takes as long as communicating
};

/// Milliseconds of one iteration on one rank, or of the rank that took longest.
struct Times {
  double compute = 0;        ///< alone
  double communication = 0;  ///< alone: all buckets launched at once
  double together = 0;       ///< each bucket launched when its last member is computed
  double exposed = 0;        ///< together less compute alone: communication that was not hidden
  double lost_compute = 0;   ///< what computing itself took longer than alone
};

/// What starts the buckets' collectives.
enum class Through { communicator, scheduler };

class Measure {
 public:
  /// Allocates, checks sums (Errc::io if one is wrong) and calibrates. Every rank makes the same calls.
  Measure(Communicator&, const Plan&);
  Measure(const Measure&) = delete;

  const BucketLayout& layout() const { return layout_; }
  /// Passes of compute a member.
  long passes() const { return passes_; }

  struct Results {
    std::vector<Times> communicator, scheduler;
  };
  /// Each iteration's times, each the maximum over ranks. All phases take turns; the first round is not
  /// counted.
  Results run();

 private:
  double compute_alone();
  double communicate(Through);
  Times together(Through);
  Times iterate(Through);
  void max_over_ranks(std::vector<Times>&);
  void check();
  void calibrate(long wanted);
  Work launch(int bucket);
  /// Computes every member, starts each bucket when its last member is computed, then waits for all. Returns
  /// ms of the computing alone.
  double step(Through, long passes);
  double max_of(double ms);

  Communicator& comm_;
  const Plan plan_;
  BucketOptions options_;
  BucketLayout layout_;
  std::vector<int> order_;      // of the members, as they become ready
  std::vector<Memory> memory_;  // a bucket
  BucketScheduler scheduler_;
  long passes_ = 0;
};

}  // namespace rz::bench::overlap
