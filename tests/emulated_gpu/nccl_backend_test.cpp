// The NCCL backend over an emulated NCCL with injected faults: errors, culprits and delays.
// tests/gpu/collectives_test.cpp tests that it has the host's bits.

#include "comm/backends/nccl/nccl_backend.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/emulated_gpu/machine.h"
#include "tests/emulated_gpu/nccl.h"
#include "tests/gpu/device_calls.h"
#include "tests/support/error_of.h"
#include "tests/support/helper_threads.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using emulated::Nccl;
using test::error_of;
using test::run_ranks;
using Clock = std::chrono::steady_clock;

Device device_of(int rank) { return {Device::cuda, rank}; }

/// Replaces the host's backend; only its abort() is called.
class Host final : public Backend {
 public:
  Work submit(std::span<const CollectiveCall>) override { return {}; }
  void abort(const std::string&) noexcept override { aborted = true; }
  std::shared_ptr<std::byte> allocate(std::size_t) override { return nullptr; }
  std::string describe() const override { return "none"; }
  std::atomic<bool> aborted{false};
};

/// A wait until a deadline that is not the one under test, and what every other one must be below.
constexpr auto long_time = 100s, soon = 30s;

nccl::NcclOptions quick(int rank, int size) {
  return {.rank = rank,
          .size = size,
          .device = device_of(rank),
          .rendezvous_timeout = long_time,
          .timeout = long_time,
          .finalize_limit = 300ms,
          .abort_limit = long_time};
}

const nccl::NcclApi& table() {
  static const nccl::NcclApi api = Nccl::table();
  return api;
}

Communicator connect(const nccl::NcclOptions& o, std::shared_ptr<Store> store,
                     const nccl::NcclApi& api = table(), std::chrono::milliseconds timeout = long_time) {
  auto backend = nccl_backend(api, std::move(store), std::make_shared<Host>(), o);
  CommOptions options;
  options.device = o.device;
  options.timeout = timeout;
  return Communicator::from_backend(o.rank, o.size, std::move(backend), options);
}

/// n floats of one value on a device, and a stream.
struct Floats {
  Floats(Communicator& comm, std::size_t n, float value = 1)
      : device(comm.options().device),
        stream(Stream::create(device)),
        memory(comm.allocate_array<float>(n)),
        n(n) {
    fill(value);
  }
  void fill(float value) const {
    const std::vector<float> values(n, value);
    memcpy_async(memory.get(), values.data(), n * sizeof(float), stream);
  }
  Buffer all() const { return {memory.get(), n, device}; }
  std::vector<float> read() const {
    std::vector<float> values(n);
    memcpy_async(values.data(), memory.get(), n * sizeof(float), stream);
    return values;
  }
  const Device device;
  const Stream stream;
  const std::shared_ptr<float> memory;
  const std::size_t n;
};

template <class F>
void expect_error(Errc code, int culprit, const std::string& words, const F& call) {
  const Error e = error_of(call);
  EXPECT_EQ(e.code(), code) << e.what();
  EXPECT_EQ(e.culprit(), culprit) << e.what();
  EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
}

template <class F>
Clock::duration time_of(const F& f) {
  const auto before = Clock::now();
  f();
  return Clock::now() - before;
}

class NcclBackend : public testing::Test {
 protected:
  /// f(communicator) on every rank of a group with short deadlines.
  template <class F>
  void on_ranks(int size, std::chrono::milliseconds timeout, const F& f) {
    run_ranks(size, [&](int rank, auto store) {
      auto options = quick(rank, size);
      options.timeout = timeout;
      Communicator comm = connect(options, store);
      f(comm, *store);
    });
  }

  emulated::Schedule schedule;
  Nccl nccl;
};

/// The others may leave when all have seen their results.
void wait_for_all(Store& store, int size, const std::string& name = "met") {
  if (store.add(name, 1) == size) store.set(name + "/all", "");
  store.get(name + "/all", Deadline::after(long_time));
}

// ---- the library

