/// Calls in flight while a scope computes: gradients reduced during backward, updated values published during
/// the update. No clocks: a mirrored communicator records which calls were
/// launched and not yet waited for.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/scope_course.h"

namespace rz {
namespace {

using test::CallRecord;
using test::scope_count;
using test::scopes_of;
using Scopes = test::Order;

constexpr int ranks = 2;

/// SGD that records its updates.
class ToldSgd final : public Optimizer {
 public:
  explicit ToldSgd(std::function<void()> during)
      : Optimizer({{.name = "all", .learning_rate = 0.5}}), during_(std::move(during)) {}
  const char* name() const override { return "recorded"; }
  std::string describe_group(int) const override { return "recorded"; }
  std::vector<StateSpec> states(int) const override { return {}; }
  void update(std::span<const UpdateSpan> spans, const UpdateScale&, const Stream&) const override {
    during_();
    for (const UpdateSpan& s : spans)
      for (std::size_t i = 0; i < s.count; ++i) s.value[i] -= 0.5f * static_cast<const float*>(s.gradient)[i];
  }
  std::vector<std::byte> constants(std::int64_t) const override { return {}; }

 private:
  std::function<void()> during_;
};

// ---- calls as scopes

CallRecord::Filter of_parameters(std::initializer_list<Collective> kinds) {
  return [kinds = std::set<Collective>(kinds)](const CallRecord::Call& c) {
    return kinds.contains(c.kind) && c.dtype == DType::f32;
  };
}
const CallRecord::Filter gathers = of_parameters({Collective::all_gather});
const CallRecord::Filter reductions = of_parameters({Collective::all_reduce, Collective::reduce_scatter});

/// first, first + step, … last; empty if last lies before first.
Scopes from_to(int first, int last, int step) {
  Scopes out;
  for (int i = first; (last - i) * step >= 0; i += step) out.push_back(i);
  return out;
}

/// Each parameter is a bucket of its own.
StrategyOptions single_buckets(bool overlap) {
  return {.reduce_bucket_size = 1, .first_bucket_size = 1, .overlap_comm = overlap, .rebuild = false};
}

/// One rank that trains, and its calls.
struct Training {
  Training(
      StrategyKind kind, StrategyOptions options, test::ScopeCourse::During during = [](int, Pass) {})
      : model(std::move(during)), comm(test::mirrored_communicator(0, ranks, record)) {
    strategy = make_strategy(kind, model, comm, std::move(options));
    strategy->attach(tape);
  }
  void backward() {
    strategy->zero_grad();
    record->clear();
    const Var loss = model.loss(tape);
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
  }
  void update(Optimizer& optimizer) {
    backward();
    strategy->finish_gradients();
    strategy->step(optimizer);
  }
  std::shared_ptr<CallRecord> record = std::make_shared<CallRecord>();
  test::ScopeCourse model;
  Communicator comm;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
};

// ---- overlap of reductions with backward

/// The reductions as seen in backward; `check(scope, launched, in flight)`.
void during_backward(StrategyKind kind, bool overlap,
                     const std::function<void(int, const Scopes&, const Scopes&)>& check) {
  const CallRecord* record = nullptr;
  int checked = 0;
  Training t(kind, single_buckets(overlap), [&](int scope, Pass pass) {
    if (pass == Pass::forward) return;
    SCOPED_TRACE(concat(name(kind), " in backward of scope ", scope));
    check(scope, scopes_of(record->launched(reductions)), scopes_of(record->in_flight(reductions)));
    ++checked;
  });
  record = t.record.get();
  const auto sgd = make_sgd({});
  for (int update = 0; update < 3; ++update) {  // ddp puts its buckets in the order of the first
    t.update(*sgd);
    EXPECT_TRUE(t.record->in_flight([](const auto&) { return true; }).empty()) << name(kind);
  }
  EXPECT_EQ(checked, 3 * scope_count);
}

TEST(LaunchOrder, ReductionsAreUnderWayWhileBackwardComputes) {
  for (const StrategyKind kind : lab::strategies)
    during_backward(kind, true, [&](int scope, const Scopes& launched, const Scopes& in_flight) {
      EXPECT_EQ(launched, from_to(scope_count - 1, scope + 1, -1)) << "those whose gradients are complete";
      const bool keeps_whole = kind == StrategyKind::ddp || kind == StrategyKind::zero1;
      const int oldest = keeps_whole ? scope_count - 1 : std::min(scope_count - 1, scope + 2);
      EXPECT_EQ(in_flight, from_to(oldest, scope + 1, -1));
    });
}

TEST(LaunchOrder, WithoutOverlapAReductionEndsBeforeBackwardGoesOn) {
  for (const StrategyKind kind : lab::strategies)
    during_backward(kind, false, [&](int scope, const Scopes& launched, const Scopes& in_flight) {
      EXPECT_EQ(launched, from_to(scope_count - 1, scope + 1, -1));
      EXPECT_EQ(in_flight, Scopes{});
    });
}

// ---- overlap of all_gathers with the update

TEST(LaunchOrder, UpdatedValuesAreOnTheirWayWhileTheNextBucketIsUpdated) {
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2})
    for (const bool overlap : {true, false}) {
      SCOPED_TRACE(concat(name(kind), ", overlap ", overlap));
      Training t(kind, single_buckets(overlap));
      int bucket = scope_count;
      ToldSgd sgd([&] {
        --bucket;
        EXPECT_EQ(scopes_of(t.record->launched(gathers)), from_to(scope_count - 1, bucket + 1, -1));
        EXPECT_EQ(scopes_of(t.record->in_flight(gathers)),
                  overlap ? from_to(scope_count - 1, bucket + 1, -1) : Scopes{});
      });
      t.update(sgd);
      EXPECT_EQ(bucket, 0);
      EXPECT_TRUE(t.record->in_flight(gathers).empty());
    }
}

