#include "comm/bucket_scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using Members = std::vector<BucketMember>;
using List = std::vector<int>;

BucketOptions fine(std::size_t first_bytes, std::size_t cap_bytes) {
  return {.first_bytes = first_bytes, .cap_bytes = cap_bytes, .align = 1, .granularity = 1};
}

std::vector<List> members_of(const BucketLayout& layout) {
  std::vector<List> out;
  for (const auto& b : layout.buckets) out.push_back(b.members);
  return out;
}

TEST(PlanBuckets, OfNothingIsNothing) {
  const BucketLayout layout = plan_buckets({}, {});
  EXPECT_TRUE(layout.buckets.empty());
  EXPECT_TRUE(layout.offsets.empty());
}

TEST(PlanBuckets, FillsFromTheLastMemberToTheFirst) {
  const BucketLayout layout = plan_buckets(Members(5, {10, DType::f32}), fine(40, 80));
  EXPECT_EQ(members_of(layout), (std::vector<List>{{4}, {3, 2}, {1, 0}}));
  EXPECT_EQ(layout.buckets[1].count, 20u);
  EXPECT_EQ(layout.offsets[2].bucket, 1);
  EXPECT_EQ(layout.offsets[2].offset, 10u);
}

TEST(PlanBuckets, KeepsTypesApart) {
  const Members members{{8, DType::f32}, {8, DType::bf16}, {8, DType::f32}, {8, DType::bf16}};
  const BucketLayout layout = plan_buckets(members, fine(1024, 1024));
  EXPECT_EQ(members_of(layout), (std::vector<List>{{3, 1}, {2, 0}}));
  EXPECT_EQ(layout.buckets[0].dtype, DType::bf16);
  EXPECT_EQ(layout.buckets[1].dtype, DType::f32);
}

TEST(PlanBuckets, CapsAreInBytesOfTheType) {
  const Members halves(4, {10, DType::f16});
  EXPECT_EQ(members_of(plan_buckets(halves, fine(40, 20))), (std::vector<List>{{3, 2}, {1}, {0}}));
}

TEST(PlanBuckets, AMemberLargerThanTheCapIsAlone) {
  const Members members{{1, DType::f32}, {1, DType::f32}, {100, DType::f32}, {1, DType::f32}};
  EXPECT_EQ(members_of(plan_buckets(members, fine(8, 8))), (std::vector<List>{{3}, {2}, {1, 0}}));
}

TEST(PlanBuckets, PadsMembersAndBuckets) {
  const BucketOptions options{.first_bytes = 1 << 20, .cap_bytes = 1 << 20, .align = 6, .granularity = 16};
  const BucketLayout layout =
      plan_buckets(Members{{7, DType::f32}, {1, DType::f32}, {0, DType::f32}}, options);
  ASSERT_EQ(layout.buckets.size(), 1u);
  EXPECT_EQ(layout.offsets[2].offset, 0u);
  EXPECT_EQ(layout.offsets[1].offset, 0u);  // after a member of no elements
  EXPECT_EQ(layout.offsets[0].offset, 6u);
  EXPECT_EQ(layout.buckets[0].count, 32u);  // 6 + 12, to a multiple of 16
}

TEST(PlanBuckets, PaddingCountsAgainstTheCap) {
  const BucketOptions options{.first_bytes = 512, .cap_bytes = 512, .align = 64, .granularity = 64};
  EXPECT_EQ(members_of(plan_buckets(Members(3, {1, DType::f32}), options)), (std::vector<List>{{2, 1}, {0}}));
}

TEST(PlanBuckets, FollowsAnOrder) {
  const Members members(4, {10, DType::f32});
  EXPECT_EQ(members_of(plan_buckets(members, fine(80, 80), List{2, 0, 3, 1})),
            (std::vector<List>{{2, 0}, {3, 1}}));
  test::expect_refused(
      [&] {
        plan_buckets(members, fine(80, 80), List{2, 0, 3});
      },
      Errc::invalid_argument, {"3 members"});
  test::expect_refused(
      [&] {
        plan_buckets(members, fine(80, 80), List{2, 0, 3, 3});
      },
      Errc::invalid_argument, {"member 3"});
  test::expect_refused(
      [&] {
        plan_buckets(members, fine(80, 80), List{2, 0, 3, 4});
      },
      Errc::invalid_argument, {"member 4"});
  test::expect_refused([&] { plan_buckets(members, {.align = 0}); }, Errc::invalid_argument, {"alignment"});
}