TEST_F(NcclBackend, WaitsWithoutTimeoutOnThreadsWithSignalsBlocked) {
  test::HelperThreads helpers(2);
  run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    helpers.begin();
    nccl::NcclOptions o = quick(rank, 2);
    o.timeout = o.rendezvous_timeout = std::chrono::milliseconds::max();
    Communicator comm = connect(o, std::move(store), table(), o.timeout);
    const Floats x(comm, 1000);
    comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
    helpers.expect_no_signals(1);
    comm.synchronize(x.stream);
  });
}

TEST_F(NcclBackend, ALongWaitIsReported) {
  std::vector<std::string> lines;  // of rank 0's watchdog
  std::atomic<int> reported{0};
  run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    nccl::NcclOptions o = quick(rank, 2);
    o.waits = {"world", nullptr, 50ms};
    if (rank == 0) o.waits.report = [&](const std::string& line) { lines.push_back(line), ++reported; };
    Communicator comm = connect(o, std::move(store));
    const Floats x(comm, 4);
    comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
    while (rank == 1 && reported == 0) std::this_thread::sleep_for(1ms);
    comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
  });
  ASSERT_EQ(lines.size(), 1u);
  const std::string begin =
      "rank 0 of 2 of world: all_reduce sum of 4 f32, collective #1 has made no progress for 0.";
  EXPECT_EQ(lines[0].substr(0, begin.size()), begin) << lines[0];
}

TEST_F(NcclBackend, AMissingLibraryIsOneLine) {
  expect_error(Errc::unsupported, -1, "libnccl-missing.so.2",
               [] { nccl::load_nccl("libnccl-missing.so.2"); });
  expect_error(Errc::unsupported, -1, "RZ_BACKEND=peer_cuda",
               [] { nccl::load_nccl("libnccl-missing.so.2"); });
}

TEST_F(NcclBackend, ALibraryThatIsNoNcclIsOneLine) {
  expect_error(Errc::unsupported, -1, "libm.so.6 has no ncclGetVersion",
               [] { nccl::load_nccl("libm.so.6"); });
}

