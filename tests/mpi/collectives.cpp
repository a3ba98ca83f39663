// Every collective over MPI, against the same call over our own transports: both must write the same bytes,
// in the result and beside it.

#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "comm/collective.h"
#include "comm/core/deadline.h"
#include "comm/core/math.h"
#include "comm/tuning/intranode.h"
#include "tests/mpi/world.h"
#include "tests/support/helper_threads.h"

namespace rz {
namespace {

using test::connect;
using test::quick;
using test::world_rank;
using test::world_size;
using Bytes = std::vector<std::byte>;
using Counts = std::vector<std::size_t>;

constexpr ReduceOp::Kind all_kinds[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod,
                                        ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum};
constexpr Collective all_collectives[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::broadcast,
    Collective::reduce,     Collective::gather,         Collective::scatter,    Collective::all_to_all};

struct Case {
  Collective kind;
  DType dtype;
  ReduceOp op;
  std::size_t n;
  int root;
  bool in_place;
};

std::string name_of(const Case& c) {
  return concat(name(c.kind), c.in_place ? " in place" : "", " of ", c.n, " ", name(c.dtype), ", ",
                name(c.op), ", root ", c.root, ", rank ", world_rank(), " of ", world_size());
}

template <class T>
void put(Bytes& to, std::size_t i, T value) {
  std::memcpy(to.data() + i * sizeof value, &value, sizeof value);
}

// Any bits for integers. `whole`: floats whose sums are exact in any order, in 8 bits too.
void fill(Bytes& to, DType dtype, bool whole, unsigned seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> between(-9, 9);
  for (std::size_t i = 0; i < to.size() / size_of(dtype); ++i) {
    const double x = whole ? static_cast<double>(random() % 2) : between(random);
    switch (dtype) {
      case DType::f32:
        put(to, i, static_cast<float>(x));
        break;
      case DType::f64:
        put(to, i, x);
        break;
      case DType::f16:
        put(to, i, from_f32<f16>(static_cast<float>(x)));
        break;
      case DType::bf16:
        put(to, i, from_f32<bf16>(static_cast<float>(x)));
        break;
      case DType::f8e4m3:
        put(to, i, from_f32<f8e4m3>(static_cast<float>(x)));
        break;
      case DType::f8e5m2:
        put(to, i, from_f32<f8e5m2>(static_cast<float>(x)));
        break;
      default:
        const std::uint64_t bits = random();
        std::memcpy(to.data() + i * size_of(dtype), &bits, size_of(dtype));
    }
  }
}

Work start(Communicator& comm, const Case& c, std::byte* a, std::byte* b) {
  const auto n = c.n, all = n * static_cast<std::size_t>(comm.size());
  const std::size_t own = n * size_of(c.dtype) * static_cast<std::size_t>(comm.rank());
  const auto buffer = [&](std::byte* data, std::size_t count) { return Buffer(data, count, c.dtype); };
  switch (c.kind) {
    case Collective::all_reduce:
      return comm.all_reduce(buffer(a, n), buffer(c.in_place ? a : b, n), c.op);
    case Collective::reduce:
      return comm.reduce(buffer(a, n), buffer(c.in_place ? a : b, n), c.root, c.op);
    case Collective::reduce_scatter:
      return comm.reduce_scatter(buffer(a, all), buffer(c.in_place ? a + own : b, n), c.op);
    case Collective::all_gather:
      return comm.all_gather(buffer(c.in_place ? b + own : a, n), buffer(b, all));
    case Collective::gather:
      return comm.gather(buffer(c.in_place && comm.rank() == c.root ? b + own : a, n), buffer(b, all),
                         c.root);
    case Collective::scatter:
      return comm.scatter(buffer(a, all), buffer(c.in_place && comm.rank() == c.root ? a + own : b, n),
                          c.root);
    case Collective::broadcast:
      return c.in_place ? comm.broadcast(buffer(b, n), c.root)
                        : comm.broadcast(buffer(a, n), buffer(b, n), c.root);
    default:
      return comm.all_to_all(buffer(a, all), buffer(c.in_place ? a : b, all));
  }
}

// Both buffers after the call, with a few bytes beyond their ends.
Bytes after(Communicator& comm, const Case& c, bool whole) {
  const std::size_t bytes = c.n * size_of(c.dtype) * static_cast<std::size_t>(comm.size());
  Bytes a(bytes + 16), b(bytes + 16);
  fill(a, c.dtype, whole, static_cast<unsigned>(comm.rank()) * 2 + 1);
  fill(b, c.dtype, whole, static_cast<unsigned>(comm.rank()) * 2 + 2);
  start(comm, c, a.data(), b.data()).wait();
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void expect_same(Communicator& mpi, Communicator& ours, const Case& c, bool whole) {
  ASSERT_EQ(after(mpi, c, whole), after(ours, c, whole)) << name_of(c);
}

void compare(Communicator& mpi, Communicator& ours, const Counts& counts, bool whole) {
  for (const Collective kind : all_collectives)
    for (int t = 0; t < dtype_count; ++t)
      for (const ReduceOp::Kind k : all_kinds)
        for (const std::size_t n : counts)
          for (const bool in_place : {false, true}) {
            if (!traits(kind).reduces && k != ReduceOp::sum) continue;
            const double factor = whole ? 1 + (world_rank() == 0) : 0.75 + world_rank();
            const Case c{
                kind,    static_cast<DType>(t), ReduceOp(k, factor), n, static_cast<int>(n) % world_size(),
                in_place};
            expect_same(mpi, ours, c, whole);
            if (testing::Test::HasFatalFailure()) return;
          }
}

Communicator over_pieces(std::size_t max_call_bytes, bool deterministic) {
  CommOptions options = quick("mpi");
  options.deterministic = deterministic;
  return Communicator::from_backend(world_rank(), world_size(),
                                    mpi_backend(MPI_COMM_WORLD, {.timeout = options.timeout,
                                                                 .deterministic = deterministic,
                                                                 .max_call_bytes = max_call_bytes}),
                                    options);
}

TEST(Collectives, HaveTheBitsOfTheNativeBackend) {
  auto ours = connect(quick("native")), mpi = connect(quick("mpi"));
  EXPECT_NE(mpi.describe().find("mpi ("), std::string::npos) << mpi.describe();
  compare(mpi, ours, {0, 1, 17, 1000}, false);
}

TEST(Collectives, HaveTheBitsOfTheNativeBackendInLargeBuffers) {
  auto ours = connect(quick("native")), mpi = connect_mpi(MPI_COMM_WORLD, quick("mpi"));
  for (const Collective kind : all_collectives)
    for (const DType t : {DType::f32, DType::bf16, DType::i8})
      for (const bool in_place : {false, true})
        expect_same(mpi, ours, {kind, t, ReduceOp::avg, 60001, world_size() - 1, in_place}, false);
}

// Sums in an order of MPI's own: of whole numbers, so that the order makes no difference.
TEST(Collectives, WithoutRankOrderAreExact) {
  auto options = quick("mpi");
  options.deterministic = false;
  auto ours = connect(quick("native")), mpi = connect(options);
  compare(mpi, ours, {0, 1, 17, 1000}, true);
  for (const Collective kind : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce})
    expect_same(mpi, ours, {kind, DType::f32, ReduceOp::sum, 300007, 0, false}, true);
}

template <class T>
void expect_average_of_largest(Communicator& comm, double largest, const std::string& what) {
  const std::size_t n = 1003, ranks = static_cast<std::size_t>(comm.size());
  std::vector<T> all(n * ranks), out(n);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double x = i % 2 ? -largest : largest;
    if constexpr (std::is_arithmetic_v<T>)
      all[i] = static_cast<T>(x);
    else
      all[i] = from_f32<T>(static_cast<float>(x));
  }
  const auto same = [&](std::size_t from) { return std::memcmp(out.data(), &all[from], n * sizeof(T)) == 0; };
  const ConstBuffer in(all.data(), n);
  comm.all_reduce(in, out, ReduceOp::avg).wait();
  EXPECT_TRUE(same(0)) << what << name(dtype_of<T>) << " all_reduce";
  out.assign(n, T{});
  comm.reduce(in, out, 0, ReduceOp::avg).wait();
  EXPECT_TRUE(same(0) || comm.rank() != 0) << what << name(dtype_of<T>) << " reduce";
  comm.reduce_scatter(all, out, ReduceOp::avg).wait();
  EXPECT_TRUE(same(n * static_cast<std::size_t>(comm.rank())))
      << what << name(dtype_of<T>) << " reduce_scatter";
}

// MPI stores partial sums in the type of the elements.
TEST(Collectives, AnAverageOfTheLargestNumbersIsFinite) {
  if (world_size() & (world_size() - 1)) GTEST_SKIP() << "exact for powers of two";
  for (const bool deterministic : {true, false})
    for (const std::size_t piece : {std::size_t{4000}, std::size_t{1} << 30}) {
      auto comm = over_pieces(piece, deterministic);
      const std::string what = concat(deterministic ? "deterministic " : "", "pieces of ", piece, ' ');
      expect_average_of_largest<f16>(comm, 65504, what);
      expect_average_of_largest<bf16>(comm, 0x1.fep127, what);
      expect_average_of_largest<f8e4m3>(comm, 448, what);
      expect_average_of_largest<f8e5m2>(comm, 57344, what);
      expect_average_of_largest<float>(comm, std::numeric_limits<float>::max(), what);
      expect_average_of_largest<double>(comm, std::numeric_limits<double>::max(), what);
    }
}

// The parts of calls beyond MPI's counts, with a limit of a few bytes instead of gigabytes.
TEST(Collectives, InChunksAreTheSame) {
  auto ours = connect(quick("native"));
  for (const bool deterministic : {true, false}) {
    auto mpi = over_pieces(24, deterministic);
    compare(mpi, ours, {1, 17}, !deterministic);
    auto longer =
        over_pieces(4001, deterministic);  // beyond the size up to which every rank receives everything
    for (const Collective kind : all_collectives)
      for (const bool in_place : {false, true})
        expect_same(longer, ours, {kind, DType::f32, ReduceOp::sum, 40001, 1, in_place}, true);
  }
}

/// Presents host memory as device memory, as for a CUDA-aware MPI: data movement then uses point-to-point
/// messages. In place, all_to_all reads from a copy on the host, as in
/// comm/backends/host_staged_backend.h.
class AsOnADevice final : public Backend {
 public:
  explicit AsOnADevice(std::size_t max_call_bytes)
      : mpi_(mpi_backend(MPI_COMM_WORLD,
                         {.timeout = std::chrono::seconds(30), .max_call_bytes = max_call_bytes})) {}

