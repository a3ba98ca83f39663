// Small all_reduces that are in flight together become one: with the same results, in the same order, and
// only what every rank has in flight.

#include "comm/backends/fused.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <latch>
#include <set>
#include <thread>

#include "comm/algorithms/algorithm.h"
#include "comm/backends/scheduled.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/transports/connect.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;

// ---- which calls

Operation reduction(std::size_t count, DType dtype = DType::f32, ReduceOp op = ReduceOp::sum) {
  static std::array<std::byte, 128 << 10> memory{};
  return {.kind = Collective::all_reduce,
          .in = {memory.data(), count, dtype},
          .out = {memory.data() + memory.size() / 2, count, dtype},
          .op = op};
}
int count(const std::vector<Operation>& calls) { return Fused::count(calls); }

TEST(Fused, TakesCallsThatAreAlike) {
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({reduction(1)}), 1);
  EXPECT_EQ(count({reduction(1), reduction(500), reduction(3)}), 3);
  EXPECT_EQ(count({reduction(1), reduction(5, DType::i32), reduction(3)}), 1);
  EXPECT_EQ(count({reduction(1), reduction(5), reduction(3, DType::f32, ReduceOp::max)}), 2);
  EXPECT_EQ(count({reduction(1), Operation{.kind = Collective::barrier}, reduction(3)}), 1);
}

TEST(Fused, LeavesAloneWhatCannotBePacked) {
  EXPECT_EQ(count({Operation{.kind = Collective::broadcast, .out = reduction(1).out}}), 0);
  EXPECT_EQ(count({reduction(0)}), 0);
  EXPECT_EQ(count({reduction(2, DType::f32, ReduceOp::premul(2)), reduction(2)}), 0);
}

// Distinct memory a call, unless it is said otherwise.
Operation between(int in, int out) {
  static float memory[100];
  return {.kind = Collective::all_reduce, .in = {memory + in, 2}, .out = {memory + out, 2}};
}

TEST(Fused, LeavesAloneWhatReadsAnEarlierResult) {
  EXPECT_EQ(count({between(0, 0), between(2, 2), between(4, 4)}), 3);
  EXPECT_EQ(count({between(0, 50), between(20, 0), between(40, 70)}), 3);  // within what they span, apart
  EXPECT_EQ(count({between(0, 50), between(20, 70), between(51, 90)}), 2);
  EXPECT_EQ(count({between(0, 0), between(0, 0)}), 1);
}

TEST(Fused, IsBounded) {
  EXPECT_EQ(count({reduction(Fused::most_bytes / 4)}), 1);
  EXPECT_EQ(count({reduction(Fused::most_bytes / 4 + 1)}), 0);
  EXPECT_EQ(count({reduction(Fused::most_bytes / 8), reduction(Fused::most_bytes / 8), reduction(1)}), 2);
  EXPECT_EQ(count(std::vector<Operation>(1000, reduction(1))), 255);
}

// ---- among ranks

/// Of what it carries: how many collectives.
class Counting final : public Transport {
 public:
  Counting(std::unique_ptr<Transport> inner, std::set<std::uint32_t>& calls)
      : inner_(std::move(inner)), calls_(calls) {}