TEST_F(NcclBackend, TheInstalledLibraryHasTheFunctionsOfItsVersion) {
  nccl::NcclApi api{};
  try {
    api = nccl::load_nccl();
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  const int version = nccl::require_version(api);
  EXPECT_EQ(std::string(api.get_error_string(nccl::invalid_usage)).substr(0, 13), "invalid usage");
  EXPECT_EQ(api.comm_register && api.comm_deregister, version >= 21900);
  EXPECT_EQ(api.mem_alloc && api.mem_free, version >= 21900);
  EXPECT_EQ(api.comm_window_register && api.comm_window_deregister, version >= 22700);
}

TEST_F(NcclBackend, RefusesUnsupportedVersions) {
  const std::pair<int, std::string> versions[] = {
      {21703, "2.17.3"}, {2708, "2.7.8"}, {11900, "1.19.0"}, {30000, "3.0.0"}};
  for (const auto& [version, text] : versions) {
    nccl.version(version);
    expect_error(Errc::unsupported, -1, "NCCL " + text,
                 [] { nccl_backend(table(), memory_store(), nullptr, quick(0, 1)); });
  }
}

TEST_F(NcclBackend, WorksWithoutFunctionsThatOldVersionsLack) {
  for (const int version : {21800, 22304, 23007}) {
    nccl.version(version);
    const nccl::NcclApi api = Nccl::table(version);
    run_ranks(2, [&](int rank, auto store) {
      Communicator comm = connect(quick(rank, 2), prefix_store(store, concat(version)), api);
      const Floats x(comm, 1000);
      comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
      EXPECT_EQ(x.read(), std::vector<float>(1000, 2));
      EXPECT_EQ(comm.describe(),
                concat("NCCL ", nccl::version_text(version), " on cuda:", rank, ", sums in rank order"));
    });
  }
}

TEST_F(NcclBackend, RefusesMoreRanksThanItsKernelsCombine) {
  expect_error(Errc::unsupported, -1, "257",
               [] { nccl_backend(table(), memory_store(), nullptr, quick(0, 257)); });
}

// ---- connecting

TEST_F(NcclBackend, TwoRanksOnOneDeviceAreNamed) {
  run_ranks(3, [&](int rank, auto store) {
    auto options = quick(rank, 3);
    options.device = device_of(rank == 2 ? 0 : rank);
    expect_error(Errc::config, -1, "ranks 0 and 2 are both on one GPU, cuda:0 (emulated device)",
                 [&] { connect(options, store); });
  });
  EXPECT_EQ(nccl.communicators(), 0);
}

// The emulated NCCL rejects them too, but the error is NCCL's own.
TEST_F(NcclBackend, TwoRanksOnOneDeviceMayTryWithNcclsSettings) {
  const auto settings = [](bool hierarchical, int rank) {
    auto options = quick(rank, 2);
    options.device = device_of(0);
    if (hierarchical) options.host_id = concat("h", rank);
    options.shares_gpus = !hierarchical;
    return options;
  };
  for (const bool hierarchical : {true, false}) {
    nccl.version(23003);
    run_ranks(2, [&](int rank, auto store) {
      expect_error(Errc::system, -1, "invalid usage", [&] { connect(settings(hierarchical, rank), store); });
    });
  }
  nccl.version(23002);
  run_ranks(2, [&](int rank, auto store) {
    expect_error(Errc::config, -1, "one GPU", [&] { connect(settings(false, rank), store); });
  });
}

TEST_F(NcclBackend, NamesRanksThatDoNotConnect) {
  run_ranks(2, [&](int rank, auto store) {
    auto options = quick(rank, 4);
    options.rendezvous_timeout = 200ms;
    const auto time = time_of([&] {
      expect_error(Errc::timeout, 2,
                   "did not connect to the NCCL backend before the rendezvous' deadline: 2 3",
                   [&] { connect(options, store); });
    });
    EXPECT_LT(time, soon);
  });
}

TEST_F(NcclBackend, AnInitThatNeverCompletesEndsAtTheDeadline) {
  nccl.never_connect();
  run_ranks(2, [&](int rank, auto store) {
    auto options = quick(rank, 2);
    options.rendezvous_timeout = 300ms;
    const auto time = time_of([&] {
      expect_error(Errc::timeout, -1, "all of them called ncclCommInitRankConfig",
                   [&] { connect(options, store); });
    });
    EXPECT_LT(time, soon);
  });
  EXPECT_EQ(nccl.communicators(), 0);
}

TEST_F(NcclBackend, AFailedInitStatesTheReason) {
  nccl.fail("comm_init_rank_config", 0, nccl::system_error);
  run_ranks(1, [&](int rank, auto store) {
    expect_error(Errc::system, -1, "ncclCommInitRankConfig: unhandled system error",
                 [&] { connect(quick(rank, 1), store); });
  });
}

// ---- success

TEST_F(NcclBackend, EveryCallMayBeInProgressForAWhile) {
  nccl.in_progress(3);
  run_ranks(3, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 3), store);
    for (const std::size_t n : {std::size_t{5}, std::size_t{30'000}}) {
      const Floats x(comm, n), y(comm, 3 * n);
      comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait_on(x.stream);
      comm.all_gather(x.all(), y.all(), x.stream).wait_on(x.stream);
      std::vector<float> result(3 * n);
      memcpy_async(result.data(), y.memory.get(), result.size() * sizeof(float), x.stream);
      EXPECT_EQ(result, std::vector<float>(3 * n, 3));
    }
  });
}

