// Copies and additions of rows, which the compiler vectorizes. Backward splits the channels over threads, so
// that rows of one token are added in order. Sums are in f32: an element of a 16-bit gradient is rounded
// once.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "comm/core/math.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/ops.h"

namespace rz::ops {

namespace {

constexpr std::size_t row_grain = 8;       // rows
constexpr std::size_t channel_grain = 16;  // one cache line

bool fits(const Tensor& rows_of, const Tensor& table) {
  return table.shape().dims() == 2 && last(rows_of) == last(table);
}

template <class T>
void add_to(float* out, const T* in, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] += to_f32(in[i]);
}

/// out[0 … n) += row(0) + row(1) + … + row(count - 1), in this order, in f32.
template <class G, class T, class F>
void add_rows(G* out, std::size_t n, std::size_t count, const F& row) {
  constexpr std::size_t tile = 64;
  for (std::size_t at = 0; at < n; at += tile) {
    const std::size_t width = std::min(tile, n - at);
    std::array<float, tile> sums;
    for (std::size_t j = 0; j < width; ++j) sums[j] = to_f32(out[at + j]);
    for (std::size_t i = 0; i < count; ++i) add_to(sums.data(), static_cast<const T*>(row(i)) + at, width);
    for (std::size_t j = 0; j < width; ++j) out[at + j] = from_f32<G>(sums[j]);
  }
}

/// The positions of the tokens, ordered by token, then by position.
const std::vector<std::uint32_t>& positions_by_token(const std::int32_t* tokens, std::size_t n) {
  static thread_local std::vector<std::uint32_t> order;
  order.resize(n);
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : a < b;
  });
  return order;
}

/// f(G{}, T{}) for a gradient's and a value's type.
template <class F>
void with_types(const Tensor& gradient, const Tensor& value, const F& f) {
  dispatch_dtype(value.dtype(), [&](auto t) {
    dispatch_gradient_dtype<decltype(t)>(gradient.dtype(), [&](auto g) { f(g, t); });
  });
}

/// Adds into the table row by row, which needs no order of the positions.
template <class T>
void add_to_table(float* table, const T* d_out, const std::int32_t* tokens, std::size_t n, std::size_t c,
                  const Stream& stream) {
  stream.parallel_for(c, channel_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = 0; i < n; ++i)
      add_to(table + static_cast<std::size_t>(tokens[i]) * c + begin, d_out + i * c + begin, end - begin);
  });
}

/// Sums the rows of one token in f32, then rounds.
template <class G, class T>
void add_to_table(G* table, const T* d_out, const std::int32_t* tokens, std::size_t n, std::size_t c,
                  const Stream& stream) {
  const std::vector<std::uint32_t>& order = positions_by_token(tokens, n);
  stream.parallel_for(c, channel_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = 0, past = 0; first < n; first = past) {
      const std::int32_t token = tokens[order[first]];
      while (past < n && tokens[order[past]] == token) ++past;
      add_rows<G, T>(table + static_cast<std::size_t>(token) * c + begin, end - begin, past - first,
                     [&](std::size_t i) { return d_out + order[first + i] * c + begin; });
    }
  });
}

void clear(const Tensor& t, const Stream& stream) { fill(t, 0, stream); }

}  // namespace

void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream& stream) {
  check("embedding", {{"out", out}, {"table", table}}, fits(out, table));
  check_indices("embedding", {"tokens", tokens}, rows(out), table.shape()[0]);
  if (const auto* d = on_device("embedding", out, stream)) return d->embedding(out, tokens, table, stream);
  check_dtype("embedding", table.dtype(), {{"out", out}});
  const std::size_t bytes = last(table) * size_of(table.dtype());
  std::byte *const o = out.raw(), *const t = table.raw();
  const std::int32_t* token = tokens.data<std::int32_t>();
  stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      std::memcpy(o + i * bytes, t + static_cast<std::size_t>(token[i]) * bytes, bytes);
  });
}

void embedding_with_positions(const Tensor& out, const Tensor& tokens, const Tensor& table,
                              const Tensor& positions, const Stream& stream) {
  constexpr const char* op = "embedding_with_positions";
  check(op, {{"out", out}, {"table", table}, {"positions", positions}},
        out.shape().dims() == 3 && fits(out, table) && fits(out, positions) &&
            out.shape()[1] <= positions.shape()[0]);
  check_indices(op, {"tokens", tokens}, rows(out), table.shape()[0]);
  if (const auto* d = on_device("embedding_with_positions", out, stream))
    return d->embedding_with_positions(out, tokens, table, positions, stream);
  check_dtype(op, table.dtype(), {{"out", out}, {"positions", positions}});
  const std::size_t c = last(table), length = out.shape()[1];
  const std::int32_t* token = tokens.data<std::int32_t>();
  dispatch_dtype(table.dtype(), [&](auto type) {
    using T = decltype(type);
    T* o = out.data<T>();
    const T *t = table.data<T>(), *p = positions.data<T>();
    stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const T *a = t + static_cast<std::size_t>(token[i]) * c, *b = p + i % length * c;
        for (std::size_t j = 0; j < c; ++j) o[i * c + j] = from_f32<T>(to_f32(a[j]) + to_f32(b[j]));
      }
    });
  });
}

void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into into,
                        const Stream& stream) {
  check("embedding_backward", {{"d_table", d_table}, {"d_out", d_out}}, fits(d_out, d_table));
  check_indices("embedding_backward", {"tokens", tokens}, rows(d_out), d_table.shape()[0]);
  if (const auto* d = on_device("embedding_backward", d_table, stream))
    return d->embedding_backward(d_table, d_out, tokens, into, stream);
  check_gradient_dtype("embedding_backward", d_out.dtype(), {{"d_table", d_table}});
  if (into == Into::overwrite) clear(d_table, stream);
  with_types(d_table, d_out, [&](auto g, auto t) {
    add_to_table(d_table.data<decltype(g)>(), d_out.data<decltype(t)>(), tokens.data<std::int32_t>(),
                 rows(d_out), last(d_out), stream);
  });
}

void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into into, const Stream& stream) {
  check("positions_backward", {{"d_positions", d_positions}, {"d_out", d_out}},
        d_out.shape().dims() == 3 && fits(d_out, d_positions) && d_out.shape()[1] <= d_positions.shape()[0]);
  if (const auto* d = on_device("positions_backward", d_positions, stream))
    return d->positions_backward(d_positions, d_out, into, stream);
  check_gradient_dtype("positions_backward", d_out.dtype(), {{"d_positions", d_positions}});
  if (into == Into::overwrite) clear(d_positions, stream);
  const std::size_t c = last(d_out), length = d_out.shape()[1], batch = d_out.shape()[0];
  with_types(d_positions, d_out, [&](auto g, auto t) {
    auto* d = d_positions.data<decltype(g)>();
    const auto* dy = d_out.data<decltype(t)>();
    stream.parallel_for(length, row_grain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        add_rows<decltype(g), decltype(t)>(d + i * c, c, batch,
                                           [&](std::size_t b) { return dy + (b * length + i) * c; });
    });
  });
}

}  // namespace rz::ops
