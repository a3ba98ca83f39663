// Runs: ci computes serial
// Not under sanitizers: Collectives[.]NodesOfSeveralRanks$
// Not under the thread sanitizer: ALargeGroupOnANetwork EightMebibytes ASplitGroupHasItsOwnNodeMap

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "tests/lab/group.h"
#include "tests/support/elements.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::run_ranks;
using Counts = std::vector<std::size_t>;

constexpr ReduceOp::Kind all_kinds[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod,
                                        ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum};

CommOptions quick(const std::string& transport = "auto") {
  CommOptions options;
  options.timeout = std::chrono::seconds(30);
  options.transport = transport;
  return options;
}

// Small whole numbers: every reduction of them for up to nine ranks is exact in every type, 8-bit floats
// included.
double input(ReduceOp::Kind kind, DType dtype, int rank, std::size_t i) {
  const auto r = static_cast<std::size_t>(rank);
  const bool narrow = dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
  if (kind == ReduceOp::prod) return (i + r) % 3 == 0 ? 2 : 1;
  if (kind == ReduceOp::min || kind == ReduceOp::max || !narrow)
    return static_cast<double>((i * 5 + r * 3 + i / 7) % 7);
  return static_cast<double>((i + r) % 2);
}

double factor(int rank) { return rank == 0 ? 2 : 1; }

template <class T>
T expected(ReduceOp::Kind kind, int size, std::size_t i) {
  double x = input(kind, dtype_of<T>, 0, i);
  if (kind == ReduceOp::premul_sum) x *= factor(0);
  for (int r = 1; r < size; ++r) {
    const double y = input(kind, dtype_of<T>, r, i);
    if (kind == ReduceOp::prod)
      x *= y;
    else if (kind == ReduceOp::min || kind == ReduceOp::max)
      x = kind == ReduceOp::min ? std::min(x, y) : std::max(x, y);
    else
      x += y;
  }
  if (kind != ReduceOp::avg) return test::rounded<T>(x);
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(test::rounded<T>(x) / static_cast<T>(size));
  else
    return test::rounded<T>(static_cast<float>(x) / static_cast<float>(size));
}

// Memory of a communicator or of the process, with a few guard elements behind its end.
template <class T>
class Block {
 public:
  Block(Communicator& comm, bool shared, std::size_t count) : count_(count) {
    const std::size_t bytes = (count + guard) * sizeof(T);
    memory_ = shared ? comm.allocate(bytes)
                     : std::shared_ptr<std::byte>(new std::byte[bytes], [](auto* p) { delete[] p; });
    std::memset(memory_.get(), 0x5a, bytes);
  }
  T* data() { return reinterpret_cast<T*>(memory_.get()); }
  T& operator[](std::size_t i) { return data()[i]; }
  Buffer buffer() { return {data(), count_}; }
  Buffer part(std::size_t p, std::size_t n) { return {data() + p * n, n}; }
  bool guarded() {
    const std::vector<std::byte> want(guard * sizeof(T), std::byte{0x5a});
    return std::memcmp(data() + count_, want.data(), want.size()) == 0;
  }

 private:
  static constexpr std::size_t guard = 3;
  std::shared_ptr<std::byte> memory_;
  std::size_t count_;
};

// Calls a reduction: `root` < 0 for those that have none.
struct Way {
  Collective kind;
  int root;
  bool in_place;
};

std::vector<Way> reductions(int size) {
  std::vector<Way> out;
  for (const bool in_place : {false, true}) {
    out.push_back({Collective::all_reduce, -1, in_place});
    out.push_back({Collective::reduce_scatter, -1, in_place});
    out.push_back({Collective::reduce, 0, in_place});
    if (size > 1) out.push_back({Collective::reduce, size - 1, in_place});
  }
  return out;
}

