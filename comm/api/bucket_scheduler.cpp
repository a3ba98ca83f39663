#include "comm/bucket_scheduler.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

using Clock = std::chrono::steady_clock;

// Fills buckets in sequence; one bucket per dtype is open at a time.
class BucketFiller {
 public:
  BucketFiller(BucketLayout& layout, const BucketOptions& options) : layout_(layout), options_(options) {
    open_.fill(-1);
  }

  void add(int member, const BucketMember& m) {
    const std::size_t count = round_up(m.count, options_.align);
    int& bucket = open_[static_cast<std::size_t>(m.dtype)];
    if (bucket < 0 || (at(bucket).count + count) * size_of(m.dtype) > cap(bucket)) {
      bucket = static_cast<int>(layout_.buckets.size());
      layout_.buckets.push_back({m.dtype, 0, {}});
    }
    layout_.offsets[static_cast<std::size_t>(member)] = {bucket, at(bucket).count};
    at(bucket).members.push_back(member);
    at(bucket).count += count;
  }

  void close() {
    for (auto& b : layout_.buckets) b.count = round_up(b.count, options_.granularity);
  }

 private:
  BucketLayout::Bucket& at(int bucket) { return layout_.buckets[static_cast<std::size_t>(bucket)]; }
  std::size_t cap(int bucket) const { return bucket == 0 ? options_.first_bytes : options_.cap_bytes; }
  BucketLayout& layout_;
  const BucketOptions& options_;
  std::array<int, dtype_count> open_;
};

}  // namespace

BucketLayout plan_buckets(std::span<const BucketMember> members, const BucketOptions& options,
                          std::span<const int> order) {
  require(options.align > 0 && options.granularity > 0, Errc::invalid_argument,
          "buckets need an alignment and a granularity of at least 1 element");
  require(order.empty() || order.size() == members.size(), Errc::invalid_argument, "an order of ",
          order.size(), " members was given for ", members.size());
  std::vector<int> sequence(order.begin(), order.end());
  if (order.empty()) {
    sequence.resize(members.size());
    std::iota(sequence.rbegin(), sequence.rend(), 0);
  }
  BucketLayout layout;
  layout.offsets.assign(members.size(), {-1, 0});
  BucketFiller filler(layout, options);
  for (const int m : sequence) {
    require(m >= 0 && m < static_cast<int>(members.size()) &&
                layout.offsets[static_cast<std::size_t>(m)].bucket < 0,
            Errc::invalid_argument, "member ", m,
            " stands twice, or not at all, in the order of the buckets");
    filler.add(m, members[static_cast<std::size_t>(m)]);
  }
  filler.close();
  return layout;
}

BucketScheduler::BucketScheduler(BucketLayout layout, BucketOptions options, Launch launch)
    : layout_(std::move(layout)), options_(options), launch_(std::move(launch)) {
  order_.reserve(layout_.offsets.size());
  reset();
}

void BucketScheduler::reset() {
  std::vector<Work> works;
  if (!works_.empty()) works.swap(works_);  // otherwise works_ keeps its capacity
  order_.clear();
  next_ = launched_early_ = 0;
  ends_ = false;
  waited_ = {};
  missing_.clear();
  for (const auto& b : layout_.buckets) missing_.push_back(static_cast<int>(b.members.size()));
  is_ready_.assign(layout_.offsets.size(), false);
  for (const Work& w : works) w.wait();  // last, so that a failure is thrown only once
}

void BucketScheduler::ready(int member, const Stream& producer) {
  require(member >= 0 && member < static_cast<int>(is_ready_.size()), Errc::invalid_argument,
          "bucket member ", member, " does not exist; there are ", is_ready_.size());
  const auto m = static_cast<std::size_t>(member);
  require(!is_ready_[m], Errc::invalid_argument, "bucket member ", member, " became ready twice in one step");
  is_ready_[m] = true;
  order_.push_back(member);
  --missing_[static_cast<std::size_t>(layout_.offsets[m].bucket)];
  launch_complete_buckets(producer);
}

void BucketScheduler::launch_complete_buckets(const Stream& stream) {
  while (next_ < static_cast<int>(layout_.buckets.size()) && missing_[static_cast<std::size_t>(next_)] == 0) {
    if (next_ == 0) first_launch_ = Clock::now();
    works_.push_back(launch_(next_, stream));
    ++next_;  // not reached if the launch threw: the bucket is retried
    if (!options_.overlap) wait_on(works_.back(), stream);
  }
}

void BucketScheduler::wait_on(const Work& work, const Stream& stream) {
  const auto begin = Clock::now();
  work.wait_on(stream);
  waited_ += Clock::now() - begin;
}

void BucketScheduler::launch_rest(const Stream& producer) {
  if (!ends_) launched_early_ = next_;
  ends_ = true;
  std::fill(missing_.begin(), missing_.end(), 0);
  launch_complete_buckets(producer);
}

void BucketScheduler::finish(const Stream& consumer) {
  launch_rest(consumer);
  unused_.clear();
  for (std::size_t m = 0; m < is_ready_.size(); ++m)
    if (!is_ready_[m]) unused_.push_back(static_cast<int>(m));
  for (const Work& w : works_) wait_on(w, consumer);
  report_ = {.exposed = waited_, .launched_early = launched_early_};
  if (!works_.empty()) report_.total = Clock::now() - first_launch_;
  last_order_ = order_;
  last_order_.insert(last_order_.end(), unused_.begin(), unused_.end());
  works_.clear();
  reset();
}

}  // namespace rz