TEST_F(NcclBackend, HasTheSameResultInSlices) {
  // The results of all calls, by rank.
  const auto run = [&](const std::optional<std::size_t>& workspace_limit) {
    std::vector<std::vector<std::pair<std::string, std::vector<std::byte>>>> results(3);
    run_ranks(3, [&](int rank, auto store) {
      auto options = quick(rank, 3);
      if (workspace_limit) options.workspace_limit = *workspace_limit;
      Communicator comm = connect(options, store);
      const Stream stream = Stream::create(device_of(rank));
      for (const ReduceOp op : {ReduceOp(ReduceOp::sum), ReduceOp::premul(0.3 * (rank + 1))})
        for (const bool in_place : {false, true})
          for (const auto& call : test::calls(rank, 3, 20'011, op, in_place)) {
            const auto block = test::random_block(DType::f32, call.block(), static_cast<std::uint32_t>(rank));
            results[static_cast<std::size_t>(rank)].emplace_back(
                concat(call.name, " ", name(op)), test::on_device(comm, call, DType::f32, block, stream));
          }
    });
    return results;
  };
  const auto whole = run({});
  const int calls = nccl.calls();
  EXPECT_EQ(run(40 << 10), whole);
  EXPECT_GT(nccl.calls() - calls, calls) << "not in slices";
}

TEST_F(NcclBackend, EveryScheduleHasTheSameResult) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    emulated::Machine::instance().restart(seed, emulated::Machine::Pace::any);
    run_ranks(2 + static_cast<int>(seed) % 3, [&](int rank, auto store) {
      const int size = 2 + static_cast<int>(seed) % 3;
      Communicator comm = connect(quick(rank, size), store);
      const Floats x(comm, 10'000, static_cast<float>(rank)), y(comm, 300, static_cast<float>(rank));
      const Stream other = Stream::create(x.device);
      y.stream.wait(x.stream.record());
      comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait_on(other);
      auto group = comm.group();
      const Floats from(comm, 300);
      group.send(y.all(), (rank + 1) % size, y.stream)
          .recv(from.all(), (rank + size - 1) % size, from.stream);
      group.launch().wait_on(other);
      comm.broadcast(x.all(), size - 1, other).wait_on(x.stream);
      other.synchronize();
      EXPECT_EQ(x.read(), std::vector<float>(10'000, static_cast<float>(size * (size - 1) / 2)));
      EXPECT_EQ(from.read(), std::vector<float>(300, static_cast<float>((rank + size - 1) % size)));
      y.stream.synchronize();
    });
  }
}

/// Numbers that add exactly, in any order.
TEST_F(NcclBackend, UsesNcclReductionsUnlessRankOrderIsRequired) {
  run_ranks(3, [&](int rank, auto store) {
    auto options = quick(rank, 3);
    options.deterministic = false;
    Communicator comm = connect(options, store);
    EXPECT_EQ(comm.describe(), concat("NCCL 2.28.9 on cuda:", rank));
    const auto expect = [&](ReduceOp op, float value) {
      const Floats x(comm, 3000, static_cast<float>(1 << rank)), y(comm, 1000);
      y.stream.wait(x.stream.record());
      comm.reduce_scatter(x.all(), y.all(), op, y.stream).wait_on(y.stream);
      EXPECT_EQ(y.read(), std::vector<float>(1000, value)) << name(op);
      x.stream.wait(y.stream.record());
      comm.all_reduce(x.all(), op, x.stream).wait();
      EXPECT_EQ(x.read(), std::vector<float>(3000, value)) << name(op);
    };
    expect(ReduceOp::sum, 7);
    expect(ReduceOp::avg, 7.0f / 3);
    expect(ReduceOp::prod, 8);
    expect(ReduceOp::min, 1);
    expect(ReduceOp::max, 4);
    expect(ReduceOp::premul(0.5), 3.5);
    const Stream s = Stream::create(device_of(rank));
    const auto integers = comm.allocate_array<std::int32_t>(64);
    std::vector<std::int32_t> values(64, 3);
    memcpy_async(integers.get(), values.data(), 256, s);
    comm.all_reduce(Buffer(integers.get(), 64, device_of(rank)), ReduceOp::premul(0.5), s).wait_on(s);
    memcpy_async(values.data(), integers.get(), 256, s);
    EXPECT_EQ(values, std::vector<std::int32_t>(64, 6));  // as on the host: 1.5 is 2
  });
}

TEST_F(NcclBackend, AGraphHoldsCollectives) {
  const auto& cuda = cuda::runtime();
  run_ranks(2, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 2), store);
    const Floats x(comm, 20'000), y(comm, 20'000), z(comm, 100);
    y.stream.synchronize();
    void *graph = nullptr, *executable = nullptr;
    cuda::check(cuda.begin_capture(x.stream.native()), "begin", x.device);
    memcpy_async(x.memory.get(), y.memory.get(), x.n * sizeof(float), x.stream);
    const Work work = comm.all_reduce(x.all(), ReduceOp::sum, x.stream);
    work.wait_on(x.stream);
    memcpy_async(y.memory.get(), x.memory.get(), x.n * sizeof(float), x.stream);
    cuda::check(cuda.end_capture(x.stream.native(), &graph), "end", x.device);
    expect_error(Errc::invalid_argument, -1, "graph that is being captured", [&] { work.wait(); });
    cuda::check(cuda.instantiate(&executable, graph), "instantiate", x.device);
    for (int i = 0; i < 3; ++i) {
      cuda::check(cuda.launch_graph(executable, x.stream.native()), "launch", x.device);
      x.stream.synchronize();
      comm.all_reduce(z.all(), ReduceOp::sum, z.stream).wait();
    }
    EXPECT_EQ(x.read(), std::vector<float>(20'000, 8));
    EXPECT_EQ(z.read(), std::vector<float>(100, 8));
    cuda.destroy_executable(executable);
    cuda.destroy_graph(graph);
  });
}

TEST_F(NcclBackend, AGraphThatNeedsMemoryNamesTheRemedy) {
  run_ranks(1, [&](int, auto store) {
    Communicator comm = connect(quick(0, 1), store);
    const Floats x(comm, 8);
    x.stream.synchronize();
  });
  run_ranks(2, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 2), store);
    const Floats x(comm, 400'000);
    x.stream.synchronize();
    const auto capture = [&] {
      void* graph = nullptr;
      cuda::check(cuda::runtime().begin_capture(x.stream.native()), "begin", x.device);
      std::string problem;
      try {
        comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait_on(x.stream);
      } catch (const Error& e) {
        problem = e.what();
      }
      cuda::check(cuda::runtime().end_capture(x.stream.native(), &graph), "end", x.device);
      cuda::runtime().destroy_graph(graph);
      return problem;
    };
    EXPECT_NE(capture().find("run the same call once before"), std::string::npos);
    comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
    EXPECT_EQ(capture(), "");
  });
}

/// Runs of a graph have no Work that a watchdog could follow, but a wait for its stream is followed.
TEST_F(NcclBackend, ARankThatDoesNotRunItsGraphIsNamed) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Communicator comm = connect(quick(rank, 2), store, table(), 500ms);
    const Floats x(comm, 64);
    comm.all_reduce(x.all(), ReduceOp::max, x.stream).wait();
    const Graph graph =
        capture(x.stream, [&] { comm.all_reduce(x.all(), ReduceOp::max, x.stream).wait_on(x.stream); });
    graph.launch(x.stream);
    comm.synchronize(x.stream);
    if (rank == 0) {
      graph.launch(x.stream);
      const auto took = time_of([&] {
        expect_error(Errc::timeout, 1, "did not end within 1000 ms: rank 1",
                     [&] { comm.synchronize(x.stream); });
      });
      EXPECT_LT(took, soon);
    }
    wait_for_all(*store, 2);
  });
}

TEST_F(NcclBackend, SplitsIntoGroupsOfTheirOwn) {
  run_ranks(4, [&](int rank, auto store) {
    CommOptions options;
    options.backend = "nccl";
    options.device = device_of(rank);
    Communicator comm = Communicator::connect(rank, 4, store, options);
    EXPECT_EQ(comm.describe().substr(0, 4), "NCCL");
    auto half = comm.split(rank == 3 ? std::nullopt : std::optional(rank % 2), -rank);
    EXPECT_EQ(half.has_value(), rank != 3);
    if (half) {
      const Floats x(*half, 100, static_cast<float>(rank));
      half->all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
      EXPECT_EQ(x.read(), std::vector<float>(100, rank == 1 ? 1 : 2));
      x.stream.synchronize();
    }
    comm.barrier().wait();
  });
}

TEST_F(NcclBackend, MessagesToItselfComeInPairs) {
  run_ranks(1, [&](int, auto store) {
    Communicator comm = connect(quick(0, 1), store);
    const Floats x(comm, 50, 3), y(comm, 50, 4);
    y.stream.wait(x.stream.record());
    comm.group().send(x.all(), 0, y.stream).recv(y.all(), 0, y.stream).launch().wait_on(y.stream);
    EXPECT_EQ(y.read(), std::vector<float>(50, 3));
    expect_error(Errc::invalid_argument, -1, "put both into one group",
                 [&] { static_cast<void>(comm.send(x.all(), 0, x.stream)); });
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, MemoryOutlivesItsCommunicator) {
  std::shared_ptr<std::byte> memory[2];
  run_ranks(2, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 2), store);
    memory[rank] = comm.allocate(1000);
    std::vector<std::byte> bytes(1000, std::byte{1});
    memcpy_async(bytes.data(), memory[rank].get(), 1000, Stream::create(device_of(rank)));
    EXPECT_EQ(bytes, std::vector<std::byte>(1000));
    const auto gone = comm.allocate(10);
    wait_for_all(*store, 2);
    EXPECT_EQ(nccl.registrations(), 4);
    wait_for_all(*store, 2, "seen");
  });
  EXPECT_EQ(nccl.registrations(), 0);
  EXPECT_EQ(nccl.communicators(), 0);
  EXPECT_EQ(emulated::bytes_in_use(), 2 * 1024u);  // 1000, aligned to 256
}

