// The emulated device itself: its results, and the mistakes that it must find.

#include "tests/emulated_gpu/device_code.h"
// after CUDA's words
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <optional>
#include <vector>

#include "comm/device/launch.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using cuda::check;
using cuda::Grid;
using cuda::launch;
using cuda::runtime;
using emulated::Pace;
using emulated::Schedule;

constexpr Device device{Device::cuda, 0};

/// Device memory for a test.
struct Memory {
  explicit Memory(std::size_t floats) : count(floats) {
    check(runtime().malloc(reinterpret_cast<void**>(&data), floats * sizeof(float)), "cudaMalloc", device);
  }
  ~Memory() { runtime().free(data); }
  Memory(const Memory&) = delete;

  void copy_from(const std::vector<float>& values, const Stream& s) const {
    check(runtime().memcpy_async(data, values.data(), values.size() * sizeof(float), s.native()), "copy",
          device);
  }
  std::vector<float> read(const Stream& s) const {
    std::vector<float> values(count);
    s.synchronize();  // which a copy to pageable memory requires
    check(runtime().memcpy_async(values.data(), data, count * sizeof(float), s.native()), "copy", device);
    return values;
  }

  float* data = nullptr;
  std::size_t count;
};

std::vector<float> counting(std::size_t n) {
  std::vector<float> v(n);
  std::iota(v.begin(), v.end(), 1.0f);
  return v;
}

__global__ void add_one(float* x, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] += 1;
}

/// One block; sums by shuffles within warps and shared memory between them.
__global__ void sum_of_block(const float* x, float* out) {
  RZ_SHARED(float, parts, 32);
  float v = x[threadIdx.x];
  for (int bits = 16; bits; bits >>= 1) v += __shfl_xor_sync(0xffffffffu, v, bits);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += parts[w];
  *out = total;
}

__global__ void without_barrier(const float* x, float* out) {
  RZ_DYNAMIC_SHARED(float, all);
  all[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

__global__ void different_barriers(float*) {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncwarp(0xffff0000u), __shfl_sync(0xffffffffu, 1.0f, 0);
}

__global__ void beyond_shared() {
  RZ_SHARED(float, few, 4);
  few[threadIdx.x] = 1;
}

__global__ void votes(unsigned* out) { out[threadIdx.x] = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0); }

/// Waits until `flag` was set by another stream's kernel.
__global__ void wait_for_flag(const volatile float* flag, float* out) {
  while (*flag != 7) __nanosleep(20);
  *out = 8;
}
__global__ void set_to(float* x, float value) { *x = value; }

TEST(EmulatedGpu, RunsAKernelOverAllOfItsBlocks) {
  const Schedule schedule;
  const Stream s = Stream::create(device);
  const Memory x(1000);
  x.copy_from(counting(1000), s);
  launch("add_one", add_one, cuda::grid_for(1000, 128), s, x.data, 1000);
  const auto result = x.read(s);
  for (std::size_t i = 0; i < result.size(); ++i) EXPECT_EQ(result[i], static_cast<float>(i + 2));
}

TEST(EmulatedGpu, ShufflesBarriersAndSharedMemory) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Schedule schedule(seed);
    const Stream s = Stream::create(device);
    const Memory x(256), out(1);
    x.copy_from(counting(256), s);
    launch("sum_of_block", sum_of_block, Grid{{1}, {256}, 0}, s, x.data, out.data);
    EXPECT_EQ(out.read(s)[0], 256 * 257 / 2);
  }
}

TEST(EmulatedGpu, Votes) {
  const Schedule schedule;
  const Stream s = Stream::create(device);
  const Memory out(32);
  launch("votes", votes, Grid{{1}, {32}, 0}, s, reinterpret_cast<unsigned*>(out.data));
  unsigned expected = 0;
  for (unsigned i = 0; i < 32; i += 3) expected |= 1u << i;
  EXPECT_EQ(emulated::unpack<unsigned>(emulated::pack(out.read(s)[31])), expected);
}

TEST(EmulatedGpu, NewMemoryIsNotANumber) {
  const Schedule schedule;
  const Memory x(100);
  for (const float v : x.read(Stream::create(device))) EXPECT_TRUE(std::isnan(v));
}

