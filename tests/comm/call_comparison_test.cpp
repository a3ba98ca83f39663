// Calls that differ between ranks, over transports whose frames carry them.

#include "comm/progress/call_comparison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::run_ranks;

/// A call as ranks may make it, and how errors describe it.
struct DescribedCall {
  std::string text;
  std::function<Work(Communicator&)> start;
};

constexpr std::size_t n = 10;

/// Contents do not matter.
float* memory() {
  static thread_local std::array<float, 64> elements{};
  return elements.data();
}

Buffer out(std::size_t count) { return {memory(), count}; }
ConstBuffer in(std::size_t count) { return {memory() + 32, count}; }

std::vector<DescribedCall> calls(int size) {
  const std::size_t all = n * static_cast<std::size_t>(size);
  std::vector<DescribedCall> list{
      {"all_reduce #1 (10 f32, sum)", [](Communicator& c) { return c.all_reduce(out(n)); }},
      {"all_reduce #1 (0 f32, sum)", [](Communicator& c) { return c.all_reduce(out(0)); }},
      {"all_reduce #1 (12 f32, sum)", [](Communicator& c) { return c.all_reduce(out(12)); }},
      {"all_reduce #1 (10 f32, max)", [](Communicator& c) { return c.all_reduce(out(n), ReduceOp::max); }},
      {"all_reduce #1 (10 i32, sum)",
       [](Communicator& c) {
         return c.all_reduce({reinterpret_cast<std::int32_t*>(memory()), n});
       }},
      {"reduce_scatter #1 (10 f32, sum)",
       [all](Communicator& c) { return c.reduce_scatter(in(all), out(n)); }},
      {"all_gather #1 (10 f32)", [all](Communicator& c) { return c.all_gather(in(n), out(all)); }},
      {"all_to_all #1 (10 f32)", [all](Communicator& c) { return c.all_to_all(in(all), out(all)); }},
      {"barrier #1", [](Communicator& c) { return c.barrier(); }},
  };
  for (const int root : {0, 1}) {
    const std::string end = ", root " + std::to_string(root) + ")";
    list.push_back(
        {"broadcast #1 (10 f32" + end, [=](Communicator& c) { return c.broadcast(out(n), root); }});
    list.push_back(
        {"reduce #1 (10 f32, sum" + end, [=](Communicator& c) { return c.reduce(in(n), out(n), root); }});
    list.push_back(
        {"gather #1 (10 f32" + end, [=](Communicator& c) { return c.gather(in(n), out(all), root); }});
    list.push_back(
        {"scatter #1 (10 f32" + end, [=](Communicator& c) { return c.scatter(in(all), out(n), root); }});
  }
  return list;
}

/// The transport of rank 0 of a large group, whose peers are the test.
class Queried final : public Transport {
 public:
  std::size_t post(int, Channel, const CallSignature&, std::span<const std::byte>) override { return 0; }
  std::uint64_t released(int, Channel) override { return 0; }
  ReceiveView peek(int, Channel) override { return {}; }
  void consume(int, Channel, std::size_t) override {}
  void progress(std::uint32_t) override {}
  void wait(std::chrono::microseconds, bool) override {}
  void wake() noexcept override {}
  void abort(const Failure&) noexcept override {}
  void query_waits() override {}
  void query_calls(std::uint32_t, int peers) override { queried.push_back(peers); }
  void record_call(const CallSignature& call) override { graph.record(call); }
  void reply_waits(const WaitMessage&) override {}
  const WaitForGraph& wait_graph() const override { return graph; }
  std::span<const int> nodes() const override { return {}; }
  std::string describe() const override { return "queried"; }

  std::vector<int> queried;
  WaitForGraph graph{0};
};

constexpr int large = 100;

CallSignature call_of_root(int root) {
  CallSignature call{};
  call.kind = Collective::broadcast, call.sequence = 1, call.count = n, call.root = root;
  return call;
}