TEST_F(NcclBackend, SymmetricMemoryIsAWindowThatEndsWithTheCommunicator) {
  for (const int polls : {0, 3}) {
    nccl.in_progress(polls);
    std::shared_ptr<std::byte> outlives;
    run_ranks(2, [&](int rank, auto store) {
      Communicator comm = connect(quick(rank, 2), store);
      const auto a = comm.allocate_symmetric(400), b = comm.allocate_symmetric(800);
      const Floats x(comm, 100, 3);
      const Buffer in_window(reinterpret_cast<float*>(b.get()), 100, comm.options().device);
      memcpy_async(b.get(), x.memory.get(), 400, x.stream);
      comm.all_reduce(in_window, ReduceOp::sum, x.stream).wait();
      memcpy_async(x.memory.get(), b.get(), 400, x.stream);
      EXPECT_EQ(x.read(), std::vector<float>(100, 6));
      if (rank == 0) outlives = a;
    });
    EXPECT_EQ(nccl.windows(), polls ? 8 : 4);
  }
}

TEST_F(NcclBackend, SymmetricMemoryOfAnOldVersionIsRegisteredAlone) {
  const nccl::NcclApi api = Nccl::table(22605);
  nccl.version(22605);
  run_ranks(2, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 2), store, api);
    const auto memory = comm.allocate_symmetric(400);
    EXPECT_GE(nccl.registrations(), 1);
    EXPECT_EQ(nccl.windows(), 0);
    wait_for_all(*store, 2);
  });
  EXPECT_EQ(nccl.registrations(), 0);
}

TEST_F(NcclBackend, ADifferentSizeOfSymmetricMemoryIsNamed) {
  run_ranks(2, [&](int rank, auto store) {
    Communicator comm = connect(quick(rank, 2), store);
    if (rank == 0) comm.allocate_symmetric(400);
    wait_for_all(*store, 2, "first");
    if (rank == 1)
      expect_error(Errc::system, -1, "ncclCommWindowRegister", [&] { comm.allocate_symmetric(800); });
    wait_for_all(*store, 2);
  });
}

// As where another rank does not call it.
TEST_F(NcclBackend, SymmetricMemoryThatNcclDoesNotEndRegisteringFails) {
  on_ranks(2, 300ms, [&](Communicator& comm, Store& store) {
    wait_for_all(store, 2, "connected");
    if (comm.rank() == 0) {
      nccl.in_progress(1 << 30);
      expect_error(Errc::timeout, -1, "ncclCommWindowRegister did not end within 0.3 s on rank 0",
                   [&] { comm.allocate_symmetric(400); });
    }
    wait_for_all(store, 2);
  });
}

// ---- failures

