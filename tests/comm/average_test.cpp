// Runs: ci pure
// Not under sanitizers: EveryAverage

// Averages near the limits of their types, by every algorithm and transport, against f64: contributions are
// divided first where they are floats, so no sum of them overflows.

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/math.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/executor.h"
#include "tests/lab/group.h"
#include "tests/support/elements.h"
#include "tests/support/sim_transport.h"

namespace rz {
namespace {

/// The largest number of a type, its smallest one, its smallest normal one, and the distance from 1 to the
/// next one.
struct Limits {
  double max, least, normal, epsilon;
};
template <class T>
constexpr Limits limits() {
  if (dtype_of<T> == DType::f16) return {65504, 0x1p-24, 0x1p-14, 0x1p-10};
  if (dtype_of<T> == DType::bf16) return {0x1.fep127, 0x1p-133, 0x1p-126, 0x1p-7};
  if (dtype_of<T> == DType::f8e4m3) return {448, 0x1p-9, 0x1p-6, 0x1p-3};
  if (dtype_of<T> == DType::f8e5m2) return {57344, 0x1p-16, 0x1p-14, 0x1p-2};
  if constexpr (std::is_arithmetic_v<T>)
    return {static_cast<double>(std::numeric_limits<T>::max()),
            static_cast<double>(std::numeric_limits<T>::denorm_min()),
            static_cast<double>(std::numeric_limits<T>::min()),
            static_cast<double>(std::numeric_limits<T>::epsilon())};
  return {};
}

enum class Range { largest, large, ordinary, subnormal };
constexpr Range ranges[] = {Range::largest, Range::large, Range::ordinary, Range::subnormal};
std::string name(Range range) {
  constexpr const char* names[] = {"largest", "large", "ordinary", "subnormal"};
  return names[static_cast<int>(range)];
}

/// `large`: of both signs, from half of the largest number on.
template <class T>
T contribution(Range range, int rank, std::size_t i) {
  std::uint64_t x = (i * 64 + static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 32;
  const double part = static_cast<double>(x % 100003) / 100003, sign = i % 3 && (x >> 40 & 1) ? -1 : 1;
  constexpr Limits l = limits<T>();
  switch (range) {
    case Range::largest:
      return test::rounded<T>(i % 2 ? -l.max : l.max);
    case Range::large:
      return test::rounded<T>(sign * (l.max / 2 + l.max / 2 * part));
    case Range::ordinary:
      return test::rounded<T>(sign * std::ldexp(part, static_cast<int>(x >> 44 & 7) - 4));
    default:
      return test::rounded<T>(sign * l.normal * part);
  }
}

/// In long double, since a sum of the largest f64 has no f64.
template <class T>
long double mean(Range range, int ranks, std::size_t i) {
  long double sum = 0;
  for (int r = 0; r < ranks; ++r)
    sum += static_cast<long double>(test::widened(contribution<T>(range, r, i)));
  return sum / ranks;
}

/// Bound of the error: each of `ranks` contributions, and each sum of them, is rounded at most once, and so
/// is the result.
template <class T>
long double tolerance(Range range, int ranks, std::size_t i) {
  constexpr Limits l = limits<T>();
  long double magnitudes = 0;
  for (int r = 0; r < ranks; ++r)
    magnitudes += std::abs(static_cast<long double>(test::widened(contribution<T>(range, r, i))));
  return (magnitudes / ranks * l.epsilon + 2 * l.least) * (ranks + 1);
}

template <class T>
void expect_near(const std::vector<T>& got, Range range, int ranks, std::size_t first,
                 const std::string& what) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto want = mean<T>(range, ranks, first + i);
    const auto have = static_cast<long double>(test::widened(got[i]));
    ASSERT_TRUE(std::isfinite(have)) << what << ": element " << i << " of " << name(range) << ' '
                                     << rz::name(dtype_of<T>) << " is " << have << ", not " << want;
    ASSERT_LE(std::abs(have - want), tolerance<T>(range, ranks, first + i))
        << what << ": element " << i << " of " << name(range) << ' ' << rz::name(dtype_of<T>) << " is "
        << have << ", not " << want;
  }
}

template <class T>
std::vector<T> contributions(Range range, int rank, std::size_t n) {
  std::vector<T> all;
  for (std::size_t i = 0; i < n; ++i) all.push_back(contribution<T>(range, rank, i));
  return all;
}

/// Calls f(T{}) for every float type.
template <class F>
void for_each_float(const F& f) {
  f(f16{}), f(bf16{}), f(float{}), f(double{}), f(f8e4m3{}), f(f8e5m2{});
}

/// An average by executors on a simulated network: what each rank has as output. `n`: elements of the input.
template <class T>
std::vector<std::vector<T>> run(const schedule::Algorithm& a, const std::vector<int>& nodes, Range range,
                                std::size_t n, ReductionOrder order) {
  struct Rank {
    std::vector<T> in, out;
    CollectiveCall call;
    schedule::DependencyPlan plan;
    std::unique_ptr<schedule::Executor> executor;
  };
  const int size = static_cast<int>(nodes.size());
  test::SimNetwork network(size, {.node_of_rank = nodes, .jitter = {.max_piece_bytes = 13}});
  std::deque<Rank> ranks;
  std::vector<test::SimProgram> programs;
  for (int r = 0; r < size; ++r) {
    Rank& me = ranks.emplace_back();
    me.in = contributions<T>(range, r, n);
    const bool has_out = a.collective != Collective::reduce || r == 0;
    me.out.resize(!has_out                                     ? 0
                  : a.collective == Collective::reduce_scatter ? n / static_cast<std::size_t>(size)
                                                               : n);
    me.call = {.kind = a.collective, .op = ReduceOp::avg};
    me.call.in = Buffer(me.in.data(), n);
    me.call.out = Buffer(me.out.data(), me.out.size());
    me.plan = schedule::make_dependency_plan(a.schedule({r, size, 0, nodes, order}), size, false);
    me.executor = std::make_unique<schedule::Executor>(network.transport(r), r, size);
    me.executor->start(me.call, me.plan, make_signature(me.call, size, 0));
    programs.push_back({[&me] { return me.executor->advance(); }, [&me] { return me.executor->complete(); },
                        [&me] { return me.executor->waiting_on().text; }});
  }
  for (const auto& e : network.run_until_complete(programs)) EXPECT_FALSE(e) << e->what();
  std::vector<std::vector<T>> out;
  for (Rank& r : ranks) out.push_back(std::move(r.out));
  return out;
}

const std::vector<std::vector<int>> placements{{0, 0},
                                               {0, 1},
                                               {0, 1, 2},
                                               {0, 0, 0},
                                               {0, 1, 1},
                                               {0, 0, 1, 1},
                                               {0, 1, 2, 3, 4},
                                               {0, 0, 0, 1, 1, 2},
                                               {0, 0, 1, 1, 1, 2, 2}};

class EveryAverage : public testing::TestWithParam<schedule::Algorithm> {};
std::vector<schedule::Algorithm> reductions() {
  std::vector<schedule::Algorithm> all;
  for (const schedule::Algorithm& a : schedule::algorithms())
    if (traits(a.collective).reduces) all.push_back(a);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Algorithms, EveryAverage, testing::ValuesIn(reductions()), [](const auto& info) {
  return std::string(rz::name(info.param.collective)) + "_" + info.param.name;
});

TEST_P(EveryAverage, IsThatOfF64) {
  const schedule::Algorithm& a = GetParam();
  for (const std::vector<int>& nodes : placements) {
    const auto size = nodes.size(), n = 12 * size;
    const std::string what = concat(a.name, " on ", testing::PrintToString(nodes));
    for_each_float([&](auto element) {
      using T = decltype(element);
      for (const Range range : ranges)
        for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise}) {
          const auto out = run<T>(a, nodes, range, n, order);
          for (std::size_t r = 0; r < size; ++r)
            expect_near(out[r], range, static_cast<int>(size),
                        a.collective == Collective::reduce_scatter ? r * n / size : 0, what);
        }
    });
  }
}

/// The bits of sums that are divided at the end, in the type of the sum.
template <class T>
std::vector<T> divided_at_the_end(Range range, int ranks, std::size_t n) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::vector<T> all;
  for (std::size_t i = 0; i < n; ++i) {
    Wide sum = 0;
    for (int r = 0; r < ranks; ++r) sum += static_cast<Wide>(test::widened(contribution<T>(range, r, i)));
    all.push_back(test::rounded<T>(sum / static_cast<Wide>(ranks)));
  }
  return all;
}

// What training relies on: the same bits by every algorithm in rank order, and those of x0 + x1 + … over the
// number of ranks. 16- and 8-bit floats where they are rounded once, with subnormal numbers too.
TEST_P(EveryAverage, HasTheBitsOfTheSumDividedAtTheEnd) {
  const schedule::Algorithm& a = GetParam();
  if (!a.rank_order || a.collective == Collective::reduce_scatter) return;
  for (const std::vector<int>& nodes : placements) {
    const std::size_t n = 97;
    const int size = static_cast<int>(nodes.size());
    const auto expect_bits = [&](auto element, Range range) {
      using T = decltype(element);
      const auto want = divided_at_the_end<T>(range, size, n);
      const auto got = run<T>(a, nodes, range, n, ReductionOrder::rank)[0];
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0)
            << a.name << " on " << testing::PrintToString(nodes) << ": element " << i << " of " << name(range)
            << ' ' << rz::name(dtype_of<T>) << " is " << test::widened(got[i]) << ", not "
            << test::widened(want[i]);
    };
    expect_bits(float{}, Range::ordinary), expect_bits(double{}, Range::ordinary);
    if (a.is(schedule::rounds_partials)) continue;
    for (const Range range : {Range::ordinary, Range::subnormal})
      expect_bits(f16{}, range), expect_bits(bf16{}, range), expect_bits(f8e4m3{}, range),
          expect_bits(f8e5m2{}, range);
    for (const Range range : {Range::large, Range::largest})
      expect_bits(f16{}, range), expect_bits(f8e4m3{}, range), expect_bits(f8e5m2{}, range);
  }
}

