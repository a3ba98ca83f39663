#pragma once
/// Cuts gradients into buckets and launches a collective for each as soon as its members are ready, in an
/// order that is the same on every rank, overlapped with the backward pass that makes the rest ready.

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "comm/device/stream.h"
#include "comm/work.h"

namespace rz {

struct BucketMember {
  std::size_t count = 0;  ///< elements
  DType dtype = DType::f32;
};

struct BucketOptions {
  std::size_t first_bytes = std::size_t{1} << 20;  ///< cap of the bucket that is launched first
  std::size_t cap_bytes = std::size_t{25}
                          << 20;  ///< cap of every other; a member larger than it has its own bucket
  /// Members start at multiples of this many elements, and buckets end at multiples of `granularity`:
  /// strategies that shard pass size · align, so that every rank's part is equally long.
  std::size_t align = 64;
  std::size_t granularity = 64;
  bool overlap =
      true;  ///< false: each launch is waited for at once, so that one bucket is under way at a time
};

/// Where the members lie: bucket b holds elements [0, buckets[b].count) of one dtype, padding included and
/// zero.
struct BucketLayout {
  struct Bucket {
    DType dtype;
    std::size_t count;         ///< elements, a multiple of the granularity
    std::vector<int> members;  ///< in the order in which they are expected to become ready
  };
  struct MemberOffset {
    int bucket;
    std::size_t offset;  ///< elements from the bucket's start
  };
  std::vector<Bucket> buckets;        ///< in launch order
  std::vector<MemberOffset> offsets;  ///< one a member
};

/// Pure: members in the order of their first use; buckets are filled from the last member to the first, one
/// dtype each. `order` (if not empty) gives the expected ready order instead: a permutation of the members.
BucketLayout plan_buckets(std::span<const BucketMember>, const BucketOptions&,
                          std::span<const int> order = {});

/// One step: ready() for members in any order, then finish(). Not thread-safe; one thread drives it.
/// Destruction waits for nothing: collectives still in flight go on, so their memory must outlive them.
class BucketScheduler {
 public:
  /// Starts the collective of a bucket; called in the layout's order, once a bucket and step.
  using Launch = std::function<Work(int bucket, const Stream&)>;

  BucketScheduler(BucketLayout, BucketOptions, Launch);

  const BucketLayout& layout() const { return layout_; }

  /// The member's gradient is complete as of now in `producer`. Twice in a step is Errc::invalid_argument.
  void ready(int member, const Stream& producer);
  /// Members that never became ready count as ready now: launches what is left.
  void launch_rest(const Stream& producer);
  /// launch_rest(), and orders `consumer` after all that was launched.
  void finish(const Stream& consumer);
  /// Forgets a step half done. Its Works are waited for; the first failure is thrown, and forgotten as well.
  void reset();

  /// The members in the order in which they became ready in the last finished step; those that did not, last.
  const std::vector<int>& ready_order() const { return last_order_; }
  /// Members that did not become ready in the last finished step.
  const std::vector<int>& unused() const { return unused_; }

  struct Report {
    std::chrono::nanoseconds exposed{};  ///< time spent waiting, in finish() and without overlap:
                                         ///< communication that was not hidden
    std::chrono::nanoseconds total{};    ///< from the first launch to the end of the last bucket
    int launched_early = 0;              ///< buckets launched before finish()
  };
  const Report& report() const { return report_; }

 private:
  void launch_complete_buckets(const Stream&);
  void wait_on(const Work&, const Stream&);
  BucketLayout layout_;
  BucketOptions options_;
  Launch launch_;
  std::vector<int> missing_;  // members not ready yet, a bucket
  std::vector<bool> is_ready_;
  std::vector<int> order_, last_order_, unused_;
  std::vector<Work> works_;
  int next_ = 0;
  int launched_early_ = 0;
  bool ends_ = false;  // launch_rest() was called
  std::chrono::nanoseconds waited_{};
  std::chrono::steady_clock::time_point first_launch_{};
  Report report_;
};

}  // namespace rz