TEST(EmulatedGpu, AMissingBarrierMakesAWrongResult) {
  const Schedule schedule(2);
  const Stream s = Stream::create(device);
  const Memory x(64), out(64);
  x.copy_from(counting(64), s);
  launch("without_barrier", without_barrier, Grid{{1}, {64}, 256}, s, x.data, out.data);
  std::vector<float> reversed = counting(64);
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_NE(out.read(s), reversed);
}

TEST(EmulatedGpu, DivergentBarriersAreNamed) {
  const Schedule schedule;
  const Stream s = Stream::create(device);
  const Memory x(1);
  const auto run = [&] {
    launch("different_barriers", different_barriers, Grid{{1}, {32}, 0}, s, x.data);
    s.synchronize();
  };
  EXPECT_NE(
      test::refusal(run).find("different_barriers, block (0, 0, 0): threads wait at different barriers"),
      std::string::npos);
}

TEST(EmulatedGpu, AWriteBeyondSharedMemoryIsNamed) {
  const Schedule schedule;
  const Stream s = Stream::create(device);
  const auto run = [&] {
    launch("beyond_shared", beyond_shared, Grid{{1}, {6}, 0}, s);
    s.synchronize();
  };
  EXPECT_NE(test::refusal(run).find("beyond_shared, block (0, 0, 0) wrote beyond its 16 bytes"),
            std::string::npos);
}

TEST(EmulatedGpuDeathTest, HostCodeMayNotReadDeviceMemory) {
  const Schedule schedule;
  const Memory x(10);
  EXPECT_DEATH(x.data[3] = 1, "host code touched byte 12 of 40 bytes on cuda:0");
}

TEST(EmulatedGpuDeathTest, AKernelThatLeavesItsMemoryIsNamed) {
  const auto run = [] {
    const Schedule schedule;
    const Stream s = Stream::create(device);
    const Memory x(64);
    launch("add_one", add_one, Grid{{2}, {64}, 0}, s, x.data, 128);
    s.synchronize();
  };
  EXPECT_DEATH(run(), "kernel add_one, block \\(1, 0, 0\\), thread");
}

TEST(EmulatedGpu, StreamsRunInAnyOrderWithoutAWaitAndInTheRightOneWithIt) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Schedule schedule(seed, Pace::lazy);
    const Stream a = Stream::create(device), b = Stream::create(device);
    const Memory x(8), y(8);
    x.copy_from(counting(8), a);
    y.copy_from(counting(8), a);
    a.synchronize();
    launch("add_one", add_one, Grid{{1}, {8}, 0}, a, x.data, 8);
    launch("add_one", add_one, Grid{{1}, {8}, 0}, a, y.data, 8);
    wrong += x.read(b)[0] != 2;
    b.wait(a.record());
    EXPECT_EQ(y.read(b)[0], 2);
    a.synchronize();
  }
  EXPECT_GT(wrong, 5);
  EXPECT_LT(wrong, 45);
}

TEST(EmulatedGpu, ACopyToPageableMemoryInABusyStreamFailsTheTest) {
  const Schedule schedule(1, Pace::lazy);
  const Stream s = Stream::create(device);
  const Memory x(100);
  x.copy_from(counting(100), s);
  std::vector<float> values(100);
  EXPECT_NONFATAL_FAILURE(runtime().memcpy_async(values.data(), x.data, 400, s.native()),
                          "pageable memory waits for its stream");
  EXPECT_EQ(values, counting(100));
}

TEST(EmulatedGpu, AKernelMayWaitForAnotherDevicesKernel) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Schedule schedule(seed);
    const Stream a = Stream::create(device), b = Stream::create({Device::cuda, 1});
    const Memory flag(1), out(1);
    flag.copy_from({0}, a);
    a.synchronize();
    launch("wait_for_flag", wait_for_flag, Grid{{1}, {1}, 0}, a, flag.data, out.data);
    launch("set_to", set_to, Grid{{1}, {1}, 0}, b, flag.data, 7.0f);
    EXPECT_EQ(out.read(a)[0], 8);
    b.synchronize();
  }
}

/// The device has this many hardware queues for streams created while this object lives.
class Queues {
 public:
  explicit Queues(const char* count) {
    if (const char* const now = std::getenv(name)) before_ = now;
    count ? setenv(name, count, 1) : unsetenv(name);
  }
  ~Queues() { before_ ? setenv(name, before_->c_str(), 1) : unsetenv(name); }
  Queues(const Queues&) = delete;