// Members never overlap, lie within their bucket, and all have an offset, whatever the sizes.
TEST(PlanBuckets, MembersDoNotOverlap) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    Members members(random() % 30);
    for (auto& m : members) m = {random() % 50, random() % 2 ? DType::f32 : DType::bf16};
    const BucketOptions options{.first_bytes = random() % 300,
                                .cap_bytes = random() % 600,
                                .align = 1 + random() % 8,
                                .granularity = 1 + random() % 64};
    List order(members.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const BucketLayout layout = plan_buckets(members, options, order);
    std::vector<std::vector<bool>> taken;
    for (const auto& b : layout.buckets) {
      EXPECT_EQ(b.count % options.granularity, 0u);
      taken.emplace_back(b.count);
    }
    for (std::size_t m = 0; m < members.size(); ++m) {
      const auto [bucket, offset] = layout.offsets[m];
      const auto& b = layout.buckets.at(static_cast<std::size_t>(bucket));
      EXPECT_EQ(b.dtype, members[m].dtype);
      EXPECT_EQ(offset % options.align, 0u);
      EXPECT_EQ(std::count(b.members.begin(), b.members.end(), static_cast<int>(m)), 1);
      ASSERT_LE(offset + members[m].count, b.count);
      for (std::size_t i = offset; i < offset + members[m].count; ++i) {
        EXPECT_FALSE(taken[static_cast<std::size_t>(bucket)][i]) << "element " << i << " is given twice";
        taken[static_cast<std::size_t>(bucket)][i] = true;
      }
    }
  }
}

// A collective that never ends; it records launches and waits.
struct Log {
  struct Waited final : WorkState {
    explicit Waited(int* count) : count(count) {}
    bool done() const noexcept override { return true; }
    void wait() override { ++*count; }
    int* count;
  };
  BucketScheduler::Launch launch() {
    return [this](int bucket, const Stream&) {
      launched.push_back(bucket);
      return Work(std::make_shared<Waited>(&waits));
    };
  }
  List launched;
  int waits = 0;
};

// Buckets {5, 4}, {3, 2} and {1, 0}.
BucketLayout three_buckets() { return plan_buckets(Members(6, {10, DType::f32}), fine(80, 80)); }

TEST(BucketScheduler, LaunchesInTheLayoutsOrderWhateverBecomesReadyFirst) {
  List order{0, 1, 2, 3, 4, 5};
  do {
    Log log;
    BucketScheduler scheduler(three_buckets(), {}, log.launch());
    int early = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      scheduler.ready(order[i], {});
      const auto ready = [&](int m) {
        return std::find(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(i) + 1, m) !=
               order.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      };
      while (early < 3 && ready(5 - 2 * early) && ready(4 - 2 * early)) ++early;
      ASSERT_EQ(log.launched.size(), static_cast<std::size_t>(early)) << "at once, and not before";
    }
    scheduler.finish({});
    EXPECT_EQ(log.launched, (List{0, 1, 2}));
    EXPECT_EQ(log.waits, 3);
    EXPECT_EQ(scheduler.report().launched_early, 3);
    EXPECT_EQ(scheduler.ready_order(), order);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(BucketScheduler, WithoutOverlapWaitsAfterEachLaunch) {
  Log log;
  BucketScheduler scheduler(three_buckets(), {.overlap = false}, log.launch());
  for (const int m : {5, 4, 3, 2, 1, 0}) {
    scheduler.ready(m, {});
    EXPECT_EQ(log.launched.size(), static_cast<std::size_t>(6 - m) / 2);
    EXPECT_EQ(log.waits, (6 - m) / 2) << "a bucket is waited for before the next one can be filled";
  }
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 1, 2}));
  EXPECT_EQ(scheduler.report().launched_early, 3);
}

