// Device memory over a host backend that also accepts device memory, as a CUDA-aware MPI does; here one that
// claims so over our own transports. Otherwise: tests/gpu/collectives_test.cpp, "host_staged".

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "comm/backends/backend_factory.h"
#include "comm/backends/host_staged_backend.h"
#include "comm/core/error.h"
#include "comm/device/graph.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/gpu/device_calls.h"
#include "tests/support/helper_threads.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::run_ranks;

CommOptions on_host() {
  CommOptions o;
  o.backend = "native";
  o.timeout = std::chrono::seconds(30);
  return o;
}

/// Moves host memory and, at once, device memory, whose contents must be complete at the call.
class Aware final : public Backend {
 public:
  Aware(int rank, int size, std::shared_ptr<Store> store, Device device)
      : store_(std::move(store)),
        device_(device),
        rank_(rank),
        stream_(Stream::create(device)),
        inner_(make_backend(rank, size, store_, on_host())) {}

  Work submit(std::span<const CollectiveCall> group) override {
    std::vector<CollectiveCall> on_host(group.begin(), group.end());
    std::vector<std::vector<std::byte>> kept;
    std::vector<std::pair<void*, std::size_t>> back;  // to the device, from kept
    const auto bring = [&](auto& buffer) {
      if (buffer.device.kind == Device::host) return false;
      kept.emplace_back(buffer.bytes());
      memcpy_async(kept.back().data(), buffer.data, buffer.bytes(), stream_);
      buffer.data = kept.back().data();
      buffer.device = {};
      return true;
    };
    for (CollectiveCall& op : on_host) {
      const CollectiveCall given = op;
      if (bring(op.in)) note(op.kind);
      if (!bring(op.out)) continue;
      note(op.kind);
      back.emplace_back(given.out.data, kept.size() - 1);
    }
    const Work work = inner_->submit(on_host);
    if (back.empty()) return work;
    work.wait();
    for (const auto& [to, from] : back) memcpy_async(to, kept[from].data(), kept[from].size(), stream_);
    stream_.synchronize();
    return Work();
  }
  bool moves_device_memory() const override { return true; }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  std::unique_ptr<Backend> split(std::span<const int> members, int number) override {
    const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
    return std::make_unique<Aware>(
        static_cast<int>(place), static_cast<int>(members.size()),
        prefix_store(store_, concat("split ", number, " ", splits_[number]++, " of ", members[0], "/")),
        device_);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  std::string describe() const override { return "an aware one"; }

  /// The operations that used device memory.
  std::set<Collective> direct() const {
    const std::lock_guard lock(mutex_);
    return direct_;
  }

 private:
  void note(Collective kind) {
    const std::lock_guard lock(mutex_);
    direct_.insert(kind);
  }

  const std::shared_ptr<Store> store_;
  const Device device_;
  const int rank_;
  const Stream stream_;
  const std::unique_ptr<Backend> inner_;
  std::map<int, int> splits_;  // of each number: host and staged buffers each have a group of their own
  mutable std::mutex mutex_;
  std::set<Collective> direct_;
};

Communicator over(std::shared_ptr<Backend> host, int rank, int size, Device device, bool direct,
                  std::chrono::milliseconds timeout) {
  CommOptions options = on_host();
  options.timeout = timeout;
  options.device = device;
  auto staged = host_staged_backend(
      host, {.device = device, .rank = rank, .timeout = options.timeout, .pass_device_memory = direct});
  return Communicator::from_backend(rank, size, device_and_host_backend(std::move(host), std::move(staged)),
                                    options);
}

class HostStaged : public testing::Test {
 protected:
  /// f(communicator, its host's backend, a stream) on every rank.
  template <class F>
  void on_ranks(int size, bool direct, const F& f) {
    run_ranks(size, [&](int rank, std::shared_ptr<Store> store) {
      if (helpers) helpers->begin();
      const Device device{Device::cuda, rank};
      const auto host = std::make_shared<Aware>(rank, size, store, device);
      Communicator comm = over(host, rank, size, device, direct, timeout);
      const Stream s = Stream::create(device);
      f(comm, *host, s);
      s.synchronize();
      comm.barrier().wait();
    });
  }

  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  test::HelperThreads* helpers = nullptr;
  emulated::Schedule schedule;
};

TEST_F(HostStaged, MovementIsDirectAndReductionsGoThroughTheHost) {
  for (const int size : {1, 2, 3})
    on_ranks(size, true, [&](Communicator& comm, Aware& host, const Stream& s) {
      for (const std::size_t n : {0, 1, 7, 3000}) test::expect_same(comm, DType::f32, ReduceOp::sum, n, s);
      using enum Collective;
      std::set<Collective> moving{all_gather, broadcast, gather, scatter, all_to_all, all_to_all_v};
      if (size > 1) moving.insert({send, recv});
      EXPECT_EQ(host.direct(), moving);
      EXPECT_EQ(comm.describe(), concat(name(s.device()),
                                        ", what is combined staged through pinned memory over an aware one, "
                                        "host memory an aware one"));
    });
}

TEST_F(HostStaged, WaitsWithoutTimeoutOnThreadsWithSignalsBlocked) {
  test::HelperThreads threads(2);
  helpers = &threads;
  timeout = std::chrono::milliseconds::max();
  on_ranks(2, false, [&](Communicator& comm, Aware&, const Stream& s) {
    test::expect_same(comm, DType::f32, ReduceOp::sum, 100, s);
    threads.expect_no_signals(2);
  });
}

TEST_F(HostStaged, DirectTransferNeedsAllRanks) {
  on_ranks(2, false, [&](Communicator& comm, Aware& host, const Stream& s) {
    test::expect_same(comm, DType::f32, ReduceOp::sum, 100, s);
    EXPECT_EQ(host.direct(), std::set<Collective>());
  });
}

TEST_F(HostStaged, DirectTransferWaitsForTheStream) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const emulated::Schedule another(seed);
    on_ranks(2, true, [&](Communicator& comm, Aware&, const Stream& s) {
      const Stream later = Stream::create(s.device());
      const auto memory = comm.allocate_array<float>(512);
      const Buffer all(memory.get(), 512, s.device());
      std::vector<float> values(512, 3), result(512);
      if (comm.rank() == 0) memcpy_async(memory.get(), values.data(), 512 * sizeof(float), s);
      comm.broadcast(all, 0, s).wait_on(later);
      comm.all_reduce(all, ReduceOp::sum, later).wait_on(s);
      memcpy_async(result.data(), memory.get(), 512 * sizeof(float), s);
      EXPECT_EQ(result, std::vector<float>(512, 6));
      later.synchronize();
    });
  }
}

