#include <numeric>

#include "comm/device/cuda_runtime.h"
#include "tests/gpu/on_device.h"

namespace rz::test {
namespace {

using Memory = OnDevice;

TEST_F(Memory, TensorsGoToTheDeviceAndBack) {
  std::vector<double> values(1000);
  std::iota(values.begin(), values.end(), -500);
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) {
    const Tensor x = to_device(values, {10, 100}, t, stream);
    EXPECT_EQ(x.device(), device);
    const auto back = from_device(x, stream);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool exact = t != DType::bf16 || std::abs(values[i]) <= 256;
      EXPECT_TRUE(!exact || back[i] == values[i]) << values[i];
    }
  }
}

TEST_F(Memory, PinnedMemoryIsCopiedInTheStreamsOrder) {
  const auto pinned = allocate_pinned(device, 4 * sizeof(float));
  auto* const from = reinterpret_cast<float*>(pinned.get());
  std::fill_n(from, 4, 3.0f);
  const Tensor x = empty_on(stream, {4});
  memcpy_async(x.raw(), from, x.bytes(), stream);
  const Event copied = stream.record();
  copied.synchronize();
  EXPECT_TRUE(copied.done());
  std::fill_n(from, 4, 4.0f);
  EXPECT_EQ(from_device(x, stream), std::vector<double>(4, 3));
}

TEST_F(Memory, ZerosAreZeros) {
  const Tensor x = Tensor::zeros({300}, DType::f32, allocator_on(device));
  EXPECT_EQ(from_device(x, stream), std::vector<double>(300, 0));
}

TEST_F(Memory, AStreamWaitsForAnother) {
  for (int seed = 0; seed < schedules(30); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    const Stream other = Stream::create(device, Stream::Priority::high);
    const Tensor x = empty_on(stream, {1 << 16}), y = empty_on(stream, {1 << 16});
    memset_async(x.raw(), 0, x.bytes(), stream);
    other.wait(stream.record());
    memcpy_async(y.raw(), x.raw(), x.bytes(), other);
    EXPECT_EQ(from_device(y, other), std::vector<double>(1 << 16, 0));
  }
}

TEST_F(Memory, ScratchIsTheStreamsOwnAndGrows) {
  void* const few = stream.workspace(100);
  const Stream copy = stream, other = Stream::create(device);
  EXPECT_EQ(copy.workspace(50), few);
  EXPECT_NE(other.workspace(50), few);
  void* const many = stream.workspace(1 << 20);
  EXPECT_NE(many, few);
  EXPECT_EQ(copy.workspace(100), many);
  // Memory handed out earlier stays valid, since a graph may contain it.
  memset_async(few, 0, 100, stream);
  memset_async(many, 0, 1 << 20, stream);
  stream.synchronize();
  EXPECT_THROW(Stream().workspace(1), Error);
}

TEST_F(Memory, AnAllocationBeyondCapacityStatesTheCapacity) {
  try {
    static_cast<void>(allocate_on(device, std::size_t{1} << 50));
    FAIL() << "a pebibyte was allocated";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("cannot allocate"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("cuda:0"), std::string::npos) << e.what();
  }
}

TEST_F(Memory, AnAbsentDeviceIsNamed) {
  try {
    static_cast<void>(Stream::create({Device::cuda, 99}));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("cuda:99 is not there"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz::test
