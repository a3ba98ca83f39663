// CUDA peers: every kind of memory, graphs, and how a group ends when a rank fails.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "comm/backends/backend_factory.h"
#include "comm/backends/peer_cuda/peer_cuda_backend.h"
#include "comm/communicator.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "tests/gpu/floats.h"
#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/helper_threads.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

using namespace std::chrono_literals;

class PeerCuda : public OnDevice {
 protected:
  struct Setup {
    int size = 2;
    bool one_card = false;
    std::string algorithm;
    std::size_t slot_bytes = 128 << 10;
    std::chrono::milliseconds timeout = 30s;
    HelperThreads* helpers = nullptr;
    std::function<void(const std::string& line)> report = nullptr;  ///< of rank 0's waits of a second
  };

  /// f(communicator, stream) on every rank.
  template <class F>
  void on_ranks(const Setup& setup, const F& f) {
    run_ranks(setup.size, [&](int rank, std::shared_ptr<Store> store) {
      if (setup.helpers) setup.helpers->begin();
      CommOptions options;
      options.backend = "native";
      options.timeout = 30s;
      const std::shared_ptr<Backend> host = make_backend(rank, setup.size, store, options);
      options.device = {Device::cuda, setup.one_card ? 0 : rank % cuda::device_count()};
      auto peers = peer_cuda_backend(host, {.rank = rank,
                                            .size = setup.size,
                                            .device = options.device,
                                            .timeout = setup.timeout,
                                            .algorithm = setup.algorithm,
                                            .slot_bytes = setup.slot_bytes,
                                            .waits = {"world", rank ? nullptr : setup.report, 1s}});
      Communicator comm = Communicator::from_backend(
          rank, setup.size, device_and_host_backend(host, std::move(peers)), options);
      const Stream stream = Stream::create(options.device);
      if constexpr (std::is_invocable_v<F, Communicator&, const Stream&, Backend&>)
        f(comm, stream, *host);
      else
        f(comm, stream);
    });
  }
};

std::vector<float> values_of(int rank, std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed * 31 + static_cast<std::uint32_t>(rank));
  std::uniform_real_distribution<float> values(-2, 2);
  std::vector<float> all(n);
  for (float& v : all) v = values(random);
  return all;
}

/// The sum in rank order.
std::vector<float> sum_of(int size, std::size_t n, std::uint32_t seed) {
  std::vector<float> sum = values_of(0, n, seed);
  for (int r = 1; r < size; ++r) {
    const auto term = values_of(r, n, seed);
    for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
  }
  return sum;
}

TEST_F(PeerCuda, WaitsWithoutTimeoutOnThreadsWithSignalsBlocked) {
  HelperThreads helpers(2);
  on_ranks({.one_card = true, .timeout = std::chrono::milliseconds::max(), .helpers = &helpers},
           [&](Communicator& comm, const Stream& s) {
             const Floats x(allocate_on(s.device(), 4000), 1000);
             x.set(std::vector<float>(1000, 1), s);
             if (comm.rank() == 1) std::this_thread::sleep_for(100ms);
             comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
             EXPECT_EQ(x.get(s)[999], 2.0f);
             if (emulated_device) helpers.expect_no_signals(2);  // a CUDA driver has threads of its own
           });
}

TEST_F(PeerCuda, ALongWaitIsReportedWithTheMissingRank) {
  std::vector<std::string> lines;  // of rank 0's watchdog
  std::atomic<int> reported{0};
  on_ranks({.one_card = true, .report = [&](const std::string& line) { lines.push_back(line), ++reported; }},
           [&](Communicator& comm, const Stream& s) {
             const Floats x(allocate_on(s.device(), 16), 4);
             x.set(std::vector<float>(4, 1), s);
             comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
             while (comm.rank() == 1 && reported == 0) std::this_thread::sleep_for(1ms);
             comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
           });
  ASSERT_EQ(lines.size(), 1u);
  for (const char* const part :
       {"rank 0 of 2 of world: all_reduce (sum) of 4 f32 #1 on cuda:0 has made no progress",
        "s: it waits for rank 1"})
    EXPECT_NE(lines[0].find(part), std::string::npos) << lines[0];
}