template <class T>
void check_reduction(Communicator& comm, const Way& way, ReduceOp::Kind kind, std::size_t n, bool shared) {
  const auto rank = static_cast<std::size_t>(comm.rank()), size = static_cast<std::size_t>(comm.size());
  const bool scatters = way.kind == Collective::reduce_scatter;
  const ReduceOp op(kind, kind == ReduceOp::premul_sum ? factor(comm.rank()) : 1);
  Block<T> in(comm, shared, scatters ? n * size : n), out(comm, shared, n);
  for (std::size_t i = 0; i < in.buffer().count; ++i)
    in[i] = test::rounded<T>(input(kind, dtype_of<T>, comm.rank(), i));
  const Buffer to = !way.in_place ? out.buffer() : scatters ? in.part(rank, n) : in.buffer();
  if (way.kind == Collective::all_reduce) comm.all_reduce(in.buffer(), to, op).wait();
  if (scatters) comm.reduce_scatter(in.buffer(), to, op).wait();
  if (way.kind == Collective::reduce) comm.reduce(in.buffer(), to, way.root, op).wait();
  ASSERT_TRUE(in.guarded() && out.guarded()) << "written beyond the end";
  const std::size_t first = scatters ? rank * n : 0;
  const bool receives = way.root < 0 || way.root == comm.rank();
  for (std::size_t i = 0; receives && i < n; ++i) {
    const T want = expected<T>(kind, comm.size(), first + i);
    const T got = static_cast<T*>(to.data)[i];
    if (!(got == want))
      FAIL() << "element " << i << " is " << testing::PrintToString(got) << ", not "
             << testing::PrintToString(want);
  }
  if (receives && way.in_place) return;
  for (std::size_t i = 0; i < in.buffer().count; ++i)
    ASSERT_TRUE(in[i] == test::rounded<T>(input(kind, dtype_of<T>, comm.rank(), i)))
        << "input " << i << " was changed";
}

template <class T>
void check_reductions(Communicator& comm, const Counts& counts, bool shared) {
  for (const Way& way : reductions(comm.size()))
    for (const auto kind : all_kinds)
      for (const std::size_t n : counts) {
        SCOPED_TRACE(testing::Message()
                     << name(way.kind) << (way.in_place ? " in place" : "") << " root " << way.root << " of "
                     << n << " " << name(dtype_of<T>) << ", " << name(ReduceOp(kind)) << ", rank "
                     << comm.rank() << " of " << comm.size() << (shared ? ", communicator memory" : ""));
        check_reduction<T>(comm, way, kind, n, shared);
        if (testing::Test::HasFatalFailure()) return;
      }
}

void check_all_types(Communicator& comm, const Counts& counts, bool shared) {
  const auto each = [&]<class... T>(T...) { (check_reductions<T>(comm, counts, shared), ...); };
  each(float{}, double{}, f16{}, bf16{}, f8e4m3{}, f8e5m2{}, std::int8_t{}, std::uint8_t{}, std::int32_t{},
       std::uint32_t{}, std::int64_t{}, std::uint64_t{});
}

class Sizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sizes, testing::Values(1, 2, 3, 4, 7, 8));

TEST_P(Sizes, EveryReductionOfEveryType) {
  const int size = GetParam();
  lab::group(size, quick(), [&](Communicator& comm) {
    check_all_types(comm,
                    size <= 3   ? Counts{0, 1, 3, 17, 1000}
                    : size == 7 ? Counts{3}
                                : Counts{1000},
                    false);
    if (size <= 4) check_all_types(comm, {17}, true);
    check_reductions<float>(comm, {size <= 4 ? 100003u : 20011u}, size % 2 == 0);
  });
}

TEST(Collectives, ReductionsOverTcpAndOverBoth) {
  for (const std::string nodes : {"aaa", "aabb"}) {
    lab::group(nodes, quick(nodes == "aaa" ? "tcp" : "auto"), [&](Communicator& comm) {
      EXPECT_EQ(comm.describe(), nodes == "aaa" ? "native over tcp" : "native over shm+tcp");
      check_all_types(comm, {17}, false);
      check_reductions<float>(comm, {0}, false);
      check_reductions<bf16>(comm, {1, 3, 1000}, true);
      check_reductions<double>(comm, {20011}, false);
    });
  }
}

// Element i of the data of rank `from` for rank `to`; every pair has different bytes.
std::uint64_t message_word(int from, int to, std::size_t i) {
  return (static_cast<std::uint64_t>(from) * 31 + static_cast<std::uint64_t>(to) + 1) * 0x9e3779b97f4a7c15u +
         i * 0x2545f4914f6cdd1du;
}