 private:
  static constexpr const char* name = "CUDA_DEVICE_MAX_CONNECTIONS";
  std::optional<std::string> before_;
};

/// A kernel in the first of so many streams waits for one in the last.
std::string first_waits_for_last(std::size_t count) {
  const Schedule schedule;
  emulated::set_patience(std::chrono::milliseconds(100));
  std::vector<Stream> streams;
  while (streams.size() < count) streams.push_back(Stream::create({Device::cuda, 3}));
  const Stream& first = streams.front();
  const Memory flag(1), out(1);
  flag.copy_from({0}, first);
  first.synchronize();
  launch("wait_for_flag", wait_for_flag, Grid{{1}, {1}, 0}, first, flag.data, out.data);
  launch("set_to", set_to, Grid{{1}, {1}, 0}, streams.back(), flag.data, 7.0f);
  const std::string failure = test::refusal([&] { streams.back().synchronize(); });
  if (failure == "") first.synchronize();
  emulated::set_patience(std::chrono::seconds(20));
  return failure;
}

TEST(EmulatedGpu, StreamsBeyondItsQueuesWaitForEachOther) {
  const auto hangs = [](const std::string& failure) {
    return failure.find("1 streams wait behind others that share their hardware queue") != std::string::npos;
  };
  {
    const Queues as_cuda_does(nullptr);
    EXPECT_EQ(first_waits_for_last(8), "");
    EXPECT_PRED1(hangs, first_waits_for_last(9));
  }
  const Queues setting("32");
  EXPECT_EQ(first_waits_for_last(32), "");
  EXPECT_PRED1(hangs, first_waits_for_last(33));
}

TEST(EmulatedGpu, AGraphIsRecordedOnceAndReplayed) {
  const Schedule schedule;
  const Stream s = Stream::create(device), side = Stream::create(device);
  const Memory x(8);
  x.copy_from(std::vector<float>(8, 0), s);
  void *graph = nullptr, *executable = nullptr;
  ASSERT_EQ(runtime().begin_capture(s.native()), cuda::success);
  launch("add_one", add_one, Grid{{1}, {8}, 0}, s, x.data, 8);
  side.wait(s.record());
  launch("add_one", add_one, Grid{{1}, {8}, 0}, side, x.data, 8);
  s.wait(side.record());
  launch("add_one", add_one, Grid{{1}, {8}, 0}, s, x.data, 8);
  ASSERT_EQ(runtime().end_capture(s.native(), &graph), cuda::success);
  EXPECT_EQ(x.read(s)[0], 0) << "capturing must not run";
  ASSERT_EQ(runtime().instantiate(&executable, graph), cuda::success);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(runtime().launch_graph(executable, s.native()), cuda::success);
  EXPECT_EQ(x.read(s)[0], 9);
  runtime().destroy_executable(executable);
  runtime().destroy_graph(graph);
}

TEST(EmulatedGpu, ACaptureMayNotWaitNorAllocateNorEndWithAStreamThatIsAway) {
  const Schedule schedule;
  const Stream s = Stream::create(device), side = Stream::create(device);
  const Memory x(8);
  void *graph = nullptr, *memory = nullptr;
  runtime().begin_capture(s.native());
  EXPECT_NE(runtime().malloc(&memory, 4), cuda::success);
  EXPECT_NE(runtime().stream_synchronize(s.native()), cuda::success);
  side.wait(s.record());
  launch("add_one", add_one, Grid{{1}, {8}, 0}, side, x.data, 8);
  EXPECT_NE(runtime().end_capture(s.native(), &graph), cuda::success);
}

TEST(EmulatedGpu, ErrorsNameTheCallTheDeviceAndWhatToDo) {
  const Schedule schedule;
  emulated::fail_call("malloc", cuda::out_of_memory);
  EXPECT_EQ(
      test::refusal([] { Memory(4); }),
      "cudaMalloc on cuda:0: out of memory (cudaErrorMemoryAllocation); use smaller batches, a higher ZeRO "
      "stage or recomputation");
  EXPECT_EQ(test::refusal([] {
              static_cast<void>(Stream::create({Device::cuda, 9}));
            }),
            "cuda:9 is not there: this machine has 4 devices, from cuda:0");
}

}  // namespace
}  // namespace rz