/// cudaFree waits until the device is idle, and a kernel of the other rank runs there until this rank's call.
TEST_F(PeerCuda, MemoryIsFreedWhileAPeerWaits) {
  on_ranks({.one_card = true}, [&](Communicator& comm, const Stream& s) {
    const Floats x(allocate_on(s.device(), 4000), 1000);
    x.set(std::vector<float>(1000, 1), s);
    auto on_device = allocate_on(s.device(), 4096), pinned = allocate_pinned(s.device(), 4096);
    comm.barrier().wait();
    if (comm.rank() == 1) std::this_thread::sleep_for(100ms);  // the other rank's kernel runs
    on_device.reset(), pinned.reset();
    comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
    EXPECT_EQ(x.get(s)[999], 2.0f);
  });
}

/// Each seed is a schedule on the emulated device, and on all devices a group, an algorithm and a kind of
/// memory.
TEST_F(PeerCuda, EveryScheduleSumsInRankOrder) {
  for (int seed = 0; seed < 50; ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    Setup setup;
    setup.size = 2 + seed % 3;
    setup.one_card = seed % 2 == 0;
    setup.algorithm = seed % 4 < 2 ? "two_shot" : "one_shot";
    setup.slot_bytes = 512;
    const std::size_t n = seed % 5 == 0 ? 7 : 700;
    // First all ranks allocate, then none, then some.
    const auto allocates = [&](int rank) { return seed % 3 == 0 || (seed % 3 == 1 && rank % 2 == 0); };
    const std::size_t misaligned = seed % 7 == 3 ? 1 : 0;
    on_ranks(setup, [&](Communicator& comm, const Stream& s) {
      const auto memory = [&] {
        const std::size_t bytes = (n + misaligned) * sizeof(float);
        return allocates(comm.rank()) ? comm.allocate(bytes) : allocate_on(s.device(), bytes);
      };
      const Floats in(memory(), n, misaligned), out(memory(), n, misaligned);
      for (std::uint32_t turn = 0; turn < 3; ++turn) {
        in.set(values_of(comm.rank(), n, turn), s);
        comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait_on(s);
        comm.all_reduce(in.on(s), ReduceOp::sum, s).wait_on(s);
        EXPECT_EQ(out.get(s), sum_of(comm.size(), n, turn)) << "schedule " << seed << ", turn " << turn;
        EXPECT_EQ(in.get(s), sum_of(comm.size(), n, turn)) << "schedule " << seed << ", in place";
      }
      comm.barrier().wait();
    });
  }
}

TEST_F(PeerCuda, LargeCollectivesReadMemoryWhereItLies) {
  for (const std::size_t misaligned : {0, 1}) {
    on_ranks({.size = 3, .one_card = misaligned == 1}, [&](Communicator& comm, const Stream& s) {
      const std::size_t n = 90'001, p = 3;
      const auto r = static_cast<std::size_t>(comm.rank());
      const auto mine = values_of(comm.rank(), n * p, 1);
      const auto part = [&](int rank, std::size_t i) {
        const auto all = values_of(rank, n * p, 1);
        return std::vector<float>(all.begin() + static_cast<long>(i * n),
                                  all.begin() + static_cast<long>((i + 1) * n));
      };
      const Floats in(comm.allocate((n * p + 1) * sizeof(float)), n * p, misaligned);
      const Floats out(comm.allocate((n * p + 1) * sizeof(float)), n * p, misaligned);
      const Floats small(comm.allocate((n + 1) * sizeof(float)), n, misaligned);
      in.set(mine, s);
      comm.reduce_scatter(in.on(s), small.on(s), ReduceOp::sum, s).wait_on(s);
      const auto sum = sum_of(comm.size(), n * p, 1);
      EXPECT_EQ(small.get(s), std::vector<float>(sum.begin() + static_cast<long>(r * n),
                                                 sum.begin() + static_cast<long>((r + 1) * n)));
      comm.all_gather(small.on(s), out.on(s), s).wait_on(s);
      EXPECT_EQ(out.get(s), sum);
      comm.all_to_all(in.on(s), out.on(s), s).wait_on(s);
      std::vector<float> turned;
      for (int from = 0; from < comm.size(); ++from) {
        const auto one = part(from, r);
        turned.insert(turned.end(), one.begin(), one.end());
      }
      EXPECT_EQ(out.get(s), turned);
      comm.all_to_all(in.on(s), in.on(s), s).wait_on(s);
      EXPECT_EQ(in.get(s), turned);
      out.set(mine, s);
      comm.broadcast(out.on(s), 1, s).wait_on(s);
      EXPECT_EQ(out.get(s), values_of(1, n * p, 1));
      comm.barrier().wait();
    });
  }
}