// ---- sizes of buckets; the parameters have 128, 256, 384 and 512 elements

using Sizes = std::vector<std::size_t>;
Sizes sizes_of(const std::vector<CallRecord::Call>& calls) {
  Sizes out;
  for (const auto& c : calls) out.push_back(c.elements);
  return out;
}

TEST(BucketSizes, AreElementsThatOneCallReduces) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2}) {
    const auto reduced = [&](std::size_t elements, std::size_t first) {
      Training t(kind, {.reduce_bucket_size = elements, .first_bucket_size = first, .rebuild = false});
      t.update(*make_sgd({}));
      return sizes_of(t.record->launched(reductions));
    };
    constexpr std::size_t unlimited = 1 << 20;
    EXPECT_EQ(reduced(unlimited, unlimited), Sizes{128 + 256 + 384 + 512});
    EXPECT_EQ(reduced(unlimited, 1), (Sizes{512, 128 + 256 + 384}));
    EXPECT_EQ(reduced(256 + 384, unlimited), (Sizes{512, 384 + 256, 128}));
    EXPECT_EQ(reduced(256 + 384 - 1, unlimited), (Sizes{512, 384, 256 + 128}));
    EXPECT_EQ(reduced(1, 1), (Sizes{512, 384, 256, 128})) << "one call for each parameter at least";
  }
}

TEST(BucketSizes, AreElementsThatOneCallGathersToo) {
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2}) {
    Training t(kind, {.allgather_bucket_size = 256 + 384});
    t.update(*make_sgd({}));
    EXPECT_EQ(sizes_of(t.record->launched(gathers)), (Sizes{512, 384 + 256, 128}));
  }
  Training t(StrategyKind::ddp, {.first_bucket_size = 1 << 20, .allgather_bucket_size = 1});
  t.update(*make_sgd({}));
  EXPECT_EQ(sizes_of(t.record->launched(reductions)), Sizes{128 + 256 + 384 + 512}) << "ddp gathers nothing";
}

/// Parameters of the same sizes, in one scope.
struct Single final : Module {
  Parameter p0{*this, "p0", {128}}, p1{*this, "p1", {256}}, p2{*this, "p2", {384}}, p3{*this, "p3", {512}};
};

TEST(BucketSizes, CutTheParametersOfAScopeInZero3) {
  const auto gathered = [](const StrategyOptions& options) {
    const auto record = std::make_shared<CallRecord>();
    Single model;
    auto comm = test::mirrored_communicator(0, ranks, record);
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm, options);
    Tape tape;
    strategy->attach(tape);
    record->clear();
    tape.scope(*model.scopes()[0], [] { return Var{}; });
    return sizes_of(record->launched(gathers));
  };
  EXPECT_EQ(gathered({}), Sizes{128 + 256 + 384 + 512});
  EXPECT_EQ(gathered({.reduce_bucket_size = 128 + 256}), (Sizes{128 + 256, 384, 512}));
  EXPECT_EQ(gathered({.allgather_bucket_size = 256 + 384}), (Sizes{128 + 256, 384, 512}));
}

}  // namespace
}  // namespace rz