  Work submit(std::span<const CollectiveCall> group) override {
    std::vector<CollectiveCall> marked(group.begin(), group.end());
    for (CollectiveCall& op : marked) {
      if (traits(op.kind).reduces || op.kind == Collective::barrier) continue;
      op.in.device = op.out.device = {Device::cuda, 0};
      if (op.kind != Collective::all_to_all || op.in.data != op.out.data || op.in.count == 0) continue;
      const auto* const in = static_cast<const std::byte*>(op.in.data);
      copies_.emplace_back(in, in + op.in.bytes());
      op.in = ConstBuffer(copies_.back().data(), op.in.count, op.in.dtype);
    }
    return mpi_->submit(marked);
  }
  void abort(const std::string& reason) noexcept override { mpi_->abort(reason); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return mpi_->allocate(bytes); }
  std::string describe() const override { return mpi_->describe(); }

 private:
  std::vector<Bytes> copies_;
  const std::unique_ptr<Backend> mpi_;
};

Communicator as_on_a_device(std::size_t max_call_bytes = std::size_t{1} << 30) {
  return Communicator::from_backend(world_rank(), world_size(), std::make_unique<AsOnADevice>(max_call_bytes),
                                    quick("mpi"));
}

TEST(Collectives, InMessagesAreTheSame) {
  auto ours = connect(quick("native")), mpi = as_on_a_device(), pieces = as_on_a_device(24);
  for (const Collective kind : all_collectives)
    for (const DType t : {DType::f32, DType::i8})
      for (const std::size_t n : {0, 1, 17, 60001})
        for (const bool in_place : {false, true})
          for (int root = 0; root < (traits(kind).rooted() ? world_size() : 1); ++root) {
            const Case c{kind, t, ReduceOp::sum, n, root, in_place};
            expect_same(mpi, ours, c, false);
            if (n <= 17) expect_same(pieces, ours, c, false);
            if (HasFatalFailure()) return;
          }
}

void all_to_all_v(Communicator& comm, std::size_t n, std::vector<int>& out) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto length = [&](int from, int to) {
    return (from + to) % 3 == 0 ? 0 : n + static_cast<std::size_t>(from * 2 + to);
  };
  Counts send(ranks), send_offsets(ranks), receive(ranks), receive_at(ranks);
  std::size_t sends = 0, receives = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    send[r] = length(comm.rank(), static_cast<int>(r)), send_offsets[r] = sends + 1, sends += send[r] + 1;
    receive[r] = length(static_cast<int>(r), comm.rank()), receive_at[r] = receives + 1,
    receives += receive[r] + 1;
  }
  std::vector<int> in(sends);
  std::iota(in.begin(), in.end(), comm.rank() * 1000000);
  out.assign(receives, -1);
  comm.all_to_all_v(ConstBuffer(in.data(), in.size()), send, send_offsets, {out.data(), out.size()}, receive,
                    receive_at)
      .wait();
}