TEST_F(PeerCuda, LongMessagesPassEachOtherAndOthers) {
  for (int seed = 0; seed < schedules(10); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    on_ranks({.size = 3, .slot_bytes = 256}, [&](Communicator& comm, const Stream& s) {
      const std::size_t n = 1000;
      const int next = (comm.rank() + 1) % 3, before = (comm.rank() + 2) % 3;
      const Floats a(comm.allocate(n * 4), n), b(comm.allocate(n * 4), n), c(comm.allocate(n * 4), n);
      a.set(values_of(comm.rank(), n, 1), s);
      // Two to each neighbour at once, and a collective that overtakes them.
      const Work messages = comm.group()
                                .send(a.on(s), next, s)
                                .send(a.on(s), before, s)
                                .recv(b.on(s), before, s)
                                .recv(c.on(s), next, s)
                                .launch();
      const Floats sum(comm.allocate(n * 4), n);
      comm.all_reduce(a.on(s), sum.on(s), ReduceOp::sum, s).wait();
      messages.wait();
      EXPECT_EQ(sum.get(s), sum_of(3, n, 1));
      EXPECT_EQ(b.get(s), values_of(before, n, 1));
      EXPECT_EQ(c.get(s), values_of(next, n, 1));
      comm.barrier().wait();
    });
  }
}

