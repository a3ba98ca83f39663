// Runs: ci
// Not under sanitizers: SymmetricMemoryHasTheBits

// CUDA peers that are processes, by IPC handles. No CUDA call is made before the fork.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "tests/gpu/device_calls.h"
#include "tests/gpu/floats.h"
#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

using namespace std::chrono_literals;

class PeerCudaProcesses : public testing::Test {
 protected:
  void SetUp() override {
    if (!emulated_device && access("/dev/nvidiactl", R_OK) != 0) GTEST_SKIP() << "no card";
  }
};

CommOptions options_of(int rank, const std::string& algorithm) {
  CommOptions options;
  options.backend = "peer_cuda";
  options.device = {Device::cuda, rank % cuda::device_count()};
  options.timeout = 30s;
  options.algorithm = algorithm;
  return options;
}

/// f(communicator, stream) in one process per rank; the processes share the cards present.
template <class F>
void on_processes(int size, const std::string& algorithm, const F& f) {
  expect_processes(
      size,
      [&](int rank, std::shared_ptr<Store> store) {
        if (cuda::device_count() == 0) return;
        const CommOptions options = options_of(rank, algorithm);
        Communicator comm = Communicator::connect(rank, size, store, options);
        const Stream s = Stream::create(options.device);
        f(comm, s);
        s.synchronize();
        comm.barrier().wait();
      },
      120s);
}

