// Small all_reduces of one Group run as one call, with the same results; calls that are submitted one by one
// do not.

#include "comm/progress/coalescer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <latch>
#include <optional>
#include <set>
#include <string>

#include "comm/backends/native/native_backend.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using namespace std::chrono_literals;

// ---- which calls

CollectiveCall reduction(std::size_t count, DType dtype = DType::f32, ReduceOp op = ReduceOp::sum) {
  static std::array<std::byte, 128 << 10> memory{};
  return {.kind = Collective::all_reduce,
          .in = {memory.data(), count, dtype},
          .out = {memory.data() + memory.size() / 2, count, dtype},
          .op = op};
}
int count(const std::vector<CollectiveCall>& calls) { return static_cast<int>(Coalescer::count(calls)); }

TEST(Coalescer, AcceptsSimilarCalls) {
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({reduction(1)}), 1);
  EXPECT_EQ(count({reduction(1), reduction(500), reduction(3)}), 3);
  EXPECT_EQ(count({reduction(1), reduction(5, DType::i32), reduction(3)}), 1);
  EXPECT_EQ(count({reduction(1), reduction(5), reduction(3, DType::f32, ReduceOp::max)}), 2);
  EXPECT_EQ(count({reduction(1), CollectiveCall{.kind = Collective::barrier}, reduction(3)}), 1);
}

TEST(Coalescer, SkipsCallsThatCannotBePacked) {
  EXPECT_EQ(count({CollectiveCall{.kind = Collective::broadcast, .out = reduction(1).out}}), 0);
  EXPECT_EQ(count({reduction(0)}), 0);
  EXPECT_EQ(count({reduction(2, DType::f32, ReduceOp::premul(2)), reduction(2)}), 0);
}

// Separate memory for each call, unless stated.
CollectiveCall between(int in, int out) {
  static float memory[100];
  return {.kind = Collective::all_reduce, .in = {memory + in, 2}, .out = {memory + out, 2}};
}

bool independent(const std::vector<CollectiveCall>& group) {
  try {
    Coalescer::require_independent(group);
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument) << e.what();
    return false;
  }
}

TEST(Coalescer, RefusesACallThatReadsAResultOfTheSameRun) {
  EXPECT_TRUE(independent({between(0, 0), between(2, 2), between(4, 4)}));
  EXPECT_TRUE(independent({between(0, 50), between(20, 0), between(40, 70)}))
      << "within what they span, apart";
  EXPECT_FALSE(independent({between(0, 50), between(20, 70), between(51, 90)}));
  EXPECT_FALSE(independent({between(0, 0), between(0, 0)}));
  const CollectiveCall message{.kind = Collective::send, .in = between(0, 0).in, .root = 1};
  EXPECT_FALSE(independent({between(0, 0), message, between(0, 0)})) << "a message ends no run";
  const CollectiveCall barrier{.kind = Collective::barrier};
  EXPECT_TRUE(independent({between(0, 0), barrier, between(0, 0)})) << "two runs, in order";
}

TEST(Coalescer, AddressesDoNotCount) {
  EXPECT_EQ(count({between(0, 0), between(0, 0)}), count({between(0, 0), between(2, 2)}));
}

TEST(Coalescer, IsBounded) {
  EXPECT_EQ(count({reduction(Coalescer::max_bytes / 4)}), 1);
  EXPECT_EQ(count({reduction(Coalescer::max_bytes / 4 + 1)}), 0);
  EXPECT_EQ(count({reduction(Coalescer::max_bytes / 8), reduction(Coalescer::max_bytes / 8), reduction(1)}),
            2);
  EXPECT_EQ(count(std::vector<CollectiveCall>(1000, reduction(1))), 255);
}

// ---- among ranks

/// A transport that counts the collectives that it carries.
class Counting final : public Transport {
 public:
  Counting(std::unique_ptr<Transport> inner, std::set<std::uint32_t>& calls)
      : inner_(std::move(inner)), calls_(calls) {}

