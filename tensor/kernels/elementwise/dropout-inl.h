// Dropout of a row. Compiled once per target: include it after <hwy/highway.h>, outside any namespace.
#if defined(RZ_TENSOR_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_DROPOUT_INL_H_
#undef RZ_TENSOR_DROPOUT_INL_H_
#else
#define RZ_TENSOR_DROPOUT_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tensor/kernels/elementwise/dropout_params.h"
#include "tensor/kernels/elementwise/philox.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// Counters computed per batch, so that the compiler vectorizes.
constexpr std::size_t decision_batch = 32;

/// Philox4x32-10 of counters first … first + decision_batch - 1; word w of counter j is words[w][j].
inline void philox_batch(std::uint32_t words[4][decision_batch], std::uint64_t first, std::uint64_t seed) {
  for (std::size_t j = 0; j < decision_batch; ++j) {
    words[0][j] = static_cast<std::uint32_t>(first + j);
    words[1][j] = static_cast<std::uint32_t>((first + j) >> 32);
    words[2][j] = words[3][j] = 0;
  }
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < Philox::rounds; ++round) {
    for (std::size_t j = 0; j < decision_batch; ++j)
      Philox::round(words[0][j], words[1][j], words[2][j], words[3][j], key0, key1);
    key0 += Philox::weyl0, key1 += Philox::weyl1;
  }
}

/// Applies dropout to n elements; out may be in. Element i uses decision d = index + i, which is word d % 4
/// of counter d / 4.
template <class T>
inline void drop(T* out, const T* in, std::size_t n, std::uint64_t index, const kernels::DropoutParams& d) {
  std::uint32_t words[4][decision_batch];
  for (std::size_t i = 0; i < n;) {
    const std::uint64_t counter = index / 4;
    philox_batch(words, counter, d.seed);
    const std::uint64_t skip = index % 4;
    const std::size_t count = std::min<std::size_t>(n - i, 4 * decision_batch - skip);
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t at = j + skip;
      out[i + j] = from_f32<T>(words[at % 4][at / 4] < d.threshold ? 0 : to_f32(in[i + j]) * d.factor);
    }
    i += count, index += count;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif
