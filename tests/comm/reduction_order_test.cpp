// Runs: ci pure computes serial

// CommOptions::reduction_order: the bits of reductions in pairwise order.

#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "tests/lab/group.h"
#include "tests/support/elements.h"

namespace rz {
namespace {

CommOptions pairwise(const std::string& transport = "auto") {
  CommOptions options;
  options.timeout = std::chrono::seconds(30);
  options.transport = transport;
  options.reduction_order = ReductionOrder::pairwise;
  return options;
}

template <class T>
using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T>
Wide<T> widened(T x) {
  if constexpr (std::is_arithmetic_v<T>)
    return x;
  else
    return to_f32(x);
}

/// Contribution of a rank: of magnitudes so different that the order of a sum shows in most elements.
template <class T>
T contribution(int rank, std::size_t i) {
  std::uint64_t x = (i * 64 + static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 32;
  const double mantissa = static_cast<double>(x % 100003) / 100003 - 0.5;
  return test::rounded<T>(std::ldexp(mantissa, static_cast<int>(x >> 40 & 7)));
}

/// The definition, by recursion: the left half is the largest power of two of the ranks.
template <class T>
Wide<T> tree(int first, int last, std::size_t i) {
  if (last - first == 1) return widened(contribution<T>(first, i));
  const int middle = first + static_cast<int>(std::bit_floor(static_cast<unsigned>(last - first - 1)));
  const Wide<T> left = tree<T>(first, middle, i);
  return left + tree<T>(middle, last, i);
}

template <class T>
std::vector<T> expected(int size, std::size_t n, bool mean = false) {
  std::vector<T> all(n);
  for (std::size_t i = 0; i < n; ++i) {
    const Wide<T> sum = tree<T>(0, size, i);
    all[i] = test::rounded<T>(mean ? sum / static_cast<Wide<T>>(size) : sum);
  }
  return all;
}

template <class T>
std::vector<T> contributions(int rank, std::size_t n) {
  std::vector<T> all(n);
  for (std::size_t i = 0; i < n; ++i) all[i] = contribution<T>(rank, i);
  return all;
}

/// Memory of the process or of the communicator, at an odd offset of elements.
template <class T>
class Block {
 public:
  Block(Communicator& comm, bool shared, const std::vector<T>& values)
      : count_(values.size()), own_(shared ? 0 : count_ + 1) {
    if (shared) shared_ = comm.allocate((count_ + 1) * sizeof(T));
    data_ = (shared ? reinterpret_cast<T*>(shared_.get()) : own_.data()) + 1;
    std::copy(values.begin(), values.end(), data_);
  }
  Buffer buffer() { return {data_, count_}; }
  bool holds(const std::vector<T>& want) const { return std::equal(want.begin(), want.end(), data_); }

 private:
  std::size_t count_;
  std::vector<T> own_;
  std::shared_ptr<std::byte> shared_;
  T* data_;
};

/// Every reduction of n elements (reduce_scatter: of a part of them for each rank).
template <class T>
void check(Communicator& comm, std::size_t n, bool shared = false) {
  const int rank = comm.rank(), size = comm.size();
  const auto part = n / static_cast<std::size_t>(size), whole = part * static_cast<std::size_t>(size);
  SCOPED_TRACE(concat(n, ' ', name(dtype_of<T>), ", rank ", rank, " of ", size, shared ? ", shared" : ""));
  const std::vector<T> mine = contributions<T>(rank, n), want = expected<T>(size, n),
                       mean = expected<T>(size, n, true);
  Block<T> in(comm, shared, mine), out(comm, shared, std::vector<T>(n));
  comm.all_reduce(in.buffer(), out.buffer(), ReduceOp::sum).wait();
  EXPECT_TRUE(out.holds(want)) << "all_reduce";
  comm.all_reduce(in.buffer(), ReduceOp::avg).wait();
  EXPECT_TRUE(in.holds(mean)) << "all_reduce in place, avg";

  Block<T> parts(comm, shared, contributions<T>(rank, whole)), own(comm, shared, std::vector<T>(part));
  comm.reduce_scatter(parts.buffer(), own.buffer()).wait();
  const auto first = want.begin() + static_cast<std::ptrdiff_t>(part * static_cast<std::size_t>(rank));
  EXPECT_TRUE(own.holds({first, first + static_cast<std::ptrdiff_t>(part)})) << "reduce_scatter";

  for (const int root : {0, size / 2, size - 1}) {
    Block<T> from(comm, shared, mine), to(comm, shared, std::vector<T>(n));
    comm.reduce(from.buffer(), to.buffer(), root).wait();
    EXPECT_TRUE(to.holds(rank == root ? want : std::vector<T>(n))) << "reduce to " << root;
  }
}

void check_types(Communicator& comm, std::size_t n, bool shared = false) {
  check<float>(comm, n, shared);
  check<double>(comm, n, shared);
  check<f16>(comm, n, shared);
  check<bf16>(comm, n, shared);
}

// 8 B, 4 KiB, 1 MiB, and odd counts.
constexpr std::size_t counts[] = {1, 2, 3, 13, 14, 29, 1024, 1025, 5003, 20011};
constexpr std::size_t large_counts[] = {262'144, 262'147};

class PairwiseOrder : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, PairwiseOrder, testing::Range(1, 10));

TEST_P(PairwiseOrder, OnOneNode) {
  lab::group(std::string(static_cast<std::size_t>(GetParam()), 'a'), pairwise(), [](Communicator& comm) {
    for (const bool shared : {false, true}) {
      for (const std::size_t n : counts) check_types(comm, n, shared);
      for (const std::size_t n : large_counts) check<float>(comm, n, shared);
    }
    check<bf16>(comm, 262'147);
  });
}

TEST_P(PairwiseOrder, OverTcp) {
  lab::group(std::string(static_cast<std::size_t>(GetParam()), 'a'), pairwise("tcp"), [](Communicator& comm) {
    for (const std::size_t n : {2, 13, 1025, 20011}) check_types(comm, n);
    check<float>(comm, 262'147);
  });
}

TEST(PairwiseOrders, OnSimulatedNodes) {
  for (const std::string nodes :
       {"aabb", "abab", "abbb", "abcd", "aabbb", "aabbcc", "aaabbbcc", "aabbccdd", "aaaabbbbc"})
    lab::group(nodes, pairwise(), [](Communicator& comm) {
      for (const std::size_t n : {2, 1025, 20011}) check_types(comm, n);
      check<float>(comm, 524'309);
    });
}

TEST(PairwiseOrders, EveryAlgorithmOfTheOrder) {
  for (const schedule::Algorithm& a : schedule::algorithms()) {
    if (!traits(a.collective).reduces || !a.reduces_in(ReductionOrder::pairwise)) continue;
    SCOPED_TRACE(concat(name(a.collective), ' ', a.name));
    for (const std::string nodes : {"aaaaa", "abcdef", "aabbccdd"}) {
      CommOptions options = pairwise();
      options.algorithm = concat(name(a.collective), "=schedule:", a.name);
      lab::group(nodes, options, [](Communicator& comm) {
        for (const std::size_t n : {1, 1025, 20011}) check<float>(comm, n);
      });
    }
  }
}

TEST(PairwiseOrders, EveryAlgorithmWithinANode) {
  for (const std::string algorithm : {"one_shot", "two_shot", "zero_copy"}) {
    CommOptions options = pairwise();
    options.algorithm = algorithm;
    lab::group("aaaaa", options, [](Communicator& comm) {
      for (const bool shared : {false, true})
        for (const std::size_t n : {2, 1025, 70'003}) check_types(comm, n, shared);
    });
  }
}

TEST(PairwiseOrders, AnotherAlgorithmIsRefused) {
  CommOptions options = pairwise();
  options.algorithm = "chain";
  try {
    Communicator::connect(0, 1, memory_store(), options);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("does not sum in pairwise order"), std::string::npos) << e.what();
  }
}

// The second call of a shape takes the fast path, and small calls of a group run as one.
TEST(PairwiseOrders, RepeatedAndCoalescedCalls) {
  lab::group("aaaaaa", pairwise(), [](Communicator& comm) {
    for (const std::size_t n : {2u, 33u}) {
      const std::vector<float> mine = contributions<float>(comm.rank(), n), want = expected<float>(6, n);
      for (int times = 0; times < 5; ++times) {
        std::vector<float> x = mine;
        comm.all_reduce({x.data(), n}).wait();
        EXPECT_EQ(x, want);
      }
      std::vector<std::vector<float>> xs(7, mine);
      auto group = comm.group();
      for (auto& x : xs) group.all_reduce({x.data(), n});
      group.launch().wait();
      for (const auto& x : xs) EXPECT_EQ(x, want);
    }
  });
}

TEST(PairwiseOrders, ASplitGroupHasTheOrder) {
  lab::group("aaabbbcc", pairwise(), [](Communicator& comm) {
    auto part = comm.split(comm.rank() / 5, comm.rank());  // of 5 and 3 ranks
    const int first = comm.rank() / 5 * 5;
    const std::size_t n = 1025;
    std::vector<float> x = contributions<float>(comm.rank(), n), want(n);
    for (std::size_t i = 0; i < n; ++i) want[i] = tree<float>(first, first + part->size(), i);
    part->all_reduce({x.data(), n}).wait();
    EXPECT_EQ(x, want);
  });
}

// Eight values per element: each of W ranks adds its 8 / W of them pairwise, and the ranks then add theirs.
TEST(PairwiseOrders, TheSumOfPairwiseSumsHasTheSameBitsForEveryPowerOfTwo) {
  constexpr int leaves = 8;
  constexpr std::size_t n = 20011;
  const std::vector<float> want = expected<float>(leaves, n);
  for (const std::string nodes : {"a", "aa", "ab", "aaaa", "aabb", "abcd", "aaaaaaaa", "aaaabbbb"})
    lab::group(nodes, pairwise(), [&](Communicator& comm) {
      const int own = leaves / comm.size(), first = comm.rank() * own;
      std::vector<float> x(n);
      for (std::size_t i = 0; i < n; ++i) x[i] = tree<float>(first, first + own, i);
      std::vector<float> scattered(n / 8 * 8 / static_cast<std::size_t>(comm.size()));
      const std::size_t part = scattered.size();
      comm.reduce_scatter(ConstBuffer(x.data(), part * static_cast<std::size_t>(comm.size())),
                          {scattered.data(), part})
          .wait();
      comm.all_reduce({x.data(), n}).wait();
      EXPECT_EQ(x, want);
      const auto begin = want.begin() + static_cast<std::ptrdiff_t>(part) * comm.rank();
      EXPECT_TRUE(std::equal(scattered.begin(), scattered.end(), begin));
    });
}

// Otherwise the tests above would prove nothing.
TEST(PairwiseOrders, DifferFromRankOrder) {
  constexpr std::size_t n = 1000;
  std::vector<std::vector<float>> in;
  std::vector<const void*> sources;
  for (int r = 0; r < 8; ++r) in.push_back(contributions<float>(r, n));
  for (const auto& x : in) sources.push_back(x.data());
  std::vector<float> left(n);
  for (const std::size_t size : {4u, 5u, 8u}) {
    reduce(left.data(), std::span(sources).first(size), n, DType::f32, ReduceOp::sum);
    const std::vector<float> want = expected<float>(static_cast<int>(size), n);
    std::size_t different = 0;
    for (std::size_t i = 0; i < n; ++i) different += left[i] != want[i];
    EXPECT_GT(different, n / 10) << size;
  }
}

}  // namespace
}  // namespace rz
