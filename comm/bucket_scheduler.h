#pragma once
/// Groups gradients into buckets and launches one collective per bucket as soon as its members are ready.
/// Buckets are launched in the same order on every rank, overlapped with the rest of the backward pass. (Li
/// et al., "PyTorch Distributed", VLDB 2020.)

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "device/stream.h"
#include "work.h"

namespace rz {

struct BucketMember {
  std::size_t count = 0;  ///< elements
  DType dtype = DType::f32;
};

struct BucketOptions {
  /// Bytes; cap of the bucket launched first.
  std::size_t first_bytes = std::size_t{1} << 20;
  /// Bytes; cap of the other buckets. A larger member gets a bucket of its own.
  std::size_t cap_bytes = std::size_t{25} << 20;
  /// Elements. Members start at multiples of `align`, and buckets end at multiples of `granularity`: with
  /// size · align all ranks have shards of the same length.
  std::size_t align = 64;
  std::size_t granularity = 64;
  bool overlap = true;  ///< false: wait for each bucket before launching the next
};

/// Placement of the members. Bucket b holds elements [0, buckets[b].count) of one dtype; padding is zero.
struct BucketLayout {
  struct Bucket {
    DType dtype;
    std::size_t count;         ///< elements, a multiple of the granularity
    std::vector<int> members;  ///< in expected ready order
  };
  struct MemberOffset {
    int bucket;
    std::size_t offset;  ///< elements from the bucket's start
  };
  std::vector<Bucket> buckets;        ///< in launch order
  std::vector<MemberOffset> offsets;  ///< one per member
};

/// Computes the layout; pure function. `members` are in order of first use in the forward pass. Buckets are
/// filled from the last member to the first, one dtype per bucket. A non-empty `order`, a permutation of the
/// member indices, replaces that sequence. Errc::invalid_argument if it is no permutation.
BucketLayout plan_buckets(std::span<const BucketMember>, const BucketOptions&,
                          std::span<const int> order = {});

/// Runs the steps of one layout: per step, ready() for members in any order, then finish(). Not thread-safe.
/// The destructor does not wait: memory of collectives in flight must outlive them.
class BucketScheduler {
 public:
  /// Starts the collective of a bucket. Called once per bucket and step, in layout order.
  using Launch = std::function<Work(int bucket, const Stream&)>;

  BucketScheduler(BucketLayout, BucketOptions, Launch);

  const BucketLayout& layout() const { return layout_; }

  /// The member's gradient is complete after the work now in `producer`. Errc::invalid_argument on the second
  /// call for a member in one step.
  void ready(int member, const Stream& producer);
  /// Treats members that are not ready as ready, and launches the remaining buckets.
  void launch_rest(const Stream& producer);
  /// Calls launch_rest(), then orders `consumer` after all launched collectives.
  void finish(const Stream& consumer);
  /// Discards an unfinished step. Waits for its collectives, throws the first failure, and clears it.
  void reset();

  /// Members in the order in which they became ready in the last finished step, followed by those that did
  /// not.
  const std::vector<int>& ready_order() const { return last_order_; }
  /// Members that did not become ready in the last finished step.
  const std::vector<int>& unused() const { return unused_; }

  struct Report {
    /// Time spent waiting in finish(), and after each launch without overlap.
    std::chrono::nanoseconds exposed{};
    std::chrono::nanoseconds total{};  ///< from the first launch to the end of the last bucket
    int launched_early = 0;            ///< buckets launched before launch_rest() or finish()
  };
  const Report& report() const { return report_; }

 private:
  void launch_complete_buckets(const Stream&);
  void wait_on(const Work&, const Stream&);
  BucketLayout layout_;
  BucketOptions options_;
  Launch launch_;
  std::vector<int> missing_;  // per bucket: members that are not ready yet
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