TEST_F(PeerCuda, AGraphIsReplayed) {
  on_ranks({.size = 2, .algorithm = "two_shot", .slot_bytes = 512}, [&](Communicator& comm, const Stream& s) {
    const cuda::Runtime& cuda = cuda::runtime();
    const cuda::DeviceGuard guard(s.device());
    const std::size_t n = 600;
    const Floats in(comm.allocate(n * 4), n), out(comm.allocate(n * 4), n);
    comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait();
    ASSERT_EQ(cuda.begin_capture(s.native()), cuda::success);
    comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait_on(s);
    comm.all_reduce(out.on(s), ReduceOp::max, s).wait_on(s);
    void *graph = nullptr, *executable = nullptr;
    ASSERT_EQ(cuda.end_capture(s.native(), &graph), cuda::success);
    ASSERT_EQ(cuda.instantiate(&executable, graph), cuda::success);
    for (std::uint32_t turn = 0; turn < 5; ++turn) {
      in.set(values_of(comm.rank(), n, turn), s);
      ASSERT_EQ(cuda.launch_graph(executable, s.native()), cuda::success);
      EXPECT_EQ(out.get(s), sum_of(2, n, turn)) << "replay " << turn;
    }
    comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait();  // and later calls work
    EXPECT_EQ(out.get(s), sum_of(2, n, 4));
    cuda.destroy_executable(executable);
    cuda.destroy_graph(graph);
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, ARankThatMakesNoCallIsNamed) {
  on_ranks({.size = 3, .timeout = 1500ms}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(400), 100);
    if (comm.rank() == 1) {
      comm.barrier().wait();
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const Work work = comm.all_reduce(x.on(s), ReduceOp::sum, s);
    work.wait_on(s);
    const Error e = error_of([&] { work.wait(); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
    EXPECT_NE(std::string(e.what()).find("rank 1 has not reached it"), std::string::npos) << e.what();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
    s.synchronize();  // no kernel keeps waiting
    EXPECT_EQ(error_of([&] { static_cast<void>(comm.all_reduce(x.on(s), ReduceOp::sum, s)); }).code(),
              Errc::timeout);
    comm.barrier().wait();
  });
}

/// Runs of a graph have no Work: the group itself watches them.
TEST_F(PeerCuda, ARankThatDoesNotRunItsGraphIsNamed) {
  on_ranks({.size = 3, .timeout = 1500ms}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(400), 100);
    comm.all_reduce(x.on(s), ReduceOp::max, s).wait();
    EXPECT_TRUE(comm.capturable());
    const Graph graph = capture(s, [&] { comm.all_reduce(x.on(s), ReduceOp::max, s).wait_on(s); });
    graph.launch(s);
    comm.synchronize(s);
    if (comm.rank() == 1) {
      comm.barrier().wait();
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    graph.launch(s);
    const Error e = error_of([&] { comm.synchronize(s); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, CapturedOperationsHaveNoEndOfTheirOwn) {
  on_ranks({.size = 2}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(400), 100);
    comm.all_reduce(x.on(s), ReduceOp::max, s).wait();
    capture(s, [&] {
      const Work work = comm.all_reduce(x.on(s), ReduceOp::max, s);
      EXPECT_TRUE(work.done());
      EXPECT_EQ(error_of([&] { work.wait(); }).code(), Errc::invalid_argument);
      work.wait_on(s);
    });
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, AnUnreceivedMessageNamesItsPeer) {
  on_ranks({.size = 2, .timeout = 1500ms}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(400), 100);
    if (comm.rank() == 0) {
      const Error e = error_of([&] { comm.recv(x.on(s), 1, s).wait(); });
      EXPECT_EQ(e.code(), Errc::timeout) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
      s.synchronize();
    }
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, AbortEndsEveryRank) {
  on_ranks({.size = 3}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(400), 100);
    if (comm.rank() == 2) {
      comm.abort("enough");
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const Error e = error_of([&] { comm.all_reduce(x.on(s), ReduceOp::sum, s).wait(); });
    EXPECT_EQ(e.code(), Errc::aborted) << e.what();
    EXPECT_EQ(e.culprit(), 2) << e.what();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
    s.synchronize();
  });
}

// The death of a process: only the host's backend detects it.
TEST_F(PeerCuda, AFailureOnTheHostEndsTheKernels) {
  on_ranks({.size = 2}, [&](Communicator& comm, const Stream& s, Backend& host) {
    if (comm.rank() == 1) {
      host.abort("gone");
      std::promise<void>().get_future().wait_for(3s);  // and reports nothing on the device
      return;
    }
    const Floats x(comm.allocate(400), 100);
    const auto begin = std::chrono::steady_clock::now();
    const Error e = error_of([&] { comm.all_reduce(x.on(s), ReduceOp::sum, s).wait(); });
    EXPECT_EQ(e.code(), Errc::aborted) << e.what();
    EXPECT_EQ(e.culprit(), 1);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 2500ms);
    s.synchronize();
  });
}

TEST_F(PeerCuda, ARankThatLeavesIsNamed) {
  on_ranks({.size = 2}, [&](Communicator& comm, const Stream& s) {
    if (comm.rank() == 1) return;
    const Floats x(comm.allocate(400), 100);
    const Error e = error_of([&] { comm.all_reduce(x.on(s), ReduceOp::sum, s).wait(); });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
    s.synchronize();
  });
}

TEST_F(PeerCuda, DifferentCallsAreNamed) {
  on_ranks({.size = 2}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(800), 100);
    const Error e = error_of([&] {
      if (comm.rank() == 0)
        comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
      else
        comm.broadcast(x.on(s), 0, s).wait();
    });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), 1 - comm.rank());
    EXPECT_EQ(e.what(),
              comm.rank() == 0
                  ? std::string("rank 0 called all_reduce (sum) of 100 f32, but rank 1 called broadcast "
                                "of 100 f32 with root 0")
                  : std::string("rank 1 called broadcast of 100 f32 with root 0, but rank 0 called "
                                "all_reduce (sum) of 100 f32"));
    s.synchronize();
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, MessagesOfDifferentLengthsAreNamed) {
  on_ranks({.size = 2}, [&](Communicator& comm, const Stream& s) {
    const Floats x(comm.allocate(800), comm.rank() == 0 ? 100 : 99);
    if (comm.rank() == 0) {
      comm.send(x.on(s), 1, s).wait();  // short: the rank departs at once
    } else {
      const Error e = error_of([&] { comm.recv(x.on(s), 0, s).wait(); });
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_EQ(e.culprit(), 0);
    }
    s.synchronize();
    comm.barrier().wait();
  });
}

TEST_F(PeerCuda, MemoryOutlivesTheCommunicator) {
  std::shared_ptr<std::byte> memory;
  on_ranks({.size = 1}, [&](Communicator& comm, const Stream&) { memory = comm.allocate(100); });
  memset_async(memory.get(), 1, 100, stream);
  stream.synchronize();
}

}  // namespace
}  // namespace rz::test
