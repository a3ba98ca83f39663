// The communicator's kernels on one device have the bits of the corresponding host code.

#include "comm/backends/peer_cuda/kernels/peer_kernels.h"

#include <cstring>
#include <random>

#include "comm/core/math.h"
#include "comm/reduce/reduce.h"
#include "tests/gpu/on_device.h"

namespace rz::test {
namespace {

using PeerKernelsTest = OnDevice;

/// Any bits at all: NaNs, infinities and subnormals among them.
std::vector<std::byte> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

/// Bytes of the device that begin `misaligned` bytes after an aligned address.
struct OnCard {
  OnCard(const std::vector<std::byte>& bytes, std::size_t misaligned, const Stream& s)
      : memory(allocate_on(s.device(), bytes.size() + misaligned)), data(memory.get() + misaligned) {
    memcpy_async(data, bytes.data(), bytes.size(), s);
  }
  std::shared_ptr<std::byte> memory;
  std::byte* data;
};

template <class T>
bool nan_at(const std::byte* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  if constexpr (std::is_same_v<T, double>)
    return x != x;
  else
    return to_f32(x) != to_f32(x);
}

bool is_nan(DType t, const std::byte* at) {
  switch (t) {
    case DType::f32:
      return nan_at<float>(at);
    case DType::f64:
      return nan_at<double>(at);
    case DType::f16:
      return nan_at<f16>(at);
    case DType::bf16:
      return nan_at<bf16>(at);
    case DType::f8e4m3:
      return nan_at<f8e4m3>(at);
    case DType::f8e5m2:
      return nan_at<f8e5m2>(at);
    default:
      return false;
  }
}

/// The same bits, except for a NaN's sign and payload, which are the processor's own unless `defined`.
void expect_same(const std::vector<std::byte>& device, const std::vector<std::byte>& host, DType t,
                 const std::string& what, bool defined = false) {
  const std::size_t size = size_of(t);
  for (std::size_t at = 0; at < host.size(); at += size) {
    if (std::memcmp(device.data() + at, host.data() + at, size) == 0) continue;
    if (!defined && is_nan(t, device.data() + at) && is_nan(t, host.data() + at)) continue;
    FAIL() << what << ": element " << at / size << " differs";
  }
}

TEST_F(PeerKernelsTest, ReduceHasTheBitsOfTheHost) {
  for (int t = 0; t < dtype_count; ++t)
    for (const auto kind : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max})
      for (const std::size_t sources : {1, 2, 3, 7}) {
        const auto dtype = static_cast<DType>(t);
        const std::size_t count = 517, bytes = count * size_of(dtype);
        const std::size_t misaligned = sources == 3 ? size_of(dtype) : 0;
        std::vector<std::vector<std::byte>> inputs;
        std::vector<OnCard> on_card;
        std::vector<const void*> from_host, from_card;
        for (std::uint32_t s = 0; s < sources; ++s) {
          inputs.push_back(random_bytes(bytes, s + 1));
          on_card.emplace_back(inputs.back(), misaligned, stream);
        }
        for (std::size_t s = 0; s < sources; ++s)
          from_host.push_back(inputs[s].data()), from_card.push_back(on_card[s].data);
        std::vector<std::byte> expected(bytes), result(bytes);
        reduce(expected.data(), from_host, count, dtype, kind, 3);
        std::byte* const into = on_card[sources / 2].data;  // one of the sources
        peer_kernels().reduce(into, from_card, count, dtype, kind, 3, stream);
        memcpy_async(result.data(), into, bytes, stream);
        stream.synchronize();
        const bool ordered = kind == ReduceOp::min || kind == ReduceOp::max;
        expect_same(result, expected, dtype, concat(name(dtype), " ", name(ReduceOp(kind)), " of ", sources),
                    ordered && sources > 1);
      }
}

TEST_F(PeerKernelsTest, ScaleHasTheBitsOfTheHost) {
  for (int t = 0; t < dtype_count; ++t)
    for (const double factor : {0.3, -2.0, 1e30}) {
      const auto dtype = static_cast<DType>(t);
      const std::size_t count = 300;
      const auto input = random_bytes(count * size_of(dtype), 5);
      std::vector<std::byte> expected(input.size()), result(input.size());
      scale(expected.data(), input.data(), count, dtype, factor);
      const OnCard on_card(input, 0, stream);
      peer_kernels().scale(on_card.data, on_card.data, count, dtype, factor, stream);
      memcpy_async(result.data(), on_card.data, result.size(), stream);
      stream.synchronize();
      expect_same(result, expected, dtype, concat(name(dtype), " by ", factor));
    }
}

TEST_F(PeerKernelsTest, NothingToReduceIsDoneAtOnce) {
  const void* const source = nullptr;
  peer_kernels().reduce(nullptr, {&source, 1}, 0, DType::f32, ReduceOp::sum, 1, stream);
  EXPECT_THROW(peer_kernels().reduce(nullptr, {}, 0, DType::f32, ReduceOp::sum, 1, stream), Error);
  const std::vector<const void*> many(PeerKernels::max_sources + 1);
  EXPECT_THROW(peer_kernels().reduce(nullptr, many, 1, DType::f32, ReduceOp::sum, 1, stream), Error);
}

}  // namespace
}  // namespace rz::test