TEST(Collectives, CountsThatDiffer) {
  auto ours = connect(quick("native")), mpi = connect(quick("mpi"));
  auto pieces = over_pieces(40, true), device = as_on_a_device();
  for (const std::size_t n : {0, 1, 100, 100003}) {
    std::vector<int> want, got, in_pieces;
    all_to_all_v(ours, n, want);
    all_to_all_v(mpi, n, got);
    EXPECT_EQ(got, want) << n;
    all_to_all_v(device, n, got);
    EXPECT_EQ(got, want) << n;
    if (n > 100) continue;
    all_to_all_v(pieces, n, in_pieces);
    EXPECT_EQ(in_pieces, want) << n;
  }
}

TEST(Messages, AGroupOfMessagesAndCollectivesIsOne) {
  for (const bool in_pieces : {false, true}) {
    auto comm = in_pieces ? over_pieces(1000, true) : connect(quick("mpi"));
    const int rank = comm.rank(), size = comm.size(), next = (rank + 1) % size,
              previous = (rank + size - 1) % size;
    for (const std::size_t n : {0, 5, 100003}) {
      std::vector<int> to_next(n, rank), to_previous(n, -rank), from_next(n, 7), from_previous(n, 7);
      std::vector<float> a(n, 1), b(n, static_cast<float>(rank));
      auto group = comm.group();
      group.send(ConstBuffer(to_next.data(), n), next)
          .all_reduce({a.data(), n})
          .recv({from_previous.data(), n}, previous)
          .broadcast({b.data(), n}, 1)
          .send(ConstBuffer(to_previous.data(), n), previous)
          .recv({from_next.data(), n}, next);
      group.launch().wait();
      EXPECT_EQ(from_previous, std::vector<int>(n, previous));
      EXPECT_EQ(from_next, std::vector<int>(n, -next));
      EXPECT_EQ(a, std::vector<float>(n, static_cast<float>(size)));
      EXPECT_EQ(b, std::vector<float>(n, 1));
    }
  }
}

