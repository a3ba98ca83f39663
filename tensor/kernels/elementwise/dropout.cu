// The same decisions as dropout-inl.h, bit for bit: element i uses word i % 4 of counter i / 4.

#include "comm/device/launch.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/elementwise/dropout_params.h"
#include "tensor/kernels/elementwise/philox.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

__device__ inline void philox_words(std::uint32_t* words, std::uint64_t counter, std::uint64_t seed) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = 0, c3 = 0;
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < Philox::rounds; ++round) {
    Philox::round(c0, c1, c2, c3, key0, key1);
    key0 += Philox::weyl0, key1 += Philox::weyl1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

/// words[0 … k-1] = words of decisions index … index + k - 1.
template <int k>
__device__ inline void decision_words(std::uint32_t (&words)[k + 4], std::uint64_t index,
                                      std::uint64_t seed) {
  const unsigned skip = static_cast<unsigned>(index % 4);
#pragma unroll
  for (int w = 0; w < k + 4; ++w) words[w] = 0;
#pragma unroll
  for (int w = 0; w < k; w += 4) philox_words(words + w, index / 4 + w / 4, seed);
  if (k > 1 && skip) philox_words(words + (k + 3) / 4 * 4, index / 4 + (k + 3) / 4, seed);
    // Selected without indexing, so that the words stay in registers.
#pragma unroll
  for (int w = 0; w + 1 < k + 4; ++w) words[w] = skip & 1 ? words[w + 1] : words[w];
#pragma unroll
  for (int w = 0; w + 2 < k + 4; ++w) words[w] = skip & 2 ? words[w + 2] : words[w];
}

template <class T>
__global__ void drop(T* out, const T* in, Split<pack_width<T>> split, kernels::DropoutParams d) {
  d.read_seed();
  each_pack(split, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x,
            [&](auto width, std::size_t i) {
              constexpr int k = decltype(width)::value;
              float x[k];
              std::uint32_t words[k + 4];
              load(x, in + i);
              if (d.threshold > 0 && d.run == 0) decision_words<k>(words, d.decision(i), d.seed);
              if (d.threshold > 0 && d.run > 0) {  // a pack may be in two runs
                for (int j = 0; j < k; ++j) {
                  std::uint32_t one[5];
                  decision_words<1>(one, d.decision(i + static_cast<std::size_t>(j)), d.seed);
                  words[j] = one[0];
                }
              }
#pragma unroll
              for (int j = 0; j < k; ++j)
                x[j] = d.threshold > 0 && words[j] < d.threshold ? 0 : x[j] * d.factor;
              store(out + i, x);
            });
}

}  // namespace

void dropout(const Tensor& out, const Tensor& in, const DropoutMask& mask, const Stream& stream) {
  const kernels::DropoutParams d = kernels::dropout_params("dropout", mask);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* const to = out.data<T>();
    const T* const from = in.data<T>();
    const auto split = Split<pack_width<T>>(out.count(), to).with(from);
    cuda::launch("dropout", drop<T>, cuda::grid_for(split.threads()), stream, to, from, split, d);
  });
}

}  // namespace rz::ops::device