TEST(BucketScheduler, LaunchesTheRestOnce) {
  Log log;
  BucketScheduler scheduler(three_buckets(), {}, log.launch());
  for (const int m : {5, 4, 0}) scheduler.ready(m, {});
  scheduler.launch_rest({});
  EXPECT_EQ(log.launched, (List{0, 1, 2}));
  EXPECT_EQ(log.waits, 0);
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 1, 2}));
  EXPECT_EQ(log.waits, 3);
  EXPECT_EQ(scheduler.report().launched_early, 1);
  EXPECT_EQ(scheduler.unused(), (List{1, 2, 3}));
}

// A rank that omitted a bucket would reduce other buckets than its peers.
TEST(BucketScheduler, ALaunchThatThrewIsMadeAgain) {
  Log log;
  bool broken = true;
  BucketScheduler scheduler(three_buckets(), {}, [&](int bucket, const Stream& stream) {
    if (bucket == 1 && std::exchange(broken, false)) fail(Errc::system, "no memory");
    return log.launch()(bucket, stream);
  });
  for (const int m : {5, 4, 3}) scheduler.ready(m, {});
  EXPECT_THROW(scheduler.ready(2, {}), Error);
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 1, 2}));
}

TEST(BucketScheduler, MembersThatDidNotBecomeReadyCountAsReadyInFinish) {
  Log log;
  BucketScheduler scheduler(three_buckets(), {}, log.launch());
  for (const int m : {4, 1, 5, 2}) scheduler.ready(m, {});
  EXPECT_EQ(log.launched, (List{0}));
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 1, 2}));
  EXPECT_EQ(scheduler.unused(), (List{0, 3}));
  EXPECT_EQ(scheduler.ready_order(), (List{4, 1, 5, 2, 0, 3}));
  EXPECT_EQ(scheduler.report().launched_early, 1);
  for (int m = 0; m < 6; ++m) scheduler.ready(m, {});
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 1, 2, 0, 1, 2}));
  EXPECT_TRUE(scheduler.unused().empty());
}

TEST(BucketScheduler, RefusesAMemberTwiceOrThatDoesNotExist) {
  Log log;
  BucketScheduler scheduler(three_buckets(), {}, log.launch());
  scheduler.ready(3, {});
  test::expect_refused([&] { scheduler.ready(3, {}); }, Errc::invalid_argument,
                       {"member 3 became ready twice"});
  test::expect_refused([&] { scheduler.ready(6, {}); }, Errc::invalid_argument, {"member 6 does not exist"});
  test::expect_refused([&] { scheduler.ready(-1, {}); }, Errc::invalid_argument,
                       {"member -1 does not exist"});
  scheduler.finish({});
  scheduler.ready(3, {});  // a new step
  scheduler.finish({});
}

TEST(BucketScheduler, ResetDropsAnUnfinishedStep) {
  Log log;
  BucketScheduler scheduler(three_buckets(), {}, log.launch());
  for (const int m : {5, 4, 0}) scheduler.ready(m, {});
  scheduler.reset();
  EXPECT_EQ(log.waits, 1);
  for (int m = 0; m < 6; ++m) scheduler.ready(m, {});
  scheduler.finish({});
  EXPECT_EQ(log.launched, (List{0, 0, 1, 2}));
  EXPECT_EQ(log.waits, 4);
}

TEST(BucketScheduler, OfNothingFinishes) {
  Log log;
  BucketScheduler scheduler(plan_buckets({}, {}), {}, log.launch());
  scheduler.finish({});
  EXPECT_TRUE(log.launched.empty());
}

// A launch that fails leaves a scheduler that can be reset and used again.
TEST(BucketScheduler, AFailedWorkIsThrownByFinishAndClearedByReset) {
  struct Failed final : WorkState {
    bool done() const noexcept override { return true; }
    void wait() override { fail(Errc::peer_lost, "rank 1 died"); }
  };
  bool broken = true;
  BucketScheduler scheduler(three_buckets(), {}, [&](int, const Stream&) {
    return broken ? Work(std::make_shared<Failed>()) : Work();
  });
  scheduler.ready(0, {});
  EXPECT_THROW(scheduler.finish({}), Error);
  EXPECT_THROW(scheduler.reset(), Error);
  broken = false;
  scheduler.reset();
  for (int m = 0; m < 6; ++m) scheduler.ready(m, {});
  scheduler.finish({});
  EXPECT_EQ(scheduler.report().launched_early, 3);
}