TEST(Messages, KeepTheirOrderAlsoToOneself) {
  auto comm = connect(quick("mpi"));
  const int peer = comm.rank() ^ 1;
  if (peer < comm.size()) {
    std::vector<std::vector<int>> in;
    std::vector<std::vector<int>> out;
    std::vector<Work> works;
    for (int i = 0; i < 40; ++i) {
      out.emplace_back(static_cast<std::size_t>(i * i), comm.rank() * 100 + i);
      in.emplace_back(out.back().size(), -1);
    }
    for (auto& x : out)
      for (const int to : {comm.rank(), peer})
        works.push_back(comm.send(ConstBuffer(x.data(), x.size()), to));
    std::vector<std::vector<int>> own = in;
    for (std::size_t i = 0; i < in.size(); ++i) {
      works.push_back(comm.recv({own[i].data(), own[i].size()}, comm.rank()));
      works.push_back(comm.recv({in[i].data(), in[i].size()}, peer));
    }
    for (const Work& w : works) w.wait();
    for (std::size_t i = 0; i < in.size(); ++i) {
      EXPECT_EQ(own[i], out[i]);
      EXPECT_EQ(in[i], std::vector<int>(i * i, peer * 100 + static_cast<int>(i)));
    }
  }
  comm.barrier().wait();
}

TEST(Work, CompletesWithoutWait) {
  auto comm = connect(quick("mpi"));
  std::vector<float> x(100003, 1);
  const Work work = comm.all_reduce({x.data(), x.size()});
  const auto end = Deadline::after(std::chrono::seconds(20));
  while (!work.done() && !end.expired()) std::this_thread::yield();
  ASSERT_TRUE(work.done());
  EXPECT_EQ(x, std::vector<float>(x.size(), static_cast<float>(comm.size())));
}

TEST(Memory, IsAlignedAndZero) {
  auto comm = connect(quick("mpi"));
  const auto memory = comm.allocate(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 256, 0u);
  EXPECT_TRUE(std::all_of(memory.get(), memory.get() + 100, [](std::byte b) { return b == std::byte{0}; }));
}

void expect_sum(Communicator& comm, int mine, int want) {
  comm.all_reduce({&mine, 1}).wait();
  EXPECT_EQ(mine, want);
}

