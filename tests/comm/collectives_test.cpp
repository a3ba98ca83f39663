#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "comm/algorithms/algorithm.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/math.h"
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

template <class T>
T exact(double x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(x);
  else
    return from_f32<T>(static_cast<float>(x));
}

// Small whole numbers: whatever is combined of them for up to nine ranks is exact in every type, 8-bit floats
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
  if (kind != ReduceOp::avg) return exact<T>(x);
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(exact<T>(x) / static_cast<T>(size));
  else
    return exact<T>(static_cast<float>(x) / static_cast<float>(size));
}

// Memory of a communicator or of the process, with a few elements behind its end that nobody may touch.
template <class T>
class Block {
 public:
  Block(Communicator& comm, bool shared, std::size_t count) : count_(count) {
    const std::size_t bytes = (count + guard) * sizeof(T);
    memory_ = shared ? comm.allocate(bytes) : std::shared_ptr<std::byte>(new std::byte[bytes], [](auto* p) {
      delete[] p;
    });
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

// How to call a reduction: `root` < 0 for those that have none.
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
    in[i] = exact<T>(input(kind, dtype_of<T>, comm.rank(), i));
  const Buffer to = !way.in_place ? out.buffer() : scatters ? in.part(rank, n) : in.buffer();
  if (way.kind == Collective::all_reduce) comm.all_reduce(in.buffer(), to, op).wait();
  if (scatters) comm.reduce_scatter(in.buffer(), to, op).wait();
  if (way.kind == Collective::reduce) comm.reduce(in.buffer(), to, way.root, op).wait();
  ASSERT_TRUE(in.guarded() && out.guarded()) << "written beyond the end";
  const std::size_t first = scatters ? rank * n : 0;
  const bool receives = way.root < 0 || way.root == comm.rank();
  for (std::size_t i = 0; receives && i < n; ++i)
    ASSERT_EQ(static_cast<T*>(to.data)[i], expected<T>(kind, comm.size(), first + i)) << "element " << i;
  if (receives && way.in_place) return;
  for (std::size_t i = 0; i < in.buffer().count; ++i)
    ASSERT_EQ(in[i], exact<T>(input(kind, dtype_of<T>, comm.rank(), i))) << "input " << i << " was changed";
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
  run_ranks(size, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, size, store, quick());
    check_all_types(comm, size <= 4 ? Counts{0, 1, 3, 17, 1000} : Counts{3, 1000}, false);
    check_all_types(comm, {17}, true);
    check_reductions<float>(comm, {100003}, size % 2 == 0);
  });
}

TEST(Collectives, ReductionsOverTcpAndOverBoth) {
  for (const std::string hosts : {"aaa", "aabb"}) {
    const int size = static_cast<int>(hosts.size());
    run_ranks(size, [&](int rank, auto store) {
      auto options = quick(hosts == "aaa" ? "tcp" : "auto");
      options.host_id = hosts[static_cast<std::size_t>(rank)];
      auto comm = Communicator::connect(rank, size, store, options);
      EXPECT_EQ(comm.describe(), hosts == "aaa" ? "scheduled over tcp" : "scheduled over shm+tcp");
      check_all_types(comm, {0, 17}, false);
      check_reductions<bf16>(comm, {1, 3, 1000}, true);
      check_reductions<double>(comm, {100003}, false);
    });
  }
}

}  // namespace
}  // namespace rz
