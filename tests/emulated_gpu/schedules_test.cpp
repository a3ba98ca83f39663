// Runs: ci operators

// Training has the same bits for every strategy in whatever order streams may run; and a missing wait is
// detected.

#include <gtest/gtest.h>

#include <atomic>
#include <map>

#include "comm/backend.h"
#include "comm/backends/backend_factory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/gpu/on_card.h"
#include "tests/lab/training.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

constexpr int ranks = 2;

#ifdef __SANITIZE_ADDRESS__
constexpr std::uint64_t max_seeds = 2;  // many times slower
#else
constexpr std::uint64_t max_seeds = 8;
#endif

lab::Run run_on(const std::string& backend, StrategyKind kind) {
  return {.model = lab::gpt(), .strategy = kind, .ranks = ranks, .updates = 2, .comm = [=](int rank) {
            return on_card(rank, backend);
          }};
}

class Schedules : public testing::TestWithParam<std::tuple<std::string, StrategyKind>> {};

TEST_P(Schedules, ChangeNoBit) {
  const auto& [backend, kind] = GetParam();
  lab::Run run = run_on(backend, kind);
  std::map<std::int64_t, lab::Trace> first;  // by updates: buckets are rebuilt before the second
  for (std::uint64_t seed = 0; seed < (backend == "nccl" ? 2 : max_seeds); ++seed) {
    const emulated::Schedule schedule(seed, static_cast<emulated::Pace>(seed % 3));
    run.updates = seed % 3 == 2 ? 1 : 2;
    const lab::Trace trace = lab::train(run);
    EXPECT_EQ(trace, first.try_emplace(run.updates, trace).first->second) << "schedule " << seed;
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Backends, Schedules,
                         testing::Combine(testing::Values("peer_cuda", "nccl"),
                                          testing::ValuesIn(lab::strategies)),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param), "_", name(std::get<1>(info.param)));
                         });

/// A backend whose operations do not make streams wait.
class Unordered final : public Backend {
 public:
  /// The backend of group number `group` of all ranks.
  using Make = std::function<std::unique_ptr<Backend>(int group)>;
  explicit Unordered(Make make, int group = 0) : make_(std::move(make)), backend_(make_(group)) {}
  Work submit(std::span<const CollectiveCall> group) override {
    struct State final : WorkState {
      explicit State(Work w) : work(std::move(w)) {}
      bool done() const noexcept override { return work.done(); }
      void wait() override { work.wait(); }
      void wait_on(const Stream&) override {}
      Work work;
    };
    return Work(std::make_shared<State>(backend_->submit(group)));
  }
  std::unique_ptr<Backend> split(std::span<const int>, int number) override {
    return std::make_unique<Unordered>(make_, number + 1);
  }
  void abort(const std::string& reason) noexcept override { backend_->abort(reason); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return backend_->allocate(bytes); }
  std::string describe() const override { return backend_->describe(); }

 private:
  Make make_;
  std::unique_ptr<Backend> backend_;
};

TEST(MissingWait, IsFoundByEveryStrategy) {
  for (const StrategyKind kind : lab::strategies) {
    const lab::Run run = run_on("peer_cuda", kind);
    lab::Trace right;
    {
      const emulated::Schedule schedule;
      right = lab::train(run);
    }
    std::atomic<bool> found = false;
    for (std::uint64_t seed = 0; seed < 20 && !found; ++seed) {
      const emulated::Schedule schedule(seed, emulated::Pace::lazy);
      run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
        const CommOptions o = run.comm(rank);
        const auto make = [=](int group) {
          return make_backend(rank, ranks, prefix_store(store, concat("group/", group, "/")), o);
        };
        World world(Communicator::from_backend(rank, ranks, std::make_unique<Unordered>(make), o));
        lab::Trace trace = lab::train(world, run);
        trace.values = right.values;  // whose gathers are no part of an update
        if (trace != right) found = true;
      });
    }
    EXPECT_TRUE(found) << name(kind) << ": 20 schedules without waits gave the right bits";
  }
}

}  // namespace
}  // namespace rz::test