template <class T>
T pattern(int from, int to, std::size_t i) {
  const std::uint64_t bits = message_word(from, to, i);
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits >> (64 - 8 * sizeof(T)));
  } else {
    T x;  // any bits: collectives that only move data keep NaN's payloads
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
}

template <class T>
void fill(T* to, int from, int target, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = pattern<T>(from, target, i);
}

template <class T>
bool holds(const T* data, int from, int target, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const T want = pattern<T>(from, target, i);
    if (std::memcmp(&data[i], &want, sizeof want) != 0) return false;
  }
  return true;
}

// The collectives that only move data, with shards of n elements.
template <class T>
struct Movement {
  Communicator& comm;
  std::size_t n;
  bool shared;
  const int rank = comm.rank(), size = comm.size();
  const std::size_t ranks = static_cast<std::size_t>(size), own = static_cast<std::size_t>(rank);

  Block<T> block(std::size_t count) { return {comm, shared, count}; }

  void broadcast(int root, bool in_place) {
    auto in = block(n), out = block(n);
    if (rank == root) fill(in.data(), root, 0, n);
    Block<T>& to = in_place ? in : out;
    if (in_place)
      comm.broadcast(in.buffer(), root).wait();
    else
      comm.broadcast(rank == root ? in.buffer() : Buffer(), out.buffer(), root).wait();
    EXPECT_TRUE(holds(to.data(), root, 0, n) && to.guarded());
  }

  void all_gather(bool in_place) {
    auto in = block(n), out = block(n * ranks);
    const Buffer from = in_place ? out.part(own, n) : in.buffer();
    fill(static_cast<T*>(from.data), rank, 0, n);
    comm.all_gather(from, out.buffer()).wait();
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(holds(out.data() + static_cast<std::size_t>(r) * n, r, 0, n)) << "part " << r;
    EXPECT_TRUE(out.guarded());
  }

  void gather(int root, bool in_place) {
    auto in = block(n), out = block(rank == root ? n * ranks : 0);
    const Buffer from = in_place && rank == root ? out.part(own, n) : in.buffer();
    fill(static_cast<T*>(from.data), rank, 0, n);
    comm.gather(from, rank == root ? out.buffer() : Buffer(), root).wait();
    for (int r = 0; rank == root && r < size; ++r)
      EXPECT_TRUE(holds(out.data() + static_cast<std::size_t>(r) * n, r, 0, n)) << "part " << r;
    EXPECT_TRUE(out.guarded());
  }

  void scatter(int root, bool in_place) {
    auto in = block(rank == root ? n * ranks : 0), out = block(n);
    for (int r = 0; rank == root && r < size; ++r)
      fill(in.data() + static_cast<std::size_t>(r) * n, root, r, n);
    const Buffer to = in_place && rank == root ? in.part(own, n) : out.buffer();
    comm.scatter(rank == root ? in.buffer() : Buffer(), to, root).wait();
    EXPECT_TRUE(holds(static_cast<T*>(to.data), root, rank, n) && out.guarded() && in.guarded());
  }

  void all_to_all(bool in_place) {
    auto in = block(n * ranks), out = block(n * ranks);
    for (int r = 0; r < size; ++r) fill(in.data() + static_cast<std::size_t>(r) * n, rank, r, n);
    Block<T>& to = in_place ? in : out;
    comm.all_to_all(in.buffer(), to.buffer()).wait();
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(holds(to.data() + static_cast<std::size_t>(r) * n, r, rank, n)) << "part " << r;
    EXPECT_TRUE(to.guarded());
  }