/// all_reduce, reduce and reduce_scatter of every float type and range.
void check_all(Communicator& comm, std::size_t n, const std::string& what) {
  const auto size = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
  for_each_float([&](auto element) {
    using T = decltype(element);
    for (const Range range : ranges) {
      const std::vector<T> mine = contributions<T>(range, comm.rank(), n * size);
      std::vector<T> out = mine, root(comm.rank() == 0 ? n : 0), part(n);
      comm.all_reduce(out, ReduceOp::avg).wait();
      expect_near(out, range, comm.size(), 0, what + ", all_reduce");
      comm.reduce(ConstBuffer(mine.data(), n), Buffer(root.data(), root.size()), 0, ReduceOp::avg).wait();
      expect_near(root, range, comm.size(), 0, what + ", reduce");
      comm.reduce_scatter(mine, part, ReduceOp::avg).wait();
      expect_near(part, range, comm.size(), rank * n, what + ", reduce_scatter");
    }
  });
}

void check_group(const std::string& nodes, const CommOptions& options, const std::string& what) {
  lab::group(nodes, options, [&](Communicator& comm) {
    for (const std::size_t n : {1u, 5u, 1031u}) check_all(comm, n, what);
    auto split = comm.split(comm.rank() % 2, comm.rank());
    check_all(*split, 7, what + ", split");
  });
}

TEST(Averages, OnOneHostAndSeveralAndOverTcp) {
  for (const bool deterministic : {true, false})
    for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise}) {
      if (!deterministic && order == ReductionOrder::pairwise) continue;
      CommOptions options;
      options.timeout = std::chrono::seconds(60);
      options.deterministic = deterministic;
      options.reduction_order = order;
      const std::string what = concat(deterministic ? "deterministic, " : "", name(order), " order");
      for (const char* nodes : {"aaa", "aaaaa", "aabb", "aaabc", "abcd"})
        check_group(nodes, options, concat(what, ", nodes ", nodes));
      options.transport = "tcp";
      check_group("aaaa", options, what + ", tcp");
      check_group("aaa", options, what + ", tcp");
    }
}

TEST(Averages, OfACoalescedGroup) {
  lab::group(4, [](Communicator& comm) {
    std::vector<std::vector<bf16>> xs(5, contributions<bf16>(Range::largest, comm.rank(), 9));
    auto group = comm.group();
    for (auto& x : xs) group.all_reduce(x, ReduceOp::avg);
    group.launch().wait();
    for (const auto& x : xs) expect_near(x, Range::largest, 4, 0, "group");
  });
}

// Many ranks: no sum of any number of the largest contributions rounds up to infinity.
TEST(Averages, OfManySources) {
  for (const int ranks : {2, 3, 7, 64, 65, 255, 1000})
    for_each_float([&](auto element) {
      using T = decltype(element);
      for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise})
        for (const Range range : ranges) {
          const std::size_t n = 67;
          std::vector<std::vector<T>> in;
          std::vector<const void*> sources;
          for (int r = 0; r < ranks; ++r) in.push_back(contributions<T>(range, r, n));
          for (const auto& x : in) sources.push_back(x.data());
          std::vector<T> out(n);
          reduce(out.data(), sources, n, dtype_of<T>, ReduceOp::avg, ranks, order);
          expect_near(out, range, ranks, 0, concat(ranks, " sources"));
        }
    });
}

}  // namespace
}  // namespace rz