// A communicator through a store, and from an MPI communicator without one.
TEST(Split, MakesGroupsOfGroups) {
  for (const bool handed_in : {false, true}) {
    auto all = handed_in ? connect_mpi(MPI_COMM_WORLD, quick("mpi")) : connect(quick("mpi"));
    const int rank = all.rank(), size = all.size();
    auto reversed = all.split(0, -rank);
    ASSERT_TRUE(reversed);
    EXPECT_EQ(reversed->rank(), size - 1 - rank);
    int first = rank;
    reversed->broadcast({&first, 1}, 0).wait();
    EXPECT_EQ(first, size - 1);
    auto half = reversed->split(rank % 2, rank);
    ASSERT_TRUE(half);
    EXPECT_EQ(half->rank(), rank / 2);
    int sum = 0;
    for (int r = rank % 2; r < size; r += 2) sum += r;
    expect_sum(*half, rank, sum);
    auto some = all.split(rank == 0 ? std::optional<int>() : 5, 0);
    EXPECT_EQ(some.has_value(), rank != 0);
    if (some) expect_sum(*some, 1, size - 1);
    // The rank that had no colour has counted that split too.
    auto whole = all.split(0, rank);
    ASSERT_TRUE(whole);
    expect_sum(*whole, 1, size);
    expect_sum(all, 1, size);
  }
}

// While it is idle, a rank polls for control messages. Open MPI itself sends messages on the same
// communicator for a split, which must not be received as such.
TEST(Split, WaitsForARankThatComesLate) {
  const auto all = mpi_backend(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(30)});
  std::vector<int> everybody(static_cast<std::size_t>(world_size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  for (int late = 0; late < world_size(); ++late) {
    if (world_rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(250));
    auto part =
        Communicator::from_backend(world_rank(), world_size(), all->split(everybody, late), quick("mpi"));
    expect_sum(part, 1, world_size());
  }
}

TEST(Lifetime, ALateRankIsReported) {
  const int late = world_size() - 1;
  CommOptions options = quick("mpi");
  options.name = "world";
  options.wait_report = std::chrono::milliseconds(50);
  std::vector<std::string> lines;  // written by the thread that waits, or that of the communicator
  std::atomic<int> reported{0};
  options.on_wait = [&](const std::string& line) { lines.push_back(line), ++reported; };
  auto comm = connect(options);
  comm.barrier().wait();
  float x = 1;
  if (world_rank() == late) test::world_store()->get("reported", Deadline::after(std::chrono::seconds(30)));
  const Work work = comm.all_reduce({&x, 1});
  while (world_rank() == 0 && reported == 0 && !work.done())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (world_rank() == 0) test::world_store()->set("reported", "");
  work.wait();
  EXPECT_EQ(x, static_cast<float>(world_size()));
  if (world_rank() != 0) return;
  ASSERT_EQ(lines.size(), 1u);
  for (const std::string& part :
       {concat("rank 0 of ", world_size(), " of world: all_reduce #1 (1 f32, sum) has made no progress for "),
        concat(" s: rank ", late, test::threaded() ? " did not call it" : " sent no reply")})
    EXPECT_NE(lines[0].find(part), std::string::npos) << lines[0];
}

// Messages left by a communicator must not reach the next one.
TEST(Lifetime, WaitsWithoutTimeoutOnThreadsWithSignalsBlocked) {
  test::world_store();
  test::HelperThreads helpers;
  helpers.begin();
  auto comm = connect(quick("mpi", std::chrono::milliseconds::max()));
  std::vector<float> x(1000, 1);
  if (world_rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  comm.all_reduce({x.data(), x.size()}).wait();
  EXPECT_EQ(x[999], static_cast<float>(world_size()));
  helpers.expect_no_signals(test::threaded() ? 1 : 0);
}

TEST(Lifetime, CommunicatorsComeAndGo) {
  for (int i = 0; i < 40; ++i) {
    auto comm = connect_mpi(MPI_COMM_WORLD, quick("mpi"));
    expect_sum(comm, i, i * comm.size());
    auto part = comm.split(comm.rank() % 2, 0);
    expect_sum(*part, 1, part->size());
  }
}

TEST(Lifetime, CommunicatorsWorkSideBySide) {
  if (!test::threaded()) GTEST_SKIP() << "threads need MPI_THREAD_MULTIPLE";
  auto first = connect(quick("mpi")), second = connect(quick("mpi"));
  const auto loop = [](Communicator& comm, std::size_t n) {
    std::vector<int> x(n, 1);
    for (int i = 0; i < 50; ++i) {
      std::fill(x.begin(), x.end(), i);
      comm.all_reduce({x.data(), n}).wait();
      EXPECT_EQ(x, std::vector<int>(n, i * comm.size()));
    }
  };
  std::thread other([&] { loop(second, 70001); });
  loop(first, 100);
  other.join();
}

}  // namespace
}  // namespace rz
