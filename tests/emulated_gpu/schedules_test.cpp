// Runs: ci operators

// Training has the same bits for every strategy in whatever order streams may run; and a missing wait is
// detected.

#include <gtest/gtest.h>

#include "comm/backend.h"
#include "comm/backends/backend_factory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/support/train_tiny.h"

namespace rz::test {
namespace {

constexpr int ranks = 2;

CommOptions options_of(int rank, const std::string& backend) {
  CommOptions o;
  o.backend = backend;
  o.device = {Device::cuda, rank};
  o.timeout = std::chrono::seconds(60);
  return o;
}

#ifdef __SANITIZE_ADDRESS__
constexpr std::uint64_t max_seeds = 2;  // many times slower
#else
constexpr std::uint64_t max_seeds = 8;
#endif

class Schedules : public testing::TestWithParam<std::tuple<std::string, StrategyKind>> {};

TEST_P(Schedules, ChangeNoBit) {
  const auto& [backend, kind] = GetParam();
  const Folder folder;
  TinyRun run = smallest_run(kind, ranks, folder);
  run.comm = [&](int rank) { return options_of(rank, std::get<0>(GetParam())); };
  Reports first;
  for (std::uint64_t seed = 0; seed < (backend == "nccl" ? (max_seeds + 3) / 4 : max_seeds); ++seed) {
    const emulated::Schedule schedule(seed, static_cast<emulated::Pace>(seed % 3));
    const Reports reports = train(run, 1 + (seed + 1) % 2);  // buckets are rebuilt before the second
    if (first.empty()) first = reports;
    expect_same_bits({first.begin(), first.begin() + static_cast<std::ptrdiff_t>(reports.size())}, reports,
                     concat("schedule ", seed));
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Backends, Schedules,
                         testing::Combine(testing::Values("peer_cuda", "nccl"),
                                          testing::ValuesIn(strategies)),
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
  const Folder folder;
  for (const StrategyKind kind : strategies) {
    TinyRun run = smallest_run(kind, ranks, folder);
    run.comm = [](int rank) { return options_of(rank, "peer_cuda"); };
    Reports right;
    {
      const emulated::Schedule schedule;
      right = train(run, 2);
    }
    run.connect = [](int rank, std::shared_ptr<Store> store) {
      const CommOptions o = options_of(rank, "peer_cuda");
      const auto make = [=](int group) {
        return make_backend(rank, ranks, prefix_store(store, concat("group/", group, "/")), o);
      };
      return Communicator::from_backend(rank, ranks, std::make_unique<Unordered>(make), o);
    };
    bool found = false;
    for (std::uint64_t seed = 0; seed < 20 && !found; ++seed) {
      const emulated::Schedule schedule(seed, emulated::Pace::lazy);
      for (const Reports& reports : train_all(run, 2))
        for (std::size_t i = 0; i < reports.size(); ++i)
          found = found || reports[i].loss != right[i].loss || reports[i].grad_norm != right[i].grad_norm;
    }
    EXPECT_TRUE(found) << name(kind) << ": 20 schedules without waits gave the right bits";
  }
}

}  // namespace
}  // namespace rz::test
