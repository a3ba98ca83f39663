#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/dropout.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "tensor/kernels/check.h"
#include "tensor/kernels/philox.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

constexpr std::size_t batch = 32;  // counters computed side by side, so that the compiler uses vectors

/// Philox4x32-10 of counters first … first + batch - 1: word w of counter j in words[w][j].
void philox_batch(std::uint32_t words[4][batch], std::uint64_t first, std::uint64_t seed) {
  for (std::size_t j = 0; j < batch; ++j) {
    words[0][j] = static_cast<std::uint32_t>(first + j);
    words[1][j] = static_cast<std::uint32_t>((first + j) >> 32);
    words[2][j] = words[3][j] = 0;
  }
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < Philox::rounds; ++round) {
    for (std::size_t j = 0; j < batch; ++j)
      Philox::round(words[0][j], words[1][j], words[2][j], words[3][j], key0, key1);
    key0 += Philox::weyl0, key1 += Philox::weyl1;
  }
}

/// Element `index` of the stream of decisions takes word index % 4 of counter index / 4.
void dropout_range(float* out, const float* in, std::size_t n, std::uint64_t index, std::uint32_t threshold,
                   float factor, std::uint64_t seed) {
  std::uint32_t words[4][batch];
  for (std::size_t i = 0; i < n;) {
    const std::uint64_t counter = index / 4;
    philox_batch(words, counter, seed);
    const std::uint64_t skip = index % 4;
    const std::size_t count = std::min<std::size_t>(n - i, 4 * batch - skip);
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t at = j + skip;
      out[i + j] = words[at % 4][at / 4] < threshold ? 0 : in[i + j] * factor;
    }
    i += count, index += count;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(dropout_range);

namespace ops {

void dropout(const Tensor& out, const Tensor& in, float p, std::uint64_t seed, std::uint64_t offset,
             const Stream& stream) {
  check("dropout", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (!(p >= 0 && p < 1)) fail(Errc::invalid_argument, "dropout: p = ", p, " must lie in [0, 1)");
  const auto threshold = static_cast<std::uint32_t>(std::ldexp(static_cast<double>(p), 32));
  const float factor = 1 / (1 - p);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(in.count(), 1024, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(dropout_range)
    (o + begin, x + begin, end - begin, offset + begin, threshold, factor, seed);
  });
}

}  // namespace ops
}  // namespace rz
#endif
