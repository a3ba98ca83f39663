// Backward without atomics: block b owns the table rows r with r % blocks == b. It lists the positions of its
// tokens in order, then one warp adds them up per row and 32 packs of columns. Thus each row is summed in the
// order of positions, as on the host, and rounded once per list.

#include "comm/device/memory.h"
#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/linear_algebra/local_index.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

std::size_t last(const Tensor& t) { return t.shape()[-1]; }
std::size_t rows(const Tensor& t) { return last(t) ? t.count() / last(t) : 0; }

/// One block per row. `positions` may be null.
template <class T>
__global__ void __launch_bounds__(256)
    look_up(T* out, const std::int32_t* tokens, const T* table, std::size_t vocabulary, const T* positions,
            std::size_t length, std::size_t columns) {
  const std::int32_t token = tokens[blockIdx.x];
  const bool inside = token >= 0 && static_cast<std::size_t>(token) < vocabulary;
  out += std::size_t{blockIdx.x} * columns;
  table += inside ? static_cast<std::size_t>(token) * columns : 0;
  auto split = Split<pack_width<T>>(columns, out).with(table);
  if (positions) {
    positions += blockIdx.x % length * columns;
    split = split.with(positions);
  }
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    constexpr int k = decltype(width)::value;
    float x[k], p[k] = {};
    load(x, table + i);
    if (positions) load(p, positions + i);
#pragma unroll
    for (int j = 0; j < k; ++j)
      x[j] = inside               ? (positions ? x[j] + p[j] : x[j])
             : token == elsewhere ? p[j]
                                  : detail::float_of(0x7fc00000u);
    store(out + i, x);
  });
}

template <class T>
void launch_look_up(const char* name, const Tensor& out, const Tensor& tokens, const Tensor& table,
                    const T* positions, std::size_t length, const Stream& stream) {
  const std::size_t c = last(out);
  const cuda::Grid grid{{static_cast<unsigned>(rows(out))},
                        {threads_for_row((c + pack_width<T> - 1) / pack_width<T>, 256)}};
  cuda::launch(name, look_up<T>, grid, stream, out.data<T>(), tokens.data<std::int32_t>(), table.data<T>(),
               table.shape()[0], positions, length, c);
}

__global__ void to_local(std::int32_t* out, const std::int32_t* in, std::size_t n, std::size_t first,
                         std::size_t count, std::size_t total) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x)
    out[i] = local_index(in[i], first, count, total);
}

constexpr unsigned add_threads = 256, add_warps = add_threads / warp_size;
constexpr unsigned tokens_a_thread = 8, tokens_a_round = add_threads * tokens_a_thread;
constexpr unsigned owned = 64;        // table rows per block
constexpr unsigned list_room = 6144;  // positions in shared memory
constexpr int rows_in_flight = 8;

/// Positions of a block's tokens, in order: position[i] is a position of token slot[i] · blocks + block.
struct List {
  std::uint32_t* position;
  unsigned char* slot;
  unsigned count;
};

/// Appends the block's positions in [begin, begin + tokens_a_round).
__device__ inline void list_round(List& list, const std::int32_t* tokens, std::size_t begin, std::size_t n,
                                  std::size_t vocabulary) {
  RZ_SHARED(unsigned, found, add_warps);
  const unsigned warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const std::size_t first = begin + std::size_t{warp} * warp_size * tokens_a_thread + lane;
  unsigned slots[tokens_a_thread], votes[tokens_a_thread], own = 0;
#pragma unroll
  for (unsigned j = 0; j < tokens_a_thread; ++j) {
    const std::size_t i = first + j * warp_size;
    const std::int32_t token = i < n ? tokens[i] : -1;
    const auto t = static_cast<unsigned>(token);  // of a negative one: larger than any vocabulary
    const bool mine = t < vocabulary && t % gridDim.x == blockIdx.x;
    slots[j] = mine ? t / gridDim.x : owned;
  }
#pragma unroll
  for (unsigned j = 0; j < tokens_a_thread; ++j) {
    votes[j] = __ballot_sync(whole_warp, slots[j] < owned);
    own += static_cast<unsigned>(__popc(votes[j]));
  }
  if (lane == 0) found[warp] = own;
  __syncthreads();
  unsigned at = list.count;
  for (unsigned w = 0; w < add_warps; ++w) {
    if (w < warp) at += found[w];
    list.count += found[w];
  }
#pragma unroll
  for (unsigned j = 0; j < tokens_a_thread; ++j) {
    if (slots[j] < owned) {
      const unsigned place = at + static_cast<unsigned>(__popc(votes[j] & ((1u << lane) - 1)));
      list.position[place] = static_cast<std::uint32_t>(first + j * warp_size);
      list.slot[place] = static_cast<unsigned char>(slots[j]);
    }
    at += static_cast<unsigned>(__popc(votes[j]));
  }
  __syncthreads();
}

/// Adds the listed rows of one slot to sum, `k` columns from `column`, in list order, with several loads in
/// flight.
template <class T, int k>
__device__ inline void add_rows(float (&sum)[k], const List& list, unsigned slot, const T* d_out,
                                std::size_t columns, std::size_t column) {
  const unsigned lane = threadIdx.x % warp_size;
  for (unsigned from = 0; from < list.count; from += warp_size) {
    const unsigned i = from + lane;
    unsigned hits = __ballot_sync(whole_warp, i < list.count && list.slot[i] == slot);
    while (hits) {
      Raw<T, k> rows[rows_in_flight] = {};
      const int taken = __popc(hits);
#pragma unroll
      for (int r = 0; r < rows_in_flight; ++r) {
        if (r >= taken) continue;
        const std::size_t row =
            list.position[from + static_cast<unsigned>(__ffs(static_cast<int>(hits))) - 1];
        hits &= hits - 1;
        if (column < columns) rows[r] = Raw<T, k>::at(d_out + row * columns + column);
      }
#pragma unroll
      for (int r = 0; r < rows_in_flight; ++r) {
        if (r >= taken) continue;
        float x[k];
        rows[r].widen(x);
#pragma unroll
        for (int j = 0; j < k; ++j) sum[j] += x[j];
      }
    }
  }
}