// A collective that ends some time after its launch.
class Later final : public WorkState {
 public:
  explicit Later(std::chrono::milliseconds takes) : end_(std::chrono::steady_clock::now() + takes) {}
  bool done() const noexcept override { return std::chrono::steady_clock::now() >= end_; }
  void wait() override { std::this_thread::sleep_until(end_); }

 private:
  std::chrono::steady_clock::time_point end_;
};

TEST(BucketScheduler, ReportsTheTimeThatBackwardDidNotHide) {
  using std::chrono::milliseconds;
  const auto step = [](bool overlap) {
    BucketScheduler scheduler(three_buckets(), {.overlap = overlap}, [](int, const Stream&) {
      return Work(std::make_shared<Later>(milliseconds(60)));
    });
    for (int m = 5; m >= 0; --m) scheduler.ready(m, {});
    std::this_thread::sleep_for(milliseconds(100));  // the rest of backward
    scheduler.finish({});
    return scheduler.report();
  };
  const auto hidden = step(true), exposed = step(false);
  EXPECT_EQ(hidden.launched_early, 3);
  EXPECT_GE(hidden.total, milliseconds(100));
  EXPECT_LE(hidden.exposed, hidden.total - milliseconds(100)) << "backward's own time is not exposed";
  EXPECT_EQ(exposed.launched_early, 3);
  EXPECT_GE(exposed.exposed, milliseconds(3 * 59));
  EXPECT_GE(exposed.total, exposed.exposed);
}

TEST(BucketScheduler, RanksThatGetReadyInDifferentOrdersGetTheSameResult) {
  lab::group(3, {.timeout = std::chrono::seconds(20)}, [](Communicator& comm) {
    Members members;
    for (std::size_t m = 0; m < 20; ++m)
      members.push_back({m * m * 37 % 4001, m % 3 ? DType::f32 : DType::f64});
    const BucketOptions options{.first_bytes = 4096, .cap_bytes = 32768};
    const BucketLayout layout = plan_buckets(members, options);
    std::vector<std::shared_ptr<std::byte>> memory;
    for (const auto& b : layout.buckets) memory.push_back(comm.allocate(b.count * size_of(b.dtype)));
    BucketScheduler scheduler(layout, options, [&](int b, const Stream& stream) {
      const auto i = static_cast<std::size_t>(b);
      return comm.all_reduce({memory[i].get(), layout.buckets[i].count, layout.buckets[i].dtype},
                             ReduceOp::sum, stream);
    });
    const auto value = [](std::size_t m, int r, int step) {
      return static_cast<double>(m + 1) * (r + 1) + step;
    };
    const auto each_element = [&](std::size_t m, const auto& f) {
      const auto [bucket, offset] = layout.offsets[m];
      std::byte* base = memory[static_cast<std::size_t>(bucket)].get();
      for (std::size_t i = offset; i < offset + members[m].count; ++i)
        members[m].dtype == DType::f64 ? f(reinterpret_cast<double*>(base)[i])
                                       : f(reinterpret_cast<float*>(base)[i]);
    };
    std::mt19937 random(static_cast<unsigned>(comm.rank()));
    for (int step = 0; step < 10; ++step) {
      List order(members.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const int m : order) {
        each_element(static_cast<std::size_t>(m), [&]<class T>(T& x) {
          x = static_cast<T>(value(static_cast<std::size_t>(m), comm.rank(), step));
        });
        scheduler.ready(m, {});
      }
      scheduler.finish({});
      for (std::size_t m = 0; m < members.size(); ++m) {
        const double want = value(m, 0, step) + value(m, 1, step) + value(m, 2, step);
        each_element(m, [&](auto x) { ASSERT_EQ(static_cast<double>(x), want) << "member " << m; });
      }
      EXPECT_GE(scheduler.report().total, scheduler.report().exposed);
    }
  });
}

}  // namespace
}  // namespace rz