TEST(CallComparison, TheFirstQueryOfALargeGroupGoesToFewRanks) {
  Queried transport;
  transport.record_call(call_of_root(0));
  CallComparison comparison(transport, 0, large);
  const CallComparison::Time start{};
  for (const auto after : {0ms, 999ms, 1000ms, 2000ms, 3000ms})
    comparison.poll(start + after, &transport, false);
  EXPECT_EQ(transport.queried, (std::vector{16, large - 1}));
}

TEST(CallComparison, ADifferenceFoundByTheFirstQueryIsComparedOverAllRanks) {
  Queried transport;
  transport.record_call(call_of_root(0));
  CallComparison comparison(transport, 0, large);
  const CallComparison::Time start{};
  for (const auto after : {0ms, 1000ms}) comparison.poll(start + after, &transport, false);
  transport.graph.receive(1, {.kind = WaitMessage::reply, .numbered = call_of_root(3)});
  comparison.poll(start + 1010ms, &transport, false);
  EXPECT_EQ(transport.queried, (std::vector{16, large - 1}));
  for (int r = 2; r < large; ++r)
    transport.graph.receive(r, {.kind = WaitMessage::reply, .numbered = call_of_root(3)});
  const Error e = test::error_of([&] { comparison.poll(start + 1020ms, &transport, false); });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_EQ(e.culprit(), 0) << e.what();
}

CommOptions over_tcp() {
  CommOptions options;
  options.timeout = 20s;
  options.transport = "tcp";
  return options;
}

/// The error of a rank whose second call is `mine`. That may end if it needs nothing of the others; one of
/// them then finds what it has sent in its next call, and this rank learns of it in the one after that.
Error error_of_rank(int rank, int size, const std::shared_ptr<Store>& store, const DescribedCall& mine) {
  auto comm = Communicator::connect(rank, size, store, over_tcp());
  comm.barrier().wait();
  return test::error_of([&] {
    mine.start(comm).wait();
    for (int i = 0; i < 2; ++i) comm.barrier().wait();
  });
}

/// All pairs, some at a time, since most of the time is spent in waits.
TEST(CallComparison, TwoCallsThatDifferOverTcpAreBothNamed) {
  const std::vector<DescribedCall> list = calls(2);
  for (std::size_t a = 0; a < list.size(); ++a) {
    std::vector<std::thread> groups;
    for (std::size_t b = 0; b < list.size(); ++b) {
      if (a == b) continue;
      groups.emplace_back([&, a, b] {
        run_ranks(2, [&](int rank, auto store) {
          const Error e = error_of_rank(rank, 2, store, list[rank ? b : a]);
          EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
          for (const auto& call : {list[a].text, list[b].text})
            EXPECT_NE(std::string(e.what()).find(call), std::string::npos)
                << "rank " << rank << ", " << call << ": " << e.what();
        });
      });
    }
    for (auto& group : groups) group.join();
  }
}

TEST(CallComparison, TheRankThatDiffersOverTcpIsTheCulprit) {
  const std::vector<DescribedCall> list = calls(3);
  for (std::size_t a = 0; a < list.size(); ++a) {
    std::vector<std::thread> groups;
    for (std::size_t b = 0; b < list.size(); ++b) {
      if (a == b || (a + b) % 3) continue;
      groups.emplace_back([&, a, b] {
        run_ranks(3, [&](int rank, auto store) {
          const Error e = error_of_rank(rank, 3, store, list[rank == 2 ? b : a]);
          EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
          EXPECT_EQ(e.culprit(), 2) << "rank " << rank << ", " << list[a].text << " and " << list[b].text
                                    << ": " << e.what();
          EXPECT_NE(std::string(e.what()).find("rank 2 called " + list[b].text), std::string::npos)
              << "rank " << rank << ": " << e.what();
        });
      });
    }
    for (auto& group : groups) group.join();
  }
}

}  // namespace
}  // namespace rz
