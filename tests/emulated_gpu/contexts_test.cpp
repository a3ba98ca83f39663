// Runs: ci
// Not under sanitizers: TrainingTouchesItsOwnDeviceAlone

// A rank makes a context on its own device alone: one on another device would use some 500 MiB of that card's
// memory, for each rank of the machine. Each test is a process, which begins without a context.

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/emulated_gpu/nccl.h"
#include "tests/gpu/on_card.h"
#include "tests/lab/training.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

constexpr Device device{Device::cuda, 2};
const std::set<int> only_that{2};

int current_device() {
  int current = -1;
  EXPECT_EQ(cuda::runtime().get_device(&current), cuda::success);
  return current;
}

template <class F>
void in_a_process(const F& f) {
  expect_processes(1, [&](int, auto) {
    emulated::reset_contexts();
    f();
  });
}

TEST(Contexts, AGuardLeavesADeviceWithoutOneAlone) {
  in_a_process([] {
    { const cuda::DeviceGuard guard(device); }
    EXPECT_EQ(emulated::contexts(), only_that);
    EXPECT_EQ(current_device(), 2);
  });
}

TEST(Contexts, AGuardMakesADeviceWithOneCurrentAgain) {
  in_a_process([] {
    ASSERT_EQ(cuda::runtime().set_device(1), cuda::success);
    { const cuda::DeviceGuard guard(device); }
    EXPECT_EQ(current_device(), 1);
    {
      const cuda::DeviceGuard guard({Device::cuda, 3}, std::nothrow);
      EXPECT_EQ(current_device(), 3);
    }
    EXPECT_EQ(current_device(), 1);
    EXPECT_EQ(emulated::contexts(), (std::set{1, 2, 3}));
  });
}

/// f() in a thread that never chose a device. Its first call leaves the device of its guard current, so each
/// call has its own thread.
template <class F>
void in_a_thread(const F& f) {
  std::thread(f).join();
  EXPECT_EQ(emulated::contexts(), only_that);
}

TEST(Contexts, AThreadThatNeverChoseADeviceMakesNone) {
  in_a_process([] {
    std::optional<Stream> stream = Stream::create(device);
    std::shared_ptr<std::byte> memory, pinned;
    in_a_thread([&] { memory = allocate_on(device, 64); });
    in_a_thread([&] { pinned = allocate_pinned(device, 64); });
    std::optional<Event> event;
    in_a_thread([&] { event = stream->record(); });
    in_a_thread([&] { static_cast<void>(event->done()); });
    in_a_thread([&] { event->synchronize(); });
    in_a_thread([&] { event.reset(); });
    std::optional<Graph> graph;
    in_a_thread([&] { graph = capture(*stream, [] {}); });
    in_a_thread([&] { graph->launch(*stream); });
    in_a_thread([&] { stream->synchronize(); });
    in_a_thread([&] { graph.reset(); });
    in_a_thread([&] { const GraphCapture left(*stream); });
    in_a_thread([&] { memory.reset(); });
    in_a_thread([&] { pinned.reset(); });
    in_a_thread([&] { stream.reset(); });
    EXPECT_EQ(emulated::bytes_in_use(), 0u);
  });
}

/// All that a rank does with its communicator, whose own threads never chose a device.
void use(Communicator& comm) {
  const Stream s = Stream::create(comm.options().device);
  constexpr std::size_t n = 3000;
  std::vector<float> values(n, 1);
  const auto memory = comm.allocate_array<float>(n);
  const auto window = comm.allocate_symmetric(n * sizeof(float));
  for (void* at : {static_cast<void*>(memory.get()), static_cast<void*>(window.get())}) {
    memcpy_async(at, values.data(), n * sizeof(float), s);
    comm.all_reduce(Buffer(static_cast<float*>(at), n, s.device()), ReduceOp::sum, s).wait();
    comm.broadcast(Buffer(static_cast<float*>(at), n, s.device()), 0, s).wait_on(s);
  }
  memcpy_async(values.data(), memory.get(), n * sizeof(float), s);
  EXPECT_EQ(values, std::vector<float>(n, static_cast<float>(comm.size())));
  comm.barrier().wait();
}

class RanksOfAMachine : public testing::TestWithParam<const char*> {};

TEST_P(RanksOfAMachine, TouchTheirOwnDevicesAlone) {
  expect_processes(3, [&](int rank, std::shared_ptr<Store> store) {
    emulated::reset_contexts();
    CommOptions options;
    options.backend = GetParam();
    options.device = {Device::cuda, rank};
    options.timeout = std::chrono::seconds(30);
    {
      Communicator comm = Communicator::connect(rank, 3, store, options);
      use(comm);
    }
    EXPECT_EQ(emulated::contexts(), std::set{rank});
  });
}
INSTANTIATE_TEST_SUITE_P(Contexts, RanksOfAMachine, testing::Values("peer_cuda", "native"),
                         [](const auto& info) { return std::string(info.param); });

/// A peer's memory is closed on the device where it was opened, whatever device the caller made current.
TEST(Contexts, ACommunicatorMayEndWhileAnotherDeviceIsCurrent) {
  expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options;
    options.backend = "peer_cuda";
    options.device = {Device::cuda, rank};
    options.timeout = std::chrono::seconds(30);
    {
      Communicator comm = Communicator::connect(rank, 2, store, options);
      use(comm);
      ASSERT_EQ(cuda::runtime().set_device(3), cuda::success);
    }
    EXPECT_EQ(current_device(), 3);
    EXPECT_EQ(emulated::bytes_in_use(), 0u);
  });
}

TEST(Contexts, ARankOfNcclTouchesItsOwnDeviceAlone) {
  in_a_process([] {
    const emulated::Nccl nccl;
    CommOptions options;
    options.backend = "nccl";
    options.device = device;
    {
      Communicator comm = Communicator::connect(0, 1, memory_store(), options);
      use(comm);
    }
    EXPECT_EQ(emulated::contexts(), only_that);
  });
}

TEST(Contexts, TrainingTouchesItsOwnDeviceAlone) {
  in_a_process([] {
    lab::train({.model = lab::gpt(), .strategy = StrategyKind::zero3, .updates = 1, .comm = [](int) {
                  return on_a_card(device.index);
                }});
    EXPECT_EQ(emulated::contexts(), only_that);
  });
}

}  // namespace
}  // namespace rz::test