TEST_F(HostStaged, RanksOfASubgroupAreRenumbered) {
  for (const bool direct : {false, true})
    on_ranks(3, direct, [&](Communicator& comm, Aware&, const Stream& s) {
      auto part = comm.split(0, -comm.rank());  // the other way round
      const auto memory = part->allocate_array<float>(64);
      const std::vector<float> values(64, static_cast<float>(comm.rank() + 1));
      std::vector<float> result(64);
      memcpy_async(memory.get(), values.data(), 64 * sizeof(float), s);
      part->broadcast(Buffer(memory.get(), 64, s.device()), 0, s).wait_on(s);
      memcpy_async(result.data(), memory.get(), 64 * sizeof(float), s);
      EXPECT_EQ(result, std::vector<float>(64, 3)) << "rank " << comm.rank();
      part->barrier().wait();
    });
}

TEST_F(HostStaged, CaptureIsRefusedAndNamesTheAlternatives) {
  on_ranks(1, false, [&](Communicator& comm, Aware&, const Stream& s) {
    const auto memory = comm.allocate_array<float>(8);
    std::string message;
    try {
      capture(s, [&] { comm.all_reduce(Buffer(memory.get(), 8, s.device()), ReduceOp::sum, s).wait(); });
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::unsupported);
      message = e.what();
    }
    EXPECT_EQ(message,
              "rank 0: all_reduce of memory on cuda:0 goes through the host, which a CUDA graph cannot hold; "
              "capture it with the backend 'nccl' or 'peer_cuda'");
  });
}

}  // namespace
}  // namespace rz
