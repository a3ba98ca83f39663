// One thread per element of the output, in words of up to 16 bytes where addresses and strides permit it.
// Transpositions go through tiles in shared memory, so that reads and writes are of consecutive elements.

#include "comm/device/launch.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz::ops::device {

namespace {

constexpr std::size_t max_blocks = 65536;
constexpr unsigned side = 32, tile_rows = 8;

struct Store {
  template <class T>
  __device__ void operator()(T& to, T from) const {
    to = from;
  }
};
struct Add {
  template <class T>
  __device__ void operator()(T& to, T from) const {
    to = from_f32<T>(to_f32(to) + to_f32(from));
  }
};

template <class T, class F>
__global__ void copy_elements(F f, T* out, const T* in, IndexMap to, IndexMap from, std::size_t count) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    f(out[to.offset(i)], in[from.offset(i)]);
}

template <class T, class F>
__global__ void __launch_bounds__(side* tile_rows)
    transpose_tiles(F f, T* out, const T* in, Transposition t, std::size_t tiles) {
  RZ_SHARED(T, tile, side * (side + 1));
  const std::size_t down = (t.rows + side - 1) / side, across = (t.columns + side - 1) / side;
  for (std::size_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    const std::size_t matrix = i / (down * across), within = i % (down * across);
    const std::size_t row = within / across * side, column = within % across * side;
    const T* const from = in + t.in.offset(matrix);
    T* const to = out + t.out.offset(matrix);
    for (unsigned y = threadIdx.y; y < side; y += tile_rows)
      if (row + y < t.rows && column + threadIdx.x < t.columns)
        tile[y * (side + 1) + threadIdx.x] = from[(row + y) * t.in_stride + column + threadIdx.x];
    __syncthreads();
    for (unsigned y = threadIdx.y; y < side; y += tile_rows)
      if (row + threadIdx.x < t.rows && column + y < t.columns)
        f(to[(column + y) * t.out_stride + row + threadIdx.x], tile[threadIdx.x * (side + 1) + y]);
    __syncthreads();
  }
}

template <class T, class F>
void launch_copy(const char* op, const F& f, const Tensor& out, const Tensor& in, const StridedCopy& c,
                 const Stream& stream) {
  T* const to = reinterpret_cast<T*>(out.raw()) + c.out_at;
  const T* const from = reinterpret_cast<const T*>(in.raw()) + c.in_at;
  if (const auto t = transposition(c); t && t->rows >= tile_rows && t->columns >= tile_rows) {
    const std::size_t tiles = t->out.count() * ceil_div(t->rows, side) * ceil_div(t->columns, side);
    const cuda::Grid grid{{static_cast<unsigned>(tiles < max_blocks ? tiles : max_blocks)},
                          {side, tile_rows}};
    return cuda::launch(op, transpose_tiles<T, F>, grid, stream, f, to, from, *t, tiles);
  }
  const std::size_t count = c.out.count();
  cuda::launch(op, copy_elements<T, F>, cuda::grid_for(count, 256, max_blocks), stream, f, to, from, c.out,
               c.in, count);
}

struct alignas(16) Word16 {
  std::uint64_t at[2];
};

/// Whether all places of a layout of elements of `size` bytes are multiples of `word` bytes.
bool are_words(const std::byte* data, std::size_t at, const IndexMap& map, std::size_t size,
               std::size_t word) {
  bool all = (reinterpret_cast<std::uintptr_t>(data) + at * size) % word == 0;
  for (int d = 0; d + 1 < map.dims; ++d) all = all && map.stride[d] * size % word == 0;
  return all && map.stride[map.dims - 1] == 1 && map.extent[map.dims - 1] * size % word == 0;
}

/// The layout of words of k elements.
IndexMap in_words(IndexMap map, std::size_t k) {
  map.extent[map.dims - 1] /= k;
  for (int d = 0; d + 1 < map.dims; ++d) map.stride[d] /= k;
  return map;
}

template <class Word>
bool copy_words(const char* op, const Tensor& out, const Tensor& in, const StridedCopy& c,
                const Stream& stream) {
  const std::size_t size = size_of(out.dtype()), k = sizeof(Word) / size;
  if (k == 0 || !are_words(out.raw(), c.out_at, c.out, size, sizeof(Word)) ||
      !are_words(in.raw(), c.in_at, c.in, size, sizeof(Word)))
    return false;
  const IndexMap to = in_words(c.out, k), from = in_words(c.in, k);
  cuda::launch(op, copy_elements<Word, Store>, cuda::grid_for(to.count(), 256, max_blocks), stream, Store(),
               reinterpret_cast<Word*>(out.raw() + c.out_at * size),
               reinterpret_cast<const Word*>(in.raw() + c.in_at * size), to, from, to.count());
  return true;
}

}  // namespace

void strided_copy(const char* op, const Tensor& out, const Tensor& in, const StridedCopy& c, Into into,
                  const Stream& stream) {
  if (into == Into::accumulate)
    return dispatch_dtype(out.dtype(),
                          [&](auto t) { launch_copy<decltype(t)>(op, Add(), out, in, c, stream); });
  if (copy_words<Word16>(op, out, in, c, stream) || copy_words<std::uint64_t>(op, out, in, c, stream)) return;
  dispatch_size(size_of(out.dtype()),
                [&](auto word) { launch_copy<decltype(word)>(op, Store(), out, in, c, stream); });
}

}  // namespace rz::ops::device
