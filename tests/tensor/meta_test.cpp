// Runs: ci

/// The meta device: shapes without data.
#include "comm/device/meta.h"

#include <gtest/gtest.h>

#include "autograd_lite/ops.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "tensor/ops.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

const Stream stream = Stream::create(meta_device);

Tensor meta(const Shape& shape, DType dtype = DType::f32) {
  return Tensor::zeros(shape, dtype, allocator_on(meta_device));
}

TEST(Meta, IsADeviceOfItsOwn) {
  EXPECT_EQ(stream.device(), meta_device);
  EXPECT_EQ(meta({2}).device(), meta_device);
  EXPECT_NE(meta_device, Device{});
  EXPECT_EQ(name(meta_device), "meta");
  EXPECT_EQ(name(Device{}), "host");
}

TEST(Meta, ReadsZeros) {
  for (const std::size_t count : {1u, 100u, 5000u})
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(meta({count}).data<float>()[i], 0);
}

TEST(Meta, AllocatesMoreThanThereIs) {
  const Tensor t = meta({std::size_t{1} << 43});
  EXPECT_EQ(t.bytes(), std::size_t{1} << 45);
  EXPECT_EQ(t.data<float>()[t.count() - 1], 0);
}

TEST(Meta, OperatorsWriteNothing) {
  const Tensor out = meta({2, 3}), in = meta({2, 3});
  ops::fill(out, 1, stream);
  ops::add(out, in, in, stream);
  memset_async(out.raw(), 1, out.bytes(), stream);
  const float one = 1;
  memcpy_async(out.raw(), &one, sizeof one, stream);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(out.data<float>()[i], 0);
}

TEST(Meta, OperatorsCheckShapesAndDevices) {
  EXPECT_EQ(test::error_of([] { ops::gelu(meta({2}), meta({3}), stream); }).code(), Errc::invalid_argument);
  EXPECT_EQ(test::error_of([] { ops::fill(Tensor::zeros({2}), 0, stream); }).code(), Errc::invalid_argument);
  EXPECT_EQ(test::error_of([] { ops::gelu(meta({2}), Tensor::zeros({2}), stream); }).code(),
            Errc::invalid_argument);
}

/// The table of an embedding has more rows than memory; tokens are not read.
TEST(Meta, PassesNeedNoMemory) {
  Tape tape(stream, BufferPool(allocator_on(meta_device)));
  const Var table = tape.variable(meta({std::size_t{1} << 30, 1024}));
  const Var x = nn::embedding(tape, meta({4, 8}, DType::i32), table);
  tape.backward(nn::cross_entropy(tape, x, meta({4, 8}, DType::i32)).sum);
  EXPECT_EQ(tape.grad(table).bytes(), std::size_t{1} << 42);
}

}  // namespace
}  // namespace rz