TEST_F(NcclBackend, ARankThatDoesNotCallIsNamedOnAllOthers) {
  on_ranks(3, 300ms, [&](Communicator& comm, Store& store) {
    const Floats x(comm, 100);
    comm.broadcast(x.all(), 0, x.stream).wait();
    if (comm.rank() != 1) {
      const auto time = time_of([&] {
        expect_error(Errc::timeout, 1, "rank 1 sends no reply",
                     [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
      });
      EXPECT_GE(time, 290ms);
      EXPECT_LT(time, soon);
      expect_error(Errc::timeout, 1, "all_reduce sum of 100 f32 did not end within 300 ms",
                   [&] { static_cast<void>(comm.all_reduce(x.all(), ReduceOp::sum, x.stream)); });
    }
    wait_for_all(store, 3);
    x.stream.synchronize();
  });
}

// Rank 1 waits elsewhere for over a second, and so sees the failure.
TEST_F(NcclBackend, ALaggingRankReportsItsProgress) {
  run_ranks(3, [&](int rank, auto store) {
    auto options = quick(rank, 3);
    options.timeout = rank == 1 ? std::chrono::milliseconds(long_time) : 1500ms;
    Communicator comm = connect(options, store);
    const Floats x(comm, 100);
    if (rank == 1) {
      expect_error(Errc::timeout, 1, "rank 1 has not called it",
                   [&] { comm.recv(x.all(), 0, x.stream).wait(); });
    } else {
      expect_error(Errc::timeout, 1, "rank 1 has not called it",
                   [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
    }
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, DifferentCallsAreNamed) {
  on_ranks(3, 300ms, [&](Communicator& comm, Store&) {
    const Floats x(comm, 100);
    const auto op = comm.rank() == 1 ? ReduceOp::max : ReduceOp::sum;
    comm.broadcast(x.all(), 0, x.stream).wait();
    // With equal byte counts NCCL would even return some result.
    const Buffer part(x.memory.get(), comm.rank() == 1 ? 99u : 100u, x.device);
    expect_error(
        Errc::mismatch, 1,
        "call 1 of the group's collectives is 'all_reduce max of 99 f32' on rank 1, but 'all_reduce sum of "
        "100 f32' on rank 0",
        [&] { comm.all_reduce(part, op, x.stream).wait(); });
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, AMissingMessageNamesItsSender) {
  on_ranks(2, 1200ms, [&](Communicator& comm, Store&) {
    const Floats x(comm, 100);
    // Both receive and none sends: either may report first.
    const Error e = error_of([&] { comm.recv(x.all(), 1 - comm.rank(), x.stream).wait(); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_NE(std::string(e.what()).find("has not called the send for message 0 to rank"), std::string::npos)
        << e.what();
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, ADeviceThatDoesNotReachTheCallIsNamed) {
  std::atomic<bool> stuck{true};
  on_ranks(2, 300ms, [&](Communicator& comm, Store& store) {
    const Floats x(comm, 100);
    x.stream.synchronize();
    if (comm.rank() == 1)
      emulated::Machine::instance().submit(
          static_cast<emulated::Stream*>(x.stream.native()), [&](std::uint64_t) {
            return [&] { return stuck ? emulated::Progress::waiting : emulated::Progress::done; };
          });
    expect_error(Errc::timeout, 1, "rank 1 called it, but its device still has work before it",
                 [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
    wait_for_all(store, 2);
    stuck = false;
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, ACallThatHangsInNcclIsNamed) {
  nccl.stall("group_end", 1);
  on_ranks(2, 300ms, [&](Communicator& comm, Store&) {
    const Floats x(comm, 100);
    const auto time = time_of([&] {
      expect_error(Errc::timeout, 1, "rank 1 called it, but is still within NCCL's own call",
                   [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
    });
    EXPECT_LT(time, soon);
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, ACallThatFailsEndsTheGroup) {
  nccl.fail("group_end", 1, nccl::internal_error);
  on_ranks(2, long_time, [&](Communicator& comm, Store&) {
    const Floats x(comm, 100);
    const auto time = time_of([&] {
      expect_error(Errc::system, 1, "ncclGroupEnd: internal error",
                   [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
    });
    EXPECT_LT(time, soon);
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, AnAsynchronousErrorEndsTheGroup) {
  on_ranks(2, long_time, [&](Communicator& comm, Store& store) {
    const Floats x(comm, 100);
    if (comm.rank() == 1) {
      wait_for_all(store, 2);
      // Another call of its own is in flight.
      const Work work = comm.recv(x.all(), 0, x.stream);
      nccl.report(1, nccl::unhandled_cuda_error);
      expect_error(Errc::system, 1, "NCCL failed: unhandled cuda error", [&] { work.wait(); });
    } else {
      wait_for_all(store, 2);
      expect_error(Errc::system, 1, "NCCL failed: unhandled cuda error",
                   [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
    }
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, ARankThatNcclLostIsNamed) {
  on_ranks(2, long_time, [&](Communicator& comm, Store& store) {
    const Floats x(comm, 100);
    if (comm.rank() == 0) {
      const Work work = comm.all_reduce(x.all(), ReduceOp::sum, x.stream);
      nccl.report(0, nccl::remote_error);
      const auto time =
          time_of([&] { expect_error(Errc::peer_lost, 1, "rank 1 sends no reply", [&] { work.wait(); }); });
      EXPECT_LT(time, soon);
    }
    wait_for_all(store, 2);
    x.stream.synchronize();
  });
}

TEST_F(NcclBackend, AnAbortEndsAllRanks) {
  on_ranks(3, long_time, [&](Communicator& comm, Store& store) {
    const Floats x(comm, 100);
    if (comm.rank() == 2) {
      wait_for_all(store, 3);
      EXPECT_LT(time_of([&] { comm.abort("enough"); }), soon);
      EXPECT_LT(time_of([&] { comm.abort("again"); }), soon);
      expect_error(Errc::aborted, 2, "rank 2 aborted: enough",
                   [&] { static_cast<void>(comm.all_reduce(x.all(), ReduceOp::sum, x.stream)); });
    } else {
      const Work work = comm.all_reduce(x.all(), ReduceOp::sum, x.stream);
      wait_for_all(store, 3);
      const auto time =
          time_of([&] { expect_error(Errc::aborted, 2, "rank 2 aborted: enough", [&] { work.wait(); }); });
      EXPECT_LT(time, soon);
      EXPECT_TRUE(work.done());
      expect_error(Errc::aborted, 2, "enough", [&] { work.wait_on(x.stream); });
    }
    x.stream.synchronize();
  });
  EXPECT_EQ(nccl.aborts(), 3);
}

TEST_F(NcclBackend, AnAbortThatHangsIsAbandoned) {
  nccl.hang_in_abort(0);
  const std::size_t before = emulated::bytes_in_use();
  run_ranks(2, [&](int rank, auto store) {
    auto options = quick(rank, 2);
    options.timeout = options.abort_limit = 300ms;
    Communicator comm = connect(options, store);
    if (rank == 0) {
      const Floats x(comm, 100);
      const auto time = time_of([&] {
        expect_error(Errc::timeout, 1, "ncclCommAbort on rank 0 had not returned after 300 ms",
                     [&] { comm.all_reduce(x.all(), ReduceOp::sum, x.stream).wait(); });
      });
      EXPECT_LT(time, soon);
      nccl.release();
    }
    wait_for_all(*store, 2);
  });
  // The call releases its memory when it returns.
  for (const Deadline limit = Deadline::after(soon); emulated::bytes_in_use() != before && !limit.expired();)
    std::this_thread::yield();
  EXPECT_EQ(emulated::bytes_in_use(), before);
}

TEST_F(NcclBackend, DestructionWithOperationsInFlightEndsThem) {
  on_ranks(2, long_time, [&](Communicator& comm, Store& store) {
    auto x = std::make_unique<Floats>(comm, 100);
    const Work work = comm.rank() == 0 ? comm.all_reduce(x->all(), ReduceOp::sum, x->stream) : Work();
    if (comm.rank() == 1) {
      auto options = quick(1, 2);
      const Work own = comm.recv(x->all(), 0, x->stream);
      const auto time = time_of([&] { Communicator gone(std::move(comm)); });
      EXPECT_LT(time, soon);
      expect_error(Errc::peer_lost, 1, "destroyed its communicator", [&] { own.wait(); });
    } else {
      expect_error(Errc::peer_lost, 1, "rank 1 destroyed its communicator with operations in flight",
                   [&] { work.wait(); });
    }
    wait_for_all(store, 2);
    x->stream.synchronize();
  });
}

TEST_F(NcclBackend, AFinalizeThatNeverEndsIsAborted) {
  nccl.never_finalize(0);
  run_ranks(2, [&](int rank, auto store) {
    auto comm = std::make_unique<Communicator>(connect(quick(rank, 2), store));
    const Floats x(*comm, 100);
    comm->all_reduce(x.all(), ReduceOp::sum, x.stream).wait();
    wait_for_all(*store, 2);
    EXPECT_LT(time_of([&] { comm.reset(); }), soon);
  });
  EXPECT_EQ(nccl.aborts(), 1);
}

}  // namespace
}  // namespace rz
