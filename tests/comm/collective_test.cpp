// Runs: pure

#include "comm/collective.h"

#include <gtest/gtest.h>

#include <vector>

#include "comm/api/arguments.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/schedule.h"

namespace rz {
namespace {

struct Memory {
  std::vector<float> floats = std::vector<float>(64);
  ConstBuffer in(std::size_t at, std::size_t count) { return {floats.data() + at, count}; }
  Buffer out(std::size_t at, std::size_t count) { return {floats.data() + at, count}; }
};

TEST(CollectiveTraits, NameTheRankThatSends) {
  for (const CollectiveTraits& t : collective_traits) {
    const bool from_root = t.kind == Collective::broadcast || t.kind == Collective::scatter;
    const bool to_root = t.kind == Collective::gather || t.kind == Collective::reduce;
    EXPECT_EQ(t.rooted(), from_root || to_root) << t.name;
    EXPECT_EQ(t.sends(true), !to_root) << t.name;
    EXPECT_EQ(t.sends(false), !from_root) << t.name;
    EXPECT_EQ(t.root_sends(), from_root) << t.name;
  }
}

/// Schedules are verified: whether a rank sends different data to each peer follows from its sends to two
/// peers.
TEST(CollectiveTraits, AgreeWithTheSchedulesOfOneStep) {
  int seen = 0;
  for (const schedule::Algorithm& a : schedule::algorithms()) {
    if (std::string_view(a.name) != "linear" && std::string_view(a.name) != "pairwise") continue;
    ++seen;
    const schedule::Schedule s = a.schedule({0, 3, 0, {}});
    std::vector<int> chunks;
    for (const schedule::Step& step : s.steps)
      if (step.kind == schedule::Step::send) chunks.push_back(step.chunk.number);
    ASSERT_EQ(chunks.size(), traits(a.collective).sends(true) ? 2u : 0u) << name(a.collective);
    if (chunks.size() == 2)
      EXPECT_EQ(chunks[0] != chunks[1], traits(a.collective).sends_per_rank()) << name(a.collective);
  }
  EXPECT_EQ(seen, 8) << "schedules of one step";
}

TEST(CollectiveTraits, CountWhatAllRanksAgreeOn) {
  Memory m;
  const auto count = [&](Collective kind, std::size_t in, std::size_t out) {
    return count_per_rank(
        {.kind = kind, .in = m.in(0, in), .out = m.out(0, out), .op = {}, .counts = {}, .stream = {}}, 4);
  };
  EXPECT_EQ(count(Collective::all_reduce, 5, 5), 5u);
  EXPECT_EQ(count(Collective::reduce_scatter, 20, 5), 5u);
  EXPECT_EQ(count(Collective::all_gather, 5, 20), 5u);
  EXPECT_EQ(count(Collective::broadcast, 0, 5), 5u);
  EXPECT_EQ(count(Collective::reduce, 5, 0), 5u);
  EXPECT_EQ(count(Collective::gather, 5, 0), 5u);
  EXPECT_EQ(count(Collective::scatter, 0, 5), 5u);
  EXPECT_EQ(count(Collective::all_to_all, 20, 20), 5u);
  for (const Collective c :
       {Collective::all_to_all_v, Collective::send, Collective::recv, Collective::barrier})
    EXPECT_EQ(count(c, 5, 5), 0u) << name(c);
}

TEST(CollectiveTraits, FindCallsInPlace) {
  Memory m;
  const auto is = [&](Collective kind, ConstBuffer in, Buffer out) {
    return in_place({.kind = kind, .in = in, .out = out, .op = {}, .counts = {}, .stream = {}}, 2, 4);
  };
  EXPECT_TRUE(is(Collective::all_reduce, m.in(0, 8), m.out(0, 8)));
  EXPECT_FALSE(is(Collective::all_reduce, m.in(0, 8), m.out(8, 8)));
  EXPECT_TRUE(is(Collective::all_gather, m.in(10, 5), m.out(0, 20)));
  EXPECT_FALSE(is(Collective::all_gather, m.in(0, 5), m.out(0, 20)));
  EXPECT_TRUE(is(Collective::reduce_scatter, m.in(0, 20), m.out(10, 5)));
  EXPECT_FALSE(is(Collective::reduce_scatter, m.in(0, 20), m.out(0, 5)));
  EXPECT_FALSE(is(Collective::all_to_all, m.in(0, 20), m.out(0, 20))) << "parts change places";
}

TEST(CollectiveTraits, TablesGoByTheLargerBuffer) {
  for (const CollectiveTraits& t : collective_traits) {
    const bool parts = t.in == Extent::shard_per_rank || t.out == Extent::shard_per_rank;
    EXPECT_EQ(message_bytes(t.kind, 3, 7), parts ? 21u : 3u) << t.name;
  }
}

// The inline checks accept nothing that the full ones refuse, and build the same call.
TEST(Arguments, APlainCallIsACheckedCall) {
  constexpr int size = 3;
  std::vector<float> memory(64);
  const std::size_t counts[]{0, 4, 12};
  int plain = 0;
  for (const CollectiveTraits& t : collective_traits) {
    if (t.point_to_point || t.in == Extent::none || t.in == Extent::by_counts) continue;
    for (int i = 0; i < size * (size + 2) * 3 * 3 * 20; ++i) {
      const Caller caller{i % size, size, {}};
      const int root = i / size % (size + 2) - 1, offset = i / 135 % 20;
      const ConstBuffer in(memory.data() + 20, counts[i / 15 % 3]);
      const Buffer out(memory.data() + 4 * offset % 48, counts[i / 45 % 3]);
      if (!is_plain(caller, t, in, out, root)) continue;
      ++plain;
      CollectiveCall checked;
      ASSERT_NO_THROW(checked = make_call(caller, t.kind, in, out, root, ReduceOp::max, {}))
          << t.name << " of " << in.count << " to " << out.count << " at " << offset << ", root " << root;
      const CollectiveCall call = plain_call(caller, t, in, out, root, ReduceOp::max);
      EXPECT_EQ(call.in.data, checked.in.data);
      EXPECT_EQ(call.out.data, checked.out.data);
      EXPECT_EQ(call.in.count, checked.in.count);
      EXPECT_EQ(call.out.count, checked.out.count);
      EXPECT_EQ(call.root, checked.root);
    }
  }
  EXPECT_GT(plain, 1000);
}

}  // namespace
}  // namespace rz