  std::size_t post(int peer, Channel lane, const CallSignature& s,
                   std::span<const std::byte> bytes) override {
    if (lane == Channel::collective) calls_.insert(s.sequence);
    return inner_->post(peer, lane, s, bytes);
  }
  std::uint64_t released(int peer, Channel lane) override { return inner_->released(peer, lane); }
  ReceiveView peek(int peer, Channel lane) override { return inner_->peek(peer, lane); }
  void consume(int peer, Channel lane, std::size_t bytes) override { inner_->consume(peer, lane, bytes); }
  void progress(std::uint32_t) override { inner_->progress(0); }
  void wait(std::chrono::microseconds timeout, bool eager) override { inner_->wait(timeout, eager); }
  void wake() noexcept override { inner_->wake(); }
  void abort(const Failure& f) noexcept override { inner_->abort(f); }
  void query_waits() override { inner_->query_waits(); }
  void query_calls(std::uint32_t number, int peers) override { inner_->query_calls(number, peers); }
  void record_call(const CallSignature& call) override { inner_->record_call(call); }
  void reply_waits(const WaitMessage& reply) override { inner_->reply_waits(reply); }
  const WaitForGraph& wait_graph() const override { return inner_->wait_graph(); }
  std::span<const int> nodes() const override { return inner_->nodes(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  const std::unique_ptr<Transport> inner_;
  std::set<std::uint32_t>& calls_;
};

/// The number of schedule calls that all_reduces of one element need, as one group or one by one. `node` is
/// the node of every rank.
void expect_calls(std::size_t expected, std::size_t all_reduces, bool as_group, const std::vector<int>& node,
                  const std::string& algorithm = {}) {
  const int size = static_cast<int>(node.size());
  test::run_ranks(size, [&](int rank, std::shared_ptr<Store> store) {
    std::set<std::uint32_t> calls;
    const test::ConnectOptions where{.host_id = concat(node[static_cast<std::size_t>(rank)])};
    const auto backend = make_native_backend(
        rank, size, std::make_unique<Counting>(test::connect(rank, size, *store, where), calls),
        {.deterministic = false, .algorithm = algorithm});
    std::vector<float> x(all_reduces, 1.0f);
    std::vector<CollectiveCall> group;
    for (float& v : x) group.push_back({.kind = Collective::all_reduce, .in = {&v, 1}, .out = {&v, 1}});
    std::vector<Work> works;
    if (as_group) works.push_back(backend->submit(group));
    for (std::size_t i = 0; i < group.size() && !as_group; ++i)
      works.push_back(backend->submit(std::span(group).subspan(i, 1)));
    for (const Work& w : works) w.wait();
    for (const float v : x) ASSERT_EQ(v, size);
    EXPECT_EQ(calls.size(), expected);
  });
}

TEST(Coalescer, AGroupOfSmallAllReducesIsOneCall) {
  expect_calls(1, 200, true, {0, 1});
  expect_calls(1, 200, true, {0, 0, 1, 1, 2});
  expect_calls(2, 300, true, {0, 1});
}

TEST(Coalescer, CallsOneByOneStayApart) {
  expect_calls(60, 60, false, {0, 1});
  expect_calls(60, 60, false, {0, 0, 1, 1, 2});
}

TEST(Coalescer, AGroupIsOneCallByEveryAlgorithm) {
  for (const schedule::Algorithm& a : schedule::algorithms()) {
    if (a.collective != Collective::all_reduce) continue;
    SCOPED_TRACE(a.name);
    expect_calls(1, 200, true, {0, 0, 1, 1, 2}, a.name);
    expect_calls(1, 200, true, {0, 1, 2, 3}, a.name);
  }
}

class CoalescerOver : public testing::TestWithParam<std::string> {
 protected:
  /// "nodes": several nodes, of which the first has one rank.
  static CommOptions options(int rank) {
    CommOptions o;
    if (GetParam() == "nodes")
      o.host_id = concat((rank + 1) / 2);
    else
      o.transport = GetParam();
    o.timeout = 20s;
    return o;
  }
};

float input(int rank, int call, std::size_t i) {
  return std::sin(static_cast<float>(rank * 1000 + call) + 0.1f * static_cast<float>(i));
}

// Large and small calls of several operations, barriers between the groups; single calls and groups of
// several sizes.
TEST_P(CoalescerOver, HasTheBitsOfSeparateCalls) {
  constexpr int calls = 150, ranks = 3;
  const auto size = [](int call) -> std::size_t { return call % 17 == 5 ? 9000 : 1 + call * 7 % 40; };
  const auto run = [&](Communicator& comm, int of_a_group) {
    std::vector<std::vector<float>> in(calls), out(calls);
    std::vector<Work> works;
    std::optional<Group> group;
    for (int c = 0; c < calls; ++c) {
      if (!group) group.emplace(comm.group());
      for (std::size_t i = 0; i < size(c); ++i) in[c].push_back(input(comm.rank(), c, i));
      out[c].resize(size(c));
      const ReduceOp op = c / 20 % 3 == 0 ? ReduceOp::avg : c / 20 % 3 == 1 ? ReduceOp::sum : ReduceOp::max;
      group->all_reduce(ConstBuffer(in[c].data(), size(c)), Buffer(out[c].data(), size(c)), op);
      if ((c + 1) % of_a_group != 0 && c + 1 < calls) continue;
      works.push_back(group->launch());
      group.reset();
      if (c % 29 == 7) comm.barrier().wait();
    }
    for (Work& w : works) w.wait();
    return out;
  };
  lab::group(ranks, options, [&](Communicator& comm) {
    const auto one_by_one = run(comm, 1);
    for (const int of_a_group : {2, 7, 40, calls}) EXPECT_EQ(run(comm, of_a_group), one_by_one) << of_a_group;
  });
}

TEST_P(CoalescerOver, AGroupIsFused) {
  lab::group(3, options, [&](Communicator& comm) {
    std::vector<std::vector<int>> x;
    auto group = comm.group();
    for (int i = 0; i < 40; ++i) x.emplace_back(i + 1, comm.rank() + i);
    for (auto& v : x) group.all_reduce({v.data(), v.size()});
    group.launch().wait();
    for (int i = 0; i < 40; ++i) ASSERT_EQ(x[i], std::vector<int>(i + 1, 3 + 3 * i)) << i;
  });
}

// Point-to-point messages differ between ranks and do not affect which collectives are coalesced.
TEST_P(CoalescerOver, MessagesOfSomeRanksAloneEndNoRun) {
  lab::group(3, options, [&](Communicator& comm) {
    std::vector<int> x(20, comm.rank());
    int message = comm.rank() == 0 ? 42 : 0;
    auto group = comm.group();
    for (int i = 0; i < 20; ++i) {
      group.all_reduce({&x[i], 1});
      if (i == 5 && comm.rank() == 0) group.send({&message, 1}, 1);
      if (i == 9 && comm.rank() == 1) group.recv({&message, 1}, 0);
    }
    group.launch().wait();
    EXPECT_EQ(x, std::vector<int>(20, 3));
    EXPECT_EQ(message, comm.rank() == 2 ? 0 : 42);
  });
}

TEST_P(CoalescerOver, ACallThatReadsAResultOfItsGroupIsRefused) {
  lab::group(2, options, [&](Communicator& comm) {
    float x = 1, y = static_cast<float>(comm.rank());
    auto group = comm.group();
    group.all_reduce({&x, 1}).all_reduce({&y, 1}).all_reduce({&x, 1});
    const Error e = test::error_of([&] { group.launch().wait(); });
    EXPECT_EQ(e.code(), Errc::invalid_argument) << e.what();
    EXPECT_NE(std::string(e.what()).find("call 3 of the group reads the result of call 1"), std::string::npos)
        << e.what();
    comm.all_reduce({&x, 1}).wait();  // the communicator still works
    EXPECT_EQ(x, 2);
  });
}

/// Ranks make these groups of all_reduces; the numbers are element counts.
void expect_mismatch(const lab::OptionsOfRank& options, const std::vector<std::size_t>& rank0,
                     const std::vector<std::size_t>& rank1, bool rank1_as_group = true) {
  lab::group(2, options, [&](Communicator& comm) {
    const auto& counts = comm.rank() == 0 ? rank0 : rank1;
    std::vector<std::vector<float>> x;
    for (const std::size_t n : counts) x.emplace_back(n);
    const Error e = test::error_of([&] {
      auto group = comm.group();
      for (auto& v : x) {
        if (comm.rank() == 1 && !rank1_as_group)
          comm.all_reduce({v.data(), v.size()}).wait();
        else
          group.all_reduce({v.data(), v.size()});
      }
      group.launch().wait();
    });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  });
}

TEST_P(CoalescerOver, GroupsThatDifferAreAMismatch) {
  expect_mismatch(options, {4, 3, 5}, {4, 5, 3});
  expect_mismatch(options, {4, 3, 5}, {12});
  expect_mismatch(options, {4, 3, 5}, {4, 3});
  expect_mismatch(options, {4, 3, 5}, {4, 3, 5}, false);
}

TEST_P(CoalescerOver, AFailureEndsAllThatIsFused) {
  std::latch submitted(1);
  lab::group(2, options, [&](Communicator& comm) {
    std::vector<float> x(50, 1.0f);
    if (comm.rank() == 1) {
      for (int i = 0; i < 20; ++i) comm.all_reduce({&x[i], 1}).wait();
      submitted.wait();
      return comm.abort("enough");
    }
    for (int i = 0; i < 20; ++i) comm.all_reduce({&x[i], 1}).wait();
    auto group = comm.group();
    for (int i = 20; i < 50; ++i) group.all_reduce({&x[i], 1});
    std::vector<Work> works;
    works.push_back(group.launch());
    works.push_back(comm.all_reduce({x.data(), 1}));
    submitted.count_down();
    EXPECT_EQ(test::error_of([&] { works.back().wait(); }).code(), Errc::aborted);
    for (const Work& w : works) EXPECT_TRUE(w.done());
    for (int i = 0; i < 50; ++i) EXPECT_EQ(x[i], i < 20 ? 2 : 1) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, CoalescerOver, testing::Values("auto", "tcp", "nodes"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace rz