  // Parts of different lengths, every third of them empty, with a gap before each.
  void all_to_all_v() {
    const auto length = [&](int from, int to) {
      return (from + to) % 3 == 0 ? 0 : n + static_cast<std::size_t>(from * 2 + to);
    };
    Counts send(ranks), send_offsets(ranks), receive(ranks), receive_at(ranks);
    std::size_t sends = 0, receives = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      send[r] = length(rank, static_cast<int>(r)), send_offsets[r] = sends + 1, sends += send[r] + 1;
      receive[r] = length(static_cast<int>(r), rank), receive_at[r] = receives + 1,
      receives += receive[r] + 1;
    }
    auto in = block(sends), out = block(receives);
    for (std::size_t r = 0; r < ranks; ++r)
      fill(in.data() + send_offsets[r], rank, static_cast<int>(r), send[r]);
    comm.all_to_all_v(in.buffer(), send, send_offsets, out.buffer(), receive, receive_at).wait();
    for (std::size_t r = 0; r < ranks; ++r)
      EXPECT_TRUE(holds(out.data() + receive_at[r], static_cast<int>(r), rank, receive[r])) << "part " << r;
    EXPECT_TRUE(out.guarded());
  }

  void all() {
    SCOPED_TRACE(testing::Message() << "parts of " << n << " " << name(dtype_of<T>) << ", rank " << rank
                                    << " of " << size << (shared ? ", communicator memory" : ""));
    for (const bool in_place : {false, true}) {
      for (const int root : {0, size - 1}) {
        broadcast(root, in_place);
        gather(root, in_place);
        scatter(root, in_place);
      }
      all_gather(in_place);
      all_to_all(in_place);
    }
    all_to_all_v();
    comm.barrier().wait();
  }
};

template <class T>
void check_movements(Communicator& comm, const Counts& counts, bool shared) {
  for (const std::size_t n : counts) Movement<T>{comm, n, shared}.all();
}

void check_moving_all_types(Communicator& comm, const Counts& counts, bool shared) {
  const auto each = [&]<class... T>(T...) { (check_movements<T>(comm, counts, shared), ...); };
  each(float{}, double{}, f16{}, bf16{}, f8e4m3{}, f8e5m2{}, std::int8_t{}, std::uint8_t{}, std::int32_t{},
       std::uint32_t{}, std::int64_t{}, std::uint64_t{});
}

TEST_P(Sizes, EveryMovementOfEveryType) {
  const int size = GetParam();
  lab::group(size, quick(), [&](Communicator& comm) {
    check_moving_all_types(comm, {17}, false);
    check_moving_all_types(comm, {3}, true);
    check_movements<std::uint8_t>(comm, {0, 1, 3, 1000, 100003}, false);
    check_movements<double>(comm, {0, 1, 1000, size <= 4 ? 100003u : 20011u}, true);
  });
}

TEST(Collectives, MovementsOverTcpAndOverBoth) {
  for (const std::string nodes : {"aaa", "aabb"}) {
    lab::group(nodes, quick(nodes == "aaa" ? "tcp" : "auto"), [&](Communicator& comm) {
      check_moving_all_types(comm, {17}, false);
      check_movements<f16>(comm, {0, 1, 3, 1000, 100003}, true);
    });
  }
}

/// Calls whose shards have `bytes` use a hierarchy, if there is one for that collective.
void expect_hierarchies(Communicator& comm, std::size_t bytes) {
  const auto algorithm = [&](Collective kind) {
    return comm.explain(kind, message_bytes(kind, bytes, comm.size())).algorithm;
  };
  EXPECT_EQ(algorithm(Collective::all_reduce), "hierarchical_chain_all_gather");
  EXPECT_EQ(algorithm(Collective::reduce_scatter), "hierarchical_chain");
  EXPECT_EQ(algorithm(Collective::reduce), "hierarchical_chain");
  EXPECT_EQ(algorithm(Collective::all_gather), "hierarchical");
  EXPECT_EQ(algorithm(Collective::broadcast), "hierarchical_chain");
}

TEST(Collectives, NodesOfSeveralRanks) {
  for (const std::string nodes : {"aabb", "aaab", "abbcccc", "aabbcc", "abab", "abca"})
    lab::group(nodes, quick(), [](Communicator& comm) {
      if (comm.size() == 4) check_all_types(comm, {17}, false);
      check_reductions<float>(comm, {0, 3, 20011}, false);
      check_reductions<bf16>(comm, {20011}, true);
      check_movements<double>(comm, {0, 3, 20011}, true);
    });
  lab::group("aabbb", quick(), [](Communicator& comm) {
    expect_hierarchies(comm, 300007 * sizeof(float));
    expect_hierarchies(comm, 150001 * sizeof(double));
    check_reductions<float>(comm, {300007}, false);
    check_movements<double>(comm, {150001}, false);
  });
  lab::group("aabbc", quick(), [](Communicator& comm) {  // two paths lead to a result
    expect_hierarchies(comm, 300007 * sizeof(float));
    check_reductions<float>(comm, {300007}, false);
  });
}