  std::size_t post(int peer, Lane lane, const Signature& s, std::span<const std::byte> bytes) override {
    if (lane == Lane::collective) calls_.insert(s.sequence);
    return inner_->post(peer, lane, s, bytes);
  }
  std::uint64_t released(int peer, Lane lane) override { return inner_->released(peer, lane); }
  Incoming peek(int peer, Lane lane) override { return inner_->peek(peer, lane); }
  void consume(int peer, Lane lane, std::size_t bytes) override { inner_->consume(peer, lane, bytes); }
  void progress() override { inner_->progress(); }
  void wait(std::chrono::microseconds most, bool eager) override { inner_->wait(most, eager); }
  void wake() noexcept override { inner_->wake(); }
  void abort(const Failure& f) noexcept override { inner_->abort(f); }
  void ask() override { inner_->ask(); }
  void answer(const RankSet& waits_for) override { inner_->answer(waits_for); }
  const WaitForGraph& waiting() const override { return inner_->waiting(); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  bool one_host() const override { return inner_->one_host(); }
  std::span<const int> hosts() const override { return inner_->hosts(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  const std::unique_ptr<Transport> inner_;
  std::set<std::uint32_t>& calls_;
};

/// 200 all_reduces of a group take two calls over streams: the first, alone, says what is behind it. `host`
/// is that of every rank.
void expect_two_calls(const std::vector<int>& host, const std::string& algorithm = {}) {
  const int size = static_cast<int>(host.size());
  test::run_ranks(size, [&](int rank, std::shared_ptr<Store> store) {
    std::set<std::uint32_t> calls;
    TransportOptions where;
    where.host_id = str(host[static_cast<std::size_t>(rank)]);
    const auto backend = scheduled_backend(
        rank, size,
        std::make_unique<Counting>(connect_transport(rank, size, *store, where, Deadline::after(20s)), calls),
        {.deterministic = false, .algorithm = algorithm});
    std::vector<float> x(200, 1.0f);
    std::vector<Operation> group;
    for (float& v : x) group.push_back({.kind = Collective::all_reduce, .in = {&v, 1}, .out = {&v, 1}});
    backend->submit(group).wait();
    for (const float v : x) ASSERT_EQ(v, size);
    EXPECT_EQ(calls.size(), 2u);
  });
}

TEST(Fused, FewMessagesCarryManyCalls) {
  expect_two_calls({0, 1});
  expect_two_calls({0, 0, 1, 1, 2});
}

TEST(Fused, EveryAlgorithmHearsFromEverybody) {
  for (const Algorithm& a : algorithms()) {
    if (a.collective != Collective::all_reduce) continue;
    SCOPED_TRACE(a.name);
    expect_two_calls({0, 0, 1, 1, 2}, a.name);
    expect_two_calls({0, 1, 2, 3}, a.name);
  }
}

class FusedOver : public testing::TestWithParam<std::string> {
 protected:
  /// "hosts": several, of which the first has one rank.
  CommOptions options(int rank) const {
    CommOptions o;
    if (GetParam() == "hosts")
      o.host_id = str((rank + 1) / 2);
    else
      o.transport = GetParam();
    o.timeout = 20s;
    return o;
  }
};

float input(int rank, int call, std::size_t i) {
  return std::sin(static_cast<float>(rank * 1000 + call) + 0.1f * static_cast<float>(i));
}

// Large and small calls, other collectives among them; ranks that wait for each call, for some, for none.
TEST_P(FusedOver, GivesTheBitsOfCallsOneByOne) {
  constexpr int calls = 150, ranks = 3;
  const auto size = [](int call) -> std::size_t { return call % 17 == 5 ? 9000 : 1 + call * 7 % 40; };
  const auto run = [&](Communicator& comm, int patience) {
    std::vector<std::vector<float>> in(calls), out(calls);
    std::vector<Work> works;
    for (int c = 0; c < calls; ++c) {
      for (std::size_t i = 0; i < size(c); ++i) in[c].push_back(input(comm.rank(), c, i));
      out[c].resize(size(c));
      if (c % 29 == 7) comm.barrier().wait();
      const ReduceOp op = c / 20 % 3 == 0 ? ReduceOp::avg : c / 20 % 3 == 1 ? ReduceOp::sum : ReduceOp::max;
      works.push_back(
          comm.all_reduce(ConstBuffer(in[c].data(), size(c)), Buffer(out[c].data(), size(c)), op));
      if (patience && c % patience == 0) works.back().wait();
    }
    for (Work& w : works) w.wait();
    return out;
  };
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, ranks, std::move(store), options(rank));
    const auto one_by_one = run(comm, 1);
    EXPECT_EQ(run(comm, 0), one_by_one);
    EXPECT_EQ(run(comm, rank == 1 ? 1 : 0), one_by_one);
    EXPECT_EQ(run(comm, rank + 2), one_by_one);
  });
}

TEST_P(FusedOver, AGroupIsFused) {
  test::run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 3, std::move(store), options(rank));
    std::vector<std::vector<int>> x;
    auto group = comm.group();
    for (int i = 0; i < 40; ++i) x.emplace_back(i + 1, rank + i);
    for (auto& v : x) group.all_reduce({v.data(), v.size()});
    group.launch().wait();
    for (int i = 0; i < 40; ++i) ASSERT_EQ(x[i], std::vector<int>(i + 1, 3 + 3 * i)) << i;
  });
}

TEST_P(FusedOver, ACallMayReadWhatTheOneBeforeItWrites) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store), options(rank));
    float x = 1, y = static_cast<float>(rank);
    auto group = comm.group();
    for (int i = 0; i < 10; ++i) group.all_reduce({&x, 1}).all_reduce({&y, 1});
    group.launch().wait();
    EXPECT_EQ(x, 1024);
    EXPECT_EQ(y, 512);
  });
}

TEST_P(FusedOver, SizesThatDifferAreAMismatch) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store), options(rank));
    float x[3][8] = {};
    auto group = comm.group();
    for (const std::size_t n : rank == 0 ? std::array{4, 3, 5} : std::array{4, 5, 3})
      group.all_reduce({x[n - 3], n});
    const Error e = test::error_of([&] { group.launch().wait(); });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  });
}

TEST_P(FusedOver, AFailureEndsAllThatIsFused) {
  std::latch submitted(1);
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store), options(rank));
    std::vector<float> x(50, 1.0f);
    std::vector<Work> works;
    if (rank == 1) {
      for (int i = 0; i < 20; ++i) comm.all_reduce({&x[i], 1}).wait();
      submitted.wait();
      return comm.abort("enough");
    }
    for (float& v : x) works.push_back(comm.all_reduce({&v, 1}));
    submitted.count_down();
    EXPECT_EQ(test::error_of([&] { works.back().wait(); }).code(), Errc::aborted);
    for (const Work& w : works) EXPECT_TRUE(w.done());
    for (int i = 0; i < 20; ++i) EXPECT_EQ(x[i], 2) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, FusedOver, testing::Values("auto", "tcp", "hosts"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace rz
