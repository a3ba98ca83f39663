// CUDA peers that are processes, by IPC handles: on a card only. No CUDA call is made before the fork.

#include <gtest/gtest.h>
#include <unistd.h>

#include <numeric>

#include "comm/communicator.h"
#include "comm/core/cuda/runtime.h"
#include "tests/gpu/on_device.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

bool may_have_a_card() { return emulated_device || access("/dev/nvidiactl", R_OK) == 0; }

/// f(communicator, stream) in a process a rank, which share the cards that there are.
template <class F>
void on_processes(int size, const F& f) {
  expect_processes(size, [&](int rank, std::shared_ptr<Store> store) {
    const int cards = cuda::device_count();
    if (cards == 0) return;
    CommOptions options;
    options.backend = "peer_cuda";
    options.device = {Device::cuda, rank % cards};
    options.timeout = std::chrono::seconds(30);
    Communicator comm = Communicator::connect(rank, size, store, options);
    const Stream s = Stream::create(options.device);
    f(comm, s);
    s.synchronize();
    comm.barrier().wait();
  });
}

TEST(PeerCudaProcesses, ExchangeDeviceMemory) {
  if (!may_have_a_card()) GTEST_SKIP() << "no card";
  for (const int size : {2, 3})
    on_processes(size, [&](Communicator& comm, const Stream& s) {
      for (const std::size_t n : {1000, 1'000'003}) {
        const auto x = comm.allocate_array<float>(n);
        const auto all = comm.allocate_array<float>(n * static_cast<std::size_t>(comm.size()));
        std::vector<float> values(n, static_cast<float>(comm.rank() + 1));
        copy_bytes(x.get(), values.data(), n * sizeof(float), s);
        const Buffer mine(x.get(), n, s.device());
        comm.all_reduce(mine, ReduceOp::sum, s).wait();
        copy_bytes(values.data(), x.get(), n * sizeof(float), s);
        s.synchronize();
        const int p = comm.size();
        EXPECT_EQ(values, std::vector<float>(n, static_cast<float>(p * (p + 1) / 2)));
        comm.all_gather(mine, Buffer(all.get(), n * static_cast<std::size_t>(p), s.device()), s).wait();
        comm.group()
            .send(mine, (comm.rank() + 1) % p, s)
            .recv(Buffer(all.get(), n, s.device()), (comm.rank() + p - 1) % p, s)
            .launch()
            .wait();
      }
    });
}

TEST(PeerCudaProcesses, ARankThatDiesIsNamed) {
  if (!may_have_a_card()) GTEST_SKIP() << "no card";
  const auto endings = run_processes(2, [](int rank, std::shared_ptr<Store> store) {
    if (cuda::device_count() == 0) return;
    CommOptions options;
    options.backend = "peer_cuda";
    options.device = {Device::cuda, rank % cuda::device_count()};
    options.timeout = std::chrono::seconds(20);
    Communicator comm = Communicator::connect(rank, 2, store, options);
    if (rank == 1) _exit(0);
    const auto x = comm.allocate_array<float>(100);
    try {
      comm.all_reduce(Buffer(x.get(), 100, options.device)).wait();
      ADD_FAILURE() << "it ended well";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
    }
  });
  EXPECT_EQ(endings[0].exit_code, 0) << endings[0].error;
}

}  // namespace
}  // namespace rz::test