template <class T, class G, int k>
__device__ inline void add_list(G* d_table, const T* d_out, const List& list, std::size_t columns) {
  RZ_SHARED(unsigned char, present, owned);
  for (unsigned s = threadIdx.x; s < owned; s += blockDim.x) present[s] = 0;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < list.count; i += blockDim.x) present[list.slot[i]] = 1;
  __syncthreads();
  const std::size_t tiles = (columns + warp_size * k - 1) / (warp_size * k);
  for (std::size_t item = threadIdx.x / warp_size; item < owned * tiles; item += add_warps) {
    const auto slot = static_cast<unsigned>(item / tiles);
    if (!present[slot]) continue;
    const std::size_t column = (item % tiles * warp_size + threadIdx.x % warp_size) * k;
    G* const to = d_table + (std::size_t{slot} * gridDim.x + blockIdx.x) * columns + column;
    float sum[k] = {};
    if (column < columns) load(sum, to);
    add_rows(sum, list, slot, d_out, columns, column);
    if (column < columns) store(to, sum);
  }
  __syncthreads();
}

template <class T, class G, int k>
__global__ void __launch_bounds__(add_threads)
    add_to_table(G* d_table, const T* d_out, const std::int32_t* tokens, std::size_t n,
                 std::size_t vocabulary, std::size_t columns) {
  RZ_SHARED(std::uint32_t, position, list_room);
  RZ_SHARED(unsigned char, slot, list_room);
  List list{position, slot, 0};
  for (std::size_t begin = 0; begin < n; begin += tokens_a_round) {
    list_round(list, tokens, begin, n, vocabulary);
    if (list.count + tokens_a_round <= list_room) continue;
    add_list<T, G, k>(d_table, d_out, list, columns);
    list.count = 0;
  }
  if (list.count) add_list<T, G, k>(d_table, d_out, list, columns);
}

template <class T, class G>
__global__ void add_positions(G* d_positions, const T* d_out, std::size_t batch, std::size_t block,
                              Split<pack_width<T>> split, bool accumulate) {
  each_pack(split, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x,
            [&](auto width, std::size_t i) {
              constexpr int k = decltype(width)::value;
              float sum[k] = {};
              if (accumulate) load(sum, d_positions + i);
              for (std::size_t b = 0; b < batch; ++b) {
                float x[k];
                load(x, d_out + b * block + i);
#pragma unroll
                for (int j = 0; j < k; ++j) sum[j] += x[j];
              }
              store(d_positions + i, sum);
            });
}

}  // namespace

void local_indices(const Tensor& out, const Tensor& in, std::size_t first, std::size_t count,
                   std::size_t total, const Stream& stream) {
  cuda::launch("local_indices", to_local, cuda::grid_for(in.count()), stream, out.data<std::int32_t>(),
               in.data<std::int32_t>(), in.count(), first, count, total);
}

void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    launch_look_up<decltype(t)>("embedding", out, tokens, table, nullptr, 1, stream);
  });
}

void embedding_with_positions(const Tensor& out, const Tensor& tokens, const Tensor& table,
                              const Tensor& positions, const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    launch_look_up<T>("embedding_with_positions", out, tokens, table, positions.data<T>(), out.shape()[1],
                      stream);
  });
}

void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into into,
                        const Stream& stream) {
  if (into == Into::overwrite && d_table.count()) memset_async(d_table.raw(), 0, d_table.bytes(), stream);
  const std::size_t n = rows(d_out), vocabulary = d_table.shape()[0], c = last(d_out);
  if (n == 0) return;
  dispatch_dtype(d_out.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_gradient_dtype<T>(d_table.dtype(), [&](auto g) {
      using G = decltype(g);
      const bool packs = rows_are_packs(c, d_out.data<T>(), d_table.data<G>());
      const cuda::Grid grid{{static_cast<unsigned>((vocabulary + owned - 1) / owned)}, {add_threads}};
      cuda::launch("embedding_backward", packs ? add_to_table<T, G, pack_width<T>> : add_to_table<T, G, 1>,
                   grid, stream, d_table.data<G>(), d_out.data<T>(), tokens.data<std::int32_t>(), n,
                   vocabulary, c);
    });
  });
}

void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into into, const Stream& stream) {
  const std::size_t length = d_out.shape()[1], c = last(d_out), used = length * c;
  dispatch_dtype(d_out.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_gradient_dtype<T>(d_positions.dtype(), [&](auto g) {
      using G = decltype(g);
      G* const d = d_positions.data<G>();
      if (into == Into::overwrite && d_positions.count() > used)
        memset_async(d + used, 0, (d_positions.count() - used) * sizeof(G), stream);
      auto split = Split<pack_width<T>>(used, d_out.data<T>()).with(d);
      // sequences may start at unaligned addresses
      if (used % pack_width<T> != 0) split.head = used, split.packs = 0;
      cuda::launch("positions_backward", add_positions<T, G>, cuda::grid_for(split.threads()), stream, d,
                   d_out.data<T>(), d_out.shape()[0], used, split, into == Into::accumulate);
    });
  });
}

}  // namespace rz::ops::device