/// Numbers that depend on the rank, whose sums are exact.
std::vector<float> values_of(int rank, std::size_t n, int turn = 0) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i)
    values[i] = static_cast<float>(i % 1000 + 1) * static_cast<float>(rank + 1 + turn);
  return values;
}
std::vector<float> sum_of(int size, std::size_t n, int turn = 0) {
  std::vector<float> sum(n);
  for (int r = 0; r < size; ++r) {
    const auto term = values_of(r, n, turn);
    for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
  }
  return sum;
}
std::vector<float> all_of(int size, std::size_t n) {
  std::vector<float> all;
  for (int r = 0; r < size; ++r) {
    const auto part = values_of(r, n);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST_F(PeerCudaProcesses, HaveTheBitsOfTheHost) {
  for (const int size : {2, 3})
    on_processes(size, "", [&](Communicator& comm, const Stream& s) {
      for (const std::size_t n : {0, 1, 7, 1000, 70'001}) expect_same(comm, DType::f32, ReduceOp::sum, n, s);
      for (int t = 0; t < dtype_count; ++t) expect_same(comm, static_cast<DType>(t), ReduceOp::sum, 333, s);
      for (const auto kind :
           {ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum})
        for (const DType t : {DType::f32, DType::bf16, DType::i32})
          expect_same(comm, t, ReduceOp(kind, 0.5), 257, s);
    });
}

TEST_F(PeerCudaProcesses, SymmetricMemoryHasTheBitsOfTheHost) {
  for (const int size : {2, 3})
    for (const std::string algorithm : {"one_shot", "two_shot"})
      on_processes(size, algorithm, [&](Communicator& comm, const Stream& s) {
        const auto window = comm.allocate_symmetric(4 << 20);
        for (const std::size_t n : {0, 1, 7, 1000, 70'001})
          // At another place of the window on every rank, and once aligned to single elements only.
          for (const std::size_t at : {std::size_t{4096}, std::size_t{4}})
            expect_same(comm, DType::f32, ReduceOp::sum, n, s,
                        window.get() + at * static_cast<std::size_t>(comm.rank()));
        for (int t = 0; t < dtype_count; ++t)
          expect_same(comm, static_cast<DType>(t), ReduceOp::sum, 333, s, window.get());
        for (const auto kind :
             {ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum})
          for (const DType t : {DType::f32, DType::bf16, DType::i32})
            expect_same(comm, t, ReduceOp(kind, 0.5), 257, s, window.get());
      });
}

/// The places of the ranks' buffers: in windows of different numbers, at different offsets, or in none.
Floats somewhere(Communicator& comm, std::size_t n, const std::shared_ptr<std::byte>& a,
                 const std::shared_ptr<std::byte>& b, int turn) {
  const auto offset = static_cast<std::size_t>(comm.rank()) * 64;
  switch ((comm.rank() + turn) % 3) {
    case 0:
      return {comm.allocate(n * sizeof(float)), n};
    case 1:
      return {a, n, offset};
    default:
      return {b, n, 2 * offset};
  }
}

TEST_F(PeerCudaProcesses, BuffersMayLieAnywhereOnEachRank) {
  for (const int size : {2, 3})
    on_processes(size, "two_shot", [&](Communicator& comm, const Stream& s) {
      const std::size_t n = 70'001, p = static_cast<std::size_t>(comm.size());
      std::vector<std::shared_ptr<std::byte>> windows;
      for (int i = 0; i < 4; ++i) windows.push_back(comm.allocate_symmetric((n * p + 1000) * sizeof(float)));
      for (int turn = 0; turn < 6; ++turn) {
        const Floats in = somewhere(comm, n, windows[0], windows[1], turn);
        const Floats out = somewhere(comm, n, windows[2], windows[3], turn / 2);
        const Floats all = somewhere(comm, n * p, windows[2], windows[3], turn / 3);
        in.set(values_of(comm.rank(), n), s);
        comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait();
        EXPECT_EQ(out.get(s), sum_of(comm.size(), n)) << "turn " << turn;
        comm.all_gather(in.on(s), all.on(s), s).wait();
        EXPECT_EQ(all.get(s), all_of(comm.size(), n)) << "turn " << turn;
        comm.all_reduce(in.on(s), ReduceOp::sum, s).wait();
        EXPECT_EQ(in.get(s), sum_of(comm.size(), n)) << "turn " << turn << ", in place";
      }
    });
}

TEST_F(PeerCudaProcesses, AGraphReadsWindowsInPlace) {
  on_processes(3, "two_shot", [&](Communicator& comm, const Stream& s) {
    const std::size_t n = 2000;
    const auto first = comm.allocate_symmetric(n * sizeof(float));
    const Floats in(comm.allocate_symmetric(n * sizeof(float)), n), out(first, n);
    comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait();
    const Graph graph = capture(s, [&] {
      comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait_on(s);
      comm.all_reduce(out.on(s), ReduceOp::max, s).wait_on(s);
    });
    const auto later = comm.allocate_symmetric(n * sizeof(float));  // unknown to the graph
    for (int turn = 0; turn < 5; ++turn) {
      in.set(values_of(comm.rank(), n, turn), s);
      graph.launch(s);
      EXPECT_EQ(out.get(s), sum_of(3, n, turn)) << "replay " << turn;
      const Floats other(later, n);
      comm.all_reduce(in.on(s), other.on(s), ReduceOp::sum, s).wait();
      EXPECT_EQ(other.get(s), sum_of(3, n, turn));
    }
    comm.synchronize(s);
  });
}

/// Memory of some peers belongs to this process, that of others to another one.
TEST_F(PeerCudaProcesses, RanksMayBeThreadsOfSeveralProcesses) {
  const auto rank_of_four = [](int rank, std::shared_ptr<Store> store) {
    const CommOptions options = options_of(rank, "two_shot");
    Communicator comm = Communicator::connect(rank, 4, store, options);
    const Stream s = Stream::create(options.device);
    expect_same(comm, DType::f32, ReduceOp::sum, 1000, s);
    const auto window = comm.allocate_symmetric(4 << 20);
    for (const std::size_t n : {1000, 30'001})
      expect_same(comm, DType::f32, ReduceOp::sum, n, s, window.get() + 16 * rank);
    comm.barrier().wait();
  };
  expect_processes(2, [&](int process, std::shared_ptr<Store> store) {
    if (cuda::device_count() == 0) return;
    run_ranks(2,
              [&](int thread, const std::shared_ptr<Store>&) { rank_of_four(2 * process + thread, store); });
  });
}

TEST_F(PeerCudaProcesses, AWindowReleasedByAllRanksIsReused) {
  on_processes(2, "two_shot", [&](Communicator& comm, const Stream& s) {
    const auto small = comm.allocate_symmetric(1000);
    auto large = comm.allocate_symmetric(5 << 20);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.get()) % 256, 0u);
    const std::byte* const was = large.get();
    const std::size_t n = 3 << 18;
    Floats(std::exchange(large, nullptr), n).set(values_of(comm.rank(), n), s);
    s.synchronize();
    const auto less = comm.allocate_symmetric(n * sizeof(float));
    EXPECT_EQ(less.get(), was);
    EXPECT_EQ(Floats(less, n).get(s), std::vector<float>(n, 0));
    EXPECT_NE(comm.allocate_symmetric(1000).get(), was);
  });
}

TEST_F(PeerCudaProcesses, AWindowHeldByOneRankIsNotReused) {
  on_processes(2, "two_shot", [&](Communicator& comm, const Stream& s) {
    auto a = comm.allocate_symmetric(1000);
    const std::byte* const was = a.get();
    const Floats values(comm.allocate_symmetric(1000), 250);
    if (comm.rank() == 1) a.reset();
    auto b = comm.allocate_symmetric(1000);
    EXPECT_NE(b.get(), was);
    a.reset();
    auto c = comm.allocate_symmetric(1000);
    EXPECT_EQ(c.get(), was);
    const Floats out(c, 250);
    values.set(values_of(comm.rank(), 250), s);
    comm.all_reduce(values.on(s), out.on(s), ReduceOp::sum, s).wait();
    EXPECT_EQ(out.get(s), sum_of(2, 250));
  });
}

TEST_F(PeerCudaProcesses, BeyondTheLastWindowMemoryIsOrdinary) {
  on_processes(2, "two_shot", [&](Communicator& comm, const Stream& s) {
    std::vector<std::shared_ptr<std::byte>> windows;
    for (int i = 0; i < 66; ++i) windows.push_back(comm.allocate_symmetric(4000));
    for (const std::size_t i : {0, 63, 64, 65}) {
      const Floats x(windows[i], 1000);
      x.set(values_of(comm.rank(), 1000), s);
      comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
      EXPECT_EQ(x.get(s), sum_of(2, 1000)) << "window " << i;
    }
  });
}

TEST_F(PeerCudaProcesses, AGroupOfSomeRanksCopiesWhatIsInTheWindowsOfAll) {
  on_processes(3, "two_shot", [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate_symmetric(4000), 1000);
    x.set(values_of(comm.rank(), 1000), s);
    auto part = comm.split(comm.rank() < 2 ? std::optional(0) : std::nullopt, 0);
    if (!part) return;
    Communicator both = std::move(*part);
    both.all_reduce(x.on(s), ReduceOp::sum, s).wait();
    EXPECT_EQ(x.get(s), sum_of(2, 1000));
    const Floats own(both.allocate_symmetric(4000), 1000);
    own.set(values_of(comm.rank(), 1000), s);
    both.all_reduce(own.on(s), ReduceOp::sum, s).wait();
    EXPECT_EQ(own.get(s), sum_of(2, 1000));
    both.barrier().wait();
  });
}

TEST_F(PeerCudaProcesses, SymmetricMemoryOfDifferentSizesIsNamed) {
  on_processes(2, "", [&](Communicator& comm, const Stream&) {
    const Error e = error_of([&] { comm.allocate_symmetric(comm.rank() == 0 ? 100 : 200); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), 1 - comm.rank());
    EXPECT_EQ(std::string(e.what()),
              comm.rank() == 0 ? "rank 0 called allocate_symmetric of 100 bytes, but rank 1 of 200 bytes"
                               : "rank 1 called allocate_symmetric of 200 bytes, but rank 0 of 100 bytes");
    EXPECT_NE(comm.allocate_symmetric(100), nullptr);
  });
}

TEST_F(PeerCudaProcesses, SymmetricMemoryOutlivesItsCommunicator) {
  expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    if (cuda::device_count() == 0) return;
    std::shared_ptr<std::byte> memory;
    const CommOptions options = options_of(rank, "two_shot");
    const Stream s = Stream::create(options.device);
    {
      Communicator comm = Communicator::connect(rank, 2, store, options);
      memory = comm.allocate_symmetric(4000);
      const Floats x(memory, 1000);
      x.set(values_of(rank, 1000), s);
      comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
    }
    EXPECT_EQ(Floats(memory, 1000).get(s), sum_of(2, 1000));
  });
}

TEST_F(PeerCudaProcesses, ARankThatDiesIsNamed) {
  for (const bool windows : {false, true}) {
    const auto endings = run_processes(3, [&](int rank, std::shared_ptr<Store> store) {
      if (cuda::device_count() == 0) return;
      CommOptions options = options_of(rank, "two_shot");
      options.timeout = 20s;
      Communicator comm = Communicator::connect(rank, 3, store, options);
      const Stream s = Stream::create(options.device);
      const Floats x(windows ? comm.allocate_symmetric(4000) : comm.allocate(4000), 1000);
      comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
      if (rank == 1) _exit(0);
      const auto begin = std::chrono::steady_clock::now();
      const auto reduce = [&] { comm.all_reduce(x.on(s), ReduceOp::sum, s).wait(); };
      const auto allocate = [&] { comm.allocate_symmetric(4000); };
      for (int i = 0; i < 2; ++i) {  // either may detect it
        const Error e = (i == 0) == windows ? error_of(reduce) : error_of(allocate);
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        EXPECT_EQ(e.culprit(), 1) << e.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
    });
    EXPECT_EQ(endings[0].exit_code, 0) << endings[0].signal << endings[0].error;
    EXPECT_EQ(endings[2].exit_code, 0) << endings[2].signal << endings[2].error;
  }
}

}  // namespace
}  // namespace rz::test