TEST(Collectives, NodesOfSeveralRanksInAnyOrder) {
  auto options = quick();
  options.deterministic = false;
  for (const std::string nodes : {"aabbcc", "aaab", "abbabc"})
    lab::group(nodes, options, [](Communicator& comm) {
      check_reductions<float>(comm, {0, 1, 3, 1000, 100003}, false);
      check_reductions<bf16>(comm, {20011}, true);
    });
}

TEST(Collectives, ASplitGroupHasItsOwnNodeMap) {
  lab::group("aabbcc", quick(), [](Communicator& comm) {
    for (const int nodes_apart : {2, 3}) {  // of two nodes with consecutive ranks, and of one rank per node
      const int color = nodes_apart == 2 ? comm.rank() / 4 : comm.rank() % 2;
      auto part = comm.split(color, comm.rank());
      check_reductions<float>(*part, {3, 20011}, false);
      check_movements<float>(*part, {3, 20011}, false);
    }
    auto back = comm.split(0, -comm.rank());  // still consecutive, the last node first
    check_reductions<float>(*back, {20011}, false);
    auto mixed = comm.split(0, comm.rank() * 5 % 6);
    check_reductions<float>(*mixed, {20011}, false);
  });
}

TEST(Collectives, RankOrderedHierarchyNeedsConsecutiveRanksPerNode) {
  run_ranks(4, [](int rank, auto store) {
    auto options = quick();
    options.host_id = rank % 2 ? "b" : "a";
    options.algorithm = "hierarchical_chain";
    try {
      Communicator::connect(rank, 4, store, options);
      ADD_FAILURE() << "rank " << rank << " connected";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(std::string(e.what()).find("number the ranks node by node"), std::string::npos) << e.what();
    }
  });
}

TEST(Collectives, EveryAlgorithmOfAllReduce) {
  for (const schedule::Algorithm& algorithm : schedule::algorithms()) {
    if (algorithm.collective != Collective::all_reduce) continue;
    SCOPED_TRACE(algorithm.name);
    for (const int size : {2, 3, 5}) {
      auto options = quick(size == 3 ? "tcp" : "auto");
      options.algorithm = concat("schedule:", algorithm.name);
      options.deterministic = false;
      lab::group(size, options, [&](Communicator& comm) {
        for (const auto kind : {ReduceOp::sum, ReduceOp::avg, ReduceOp::premul_sum})
          for (const bool in_place : {false, true}) {
            const Way way{Collective::all_reduce, -1, in_place};
            for (const std::size_t n : {0, 1, 3, 1000}) check_reduction<bf16>(comm, way, kind, n, false);
            check_reduction<float>(comm, way, kind, 20011, in_place);
          }
      });
    }
  }
}

// Groups of more than eight ranks on a network use the algorithms with few messages.
TEST(Collectives, ALargeGroupOnANetwork) {
  auto options = quick("tcp");
  options.deterministic = false;
  lab::group(9, options, [](Communicator& comm) {
    check_reductions<float>(comm, {0, 3, 1000, 40009}, false);
    check_movements<std::int32_t>(comm, {0, 3, 1000, 40009}, false);
    check_reduction<float>(comm, {Collective::all_reduce, -1, true}, ReduceOp::sum, 1200007, false);
    check_reduction<float>(comm, {Collective::reduce_scatter, -1, false}, ReduceOp::sum, 150001, false);
  });
}

std::vector<float> noise(int rank, std::size_t n) {
  std::mt19937 random(static_cast<unsigned>(rank) * 7919u + 17u);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

std::vector<float> left_fold(int size, std::size_t n) {
  std::vector<float> sum = noise(0, n);
  for (int r = 1; r < size; ++r) {
    const std::vector<float> x = noise(r, n);
    for (std::size_t i = 0; i < n; ++i) sum[i] += x[i];
  }
  return sum;
}

TEST(Collectives, DeterministicSumsAreALeftFoldForAnyChunking) {
  for (const std::string nodes : {"aaaaa", "ababa", "aabbb", "abbcc"}) {
    constexpr std::size_t n = 5 * 12007;
    const std::vector<float> want = left_fold(static_cast<int>(nodes.size()), n);
    lab::group(nodes, quick(), [&](Communicator& comm) {
      const std::vector<float> mine = noise(comm.rank(), n);
      std::vector<float> whole = mine;
      comm.all_reduce({whole.data(), n}).wait();
      EXPECT_EQ(whole, want);
      for (const std::size_t piece : {std::size_t{1009}, std::size_t{30011}}) {
        std::vector<float> pieces = mine;
        std::vector<Work> works;
        for (std::size_t i = 0; i < n; i += piece)
          works.push_back(comm.all_reduce({pieces.data() + i, std::min(piece, n - i)}));
        for (const Work& w : works) w.wait();
        EXPECT_EQ(pieces, want) << "in pieces of " << piece;
      }
      const std::size_t part = n / 5, first = static_cast<std::size_t>(comm.rank()) * part;
      std::vector<float> own(part), root(n);
      comm.reduce_scatter(ConstBuffer(mine.data(), n), {own.data(), part}).wait();
      EXPECT_TRUE(std::equal(own.begin(), own.end(), want.begin() + static_cast<std::ptrdiff_t>(first)));
      comm.reduce(ConstBuffer(mine.data(), n), {root.data(), n}, 3).wait();
      EXPECT_EQ(root, comm.rank() == 3 ? want : std::vector<float>(n));
    });
  }
}

// A size for which the table selects flat schedules, too.
TEST(Collectives, RankOrderedHierarchyHasTheBitsOfFlatAlgorithms) {
  for (const std::string algorithm :
       {"two_shot", "one_shot", "hierarchical_chain", "hierarchical_chain_all_gather"}) {
    auto options = quick();
    options.algorithm = algorithm;
    for (const std::string nodes : {"aabb", "abbb", "aabbbcc"})
      lab::group(nodes, options, [](Communicator& comm) {
        for (const std::size_t n : {5u, 1009u, 30011u}) {
          std::vector<float> want = left_fold(comm.size(), n), sum = noise(comm.rank(), n);
          comm.all_reduce({sum.data(), n}).wait();
          EXPECT_EQ(sum, want);
          for (float& x : want) x /= static_cast<float>(comm.size());
          std::vector<float> mine = noise(comm.rank(), n), mean(n);
          comm.all_reduce(ConstBuffer(mine.data(), n), {mean.data(), n}, ReduceOp::avg).wait();
          EXPECT_EQ(mean, want);
        }
      });
  }
}

TEST(Collectives, SmallFloatsAreRoundedOnceForAnyPlacement) {
  constexpr std::size_t n = 40009;
  std::vector<bf16> want(n);
  const std::vector<float> sum = [] {
    std::vector<float> x(n);
    for (int r = 0; r < 4; ++r) {
      const std::vector<float> y = noise(r, n);
      for (std::size_t i = 0; i < n; ++i)
        x[i] = r == 0 ? to_f32(from_f32<bf16>(y[i])) : x[i] + to_f32(from_f32<bf16>(y[i]));
    }
    return x;
  }();
  for (std::size_t i = 0; i < n; ++i) want[i] = from_f32<bf16>(sum[i]);
  for (const std::string nodes : {"aaaa", "aabb", "abbb", "abcd"})
    lab::group(nodes, quick(), [&](Communicator& comm) {
      std::vector<bf16> x(n);
      const std::vector<float> mine = noise(comm.rank(), n);
      for (std::size_t i = 0; i < n; ++i) x[i] = from_f32<bf16>(mine[i]);
      comm.all_reduce({x.data(), n}).wait();
      EXPECT_TRUE(x == want);
    });
}

TEST(Collectives, EveryAlgorithmHasTheSameBitsOnEveryRank) {
  for (const schedule::Algorithm& algorithm : schedule::algorithms()) {
    if (algorithm.collective != Collective::all_reduce) continue;
    constexpr std::size_t n = 20011;
    std::vector<std::vector<float>> results(7);
    auto options = quick();
    options.algorithm = concat("schedule:", algorithm.name);
    options.deterministic = false;
    lab::group(7, options, [&](Communicator& comm) {
      auto& x = results[static_cast<std::size_t>(comm.rank())] = noise(comm.rank(), n);
      comm.all_reduce({x.data(), n}, ReduceOp::avg).wait();
    });
    for (const auto& x : results) EXPECT_EQ(x, results[0]) << algorithm.name;
    const std::vector<float> near = left_fold(7, n);
    for (std::size_t i = 0; i < n; ++i) ASSERT_NEAR(results[0][i], near[i] / 7, 1e-5) << algorithm.name;
  }
}

TEST(Collectives, AGroupOfMessagesAndCollectivesIsOne) {
  for (const std::string transport : {"shm", "tcp"}) {
    for (const std::size_t n : {std::size_t{0}, std::size_t{5}, std::size_t{300007}}) {
      lab::group(4, quick(transport), [&](Communicator& comm) {
        const int rank = comm.rank();
        const int next = (rank + 1) % 4, previous = (rank + 3) % 4;
        std::vector<int> to_next(n), to_previous(n), from_next(n), from_previous(n);
        fill(to_next.data(), rank, next, n);
        fill(to_previous.data(), rank, previous, n);
        std::vector<float> a(n, 1), b(n, static_cast<float>(rank));
        std::vector<std::uint8_t> own(n), all(4 * n);
        fill(own.data(), rank, 0, n);
        auto group = comm.group();
        group.send(ConstBuffer(to_next.data(), n), next)
            .all_reduce({a.data(), n})
            .recv({from_previous.data(), n}, previous)
            .recv({from_next.data(), n}, next)
            .broadcast({b.data(), n}, 2)
            .send(ConstBuffer(to_previous.data(), n), previous)
            .all_gather(ConstBuffer(own.data(), n), {all.data(), 4 * n});
        group.launch().wait();
        EXPECT_TRUE(holds(from_previous.data(), previous, rank, n));
        EXPECT_TRUE(holds(from_next.data(), next, rank, n));
        EXPECT_EQ(a, std::vector<float>(n, 4));
        EXPECT_EQ(b, std::vector<float>(n, 2));
        for (int r = 0; r < 4; ++r) EXPECT_TRUE(holds(all.data() + static_cast<std::size_t>(r) * n, r, 0, n));
      });
    }
  }
}

TEST(Collectives, AGroupHoldsEveryCollective) {
  for (const std::string transport : {"shm", "tcp"})
    lab::group(3, quick(transport), [&](Communicator& comm) {
      const auto n = static_cast<float>(comm.rank());
      const std::vector<float> one(5, n), three{n, n + 10, n + 20};
      const std::vector<std::size_t> counts(3, 1), offsets{0, 1, 2}, backwards{2, 1, 0};
      std::vector<float> sum(5), root(5), to_two(5), all(15), turned(3), uneven(3), part(1), shared(1);
      auto group = comm.group();
      group.all_reduce(ConstBuffer(one.data(), 5), {sum.data(), 5}, ReduceOp::sum)
          .broadcast(ConstBuffer(one.data(), 5), {root.data(), 5}, 1)
          .reduce(ConstBuffer(one.data(), 5), {to_two.data(), 5}, 2, ReduceOp::max)
          .gather(ConstBuffer(one.data(), 5), {all.data(), 15}, 0)
          .scatter(ConstBuffer(three.data(), 3), {part.data(), 1}, 2)
          .reduce_scatter(ConstBuffer(three.data(), 3), {shared.data(), 1}, ReduceOp::min)
          .all_to_all(ConstBuffer(three.data(), 3), {turned.data(), 3})
          .all_to_all_v(ConstBuffer(three.data(), 3), counts, offsets, {uneven.data(), 3}, counts, backwards);
      group.launch().wait();
      EXPECT_EQ(sum, std::vector<float>(5, 3));
      EXPECT_EQ(root, std::vector<float>(5, 1));
      EXPECT_EQ(to_two, std::vector<float>(5, comm.rank() == 2 ? 2 : 0));
      for (std::size_t i = 0; i < 15; ++i)
        EXPECT_EQ(all[i], comm.rank() == 0 ? static_cast<float>(i / 5) : 0);
      EXPECT_EQ(part[0], 2 + 10 * n);
      EXPECT_EQ(shared[0], 10 * n);
      EXPECT_EQ(turned, (std::vector<float>{10 * n, 10 * n + 1, 10 * n + 2}));
      EXPECT_EQ(uneven, (std::vector<float>{10 * n + 2, 10 * n + 1, 10 * n}));
    });
}

TEST(Collectives, AGroupRefusesWhatACallAloneWould) {
  auto comm = Communicator::connect(0, 1, nullptr, quick());
  std::vector<float> x(4);
  auto group = comm.group();
  EXPECT_THROW(group.all_reduce(ConstBuffer(x.data(), 4), {x.data(), 3}, ReduceOp::sum), Error);
  EXPECT_THROW(group.reduce(ConstBuffer(x.data(), 4), {x.data(), 4}, 1), Error);
  EXPECT_THROW(group.gather(ConstBuffer(x.data(), 2), {x.data(), 4}, 0), Error);
  EXPECT_THROW(group.scatter(ConstBuffer(x.data(), 4), {x.data(), 2}, 0), Error);
  EXPECT_THROW(group.all_to_all(ConstBuffer(x.data(), 4), {x.data(), 2}), Error);
  group.launch().wait();  // the rejected calls are not in it
}

// A group of premul reduce_scatters, and all_to_alls in place: each needs its own copy of its input.
TEST(Collectives, OperationsOfAGroupDoNotShareTheirCopies) {
  lab::group(3, quick(), [](Communicator& comm) {
    constexpr std::size_t n = 40009;
    std::vector<double> in1(3 * n, 1), in2(3 * n, 10), out1(n), out2(n);
    auto group = comm.group();
    group.reduce_scatter(ConstBuffer(in1.data(), 3 * n), {out1.data(), n}, ReduceOp::premul(comm.rank()))
        .reduce_scatter(ConstBuffer(in2.data(), 3 * n), {out2.data(), n}, ReduceOp::premul(comm.rank() + 1));
    group.launch().wait();
    EXPECT_EQ(out1, std::vector<double>(n, 3));
    EXPECT_EQ(out2, std::vector<double>(n, 60));
    EXPECT_EQ(in1, std::vector<double>(3 * n, 1));
  });
}

TEST(Collectives, MessagesToOneselfAndToAPeerKeepTheirOrder) {
  lab::group(2, quick(), [](Communicator& comm) {
    std::vector<std::vector<int>> in, out;
    std::vector<Work> works;
    for (const int peer : {comm.rank(), 1 - comm.rank()})
      for (std::size_t i = 0; i < 40; ++i) {
        out.emplace_back(i * i * 5, comm.rank() * 100 + static_cast<int>(i));
        in.emplace_back(i * i * 5, -1);
        works.push_back(comm.send(ConstBuffer(out.back().data(), out.back().size()), peer));
        works.push_back(comm.recv({in.back().data(), in.back().size()}, peer));
      }
    for (const Work& w : works) w.wait();
    for (std::size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(in[i], out[i]);
      EXPECT_EQ(in[40 + i], std::vector<int>(i * i * 5, (1 - comm.rank()) * 100 + static_cast<int>(i)));
    }
  });
}

TEST(Collectives, EightMebibytes) {
  for (const std::string transport : {"shm", "tcp"}) {
    lab::group(3, quick(transport), [&](Communicator& comm) {
      for (const bool shared : {false, true}) {
        constexpr std::size_t n = 2 << 20;
        check_reduction<float>(comm, {Collective::all_reduce, -1, shared}, ReduceOp::sum, n, shared);
        Movement<float> large{comm, n / 3, shared};
        large.all_gather(true);
        large.all_to_all(true);
        large.broadcast(1, true);
      }
    });
  }
}

}  // namespace
}  // namespace rz
