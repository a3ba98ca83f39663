// Copies and additions of rows, which the compiler vectorizes. Backward splits the channels over threads, so
// that rows of one token are added in order. Sums are in f32: an element of a 16-bit gradient is rounded
// once.

#include "tensor/ops.h"
#include "tensor/shape_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/linear_algebra/embedding.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/linear_algebra/local_index.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// out[at … at + n) = a[a_at …] + b[b_at …]
void add_rows(const Tensor& out, std::size_t at, const Tensor& a, std::size_t a_at, const Tensor& b,
              std::size_t b_at, std::size_t n) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const x = elements<T>(a) + a_at, *const y = elements<T>(b) + b_at;
    map(
        elements<T>(out) + at, n, [](auto v, auto w) HWY_ATTR { return hn::Add(v, w); }, x, y);
  });
}

/// sums[0 … n) += in[at … at + n)
void add_to(float* sums, const Tensor& in, std::size_t at, std::size_t n) {
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    const auto* const x = elements<decltype(t)>(in) + at;
    map_into(
        true, sums, n, [](auto v) HWY_ATTR { return v; }, x);
  });
}

/// t[at … at + n) to f32, or from f32.
void widen(float* out, const Tensor& t, std::size_t at, std::size_t n) {
  ops::dispatch_dtype(t.dtype(), [&](auto type) HWY_ATTR {
    const auto* const x = elements<decltype(type)>(t) + at;
    map(
        out, n, [](auto v) HWY_ATTR { return v; }, x);
  });
}
void narrow(const Tensor& t, std::size_t at, const float* in, std::size_t n) {
  ops::dispatch_dtype(t.dtype(), [&](auto type) HWY_ATTR {
    map(
        elements<decltype(type)>(t) + at, n, [](auto v) HWY_ATTR { return v; }, in);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(add_rows);
HWY_EXPORT(add_to);
HWY_EXPORT(widen);
HWY_EXPORT(narrow);

namespace ops {

namespace {

constexpr std::size_t row_grain = 8;       // rows
constexpr std::size_t channel_grain = 16;  // one cache line

bool fits(const Tensor& rows_of, const Tensor& table) {
  return table.shape().dims() == 2 && last(rows_of) == last(table);
}

/// Elements [at, at + n) of `out` += rows of `in` from elements row(0), row(1), …, row(count - 1), in this
/// order, in f32.
template <class F>
void sum_rows(const Tensor& out, std::size_t at, std::size_t n, const Tensor& in, std::size_t count,
              const F& row) {
  if (out.dtype() == DType::f32) {
    for (std::size_t i = 0; i < count; ++i)
      HWY_DYNAMIC_DISPATCH(add_to)(out.data<float>() + at, in, row(i), n);
    return;
  }
  constexpr std::size_t tile = 256;
  std::array<float, tile> sums;
  for (std::size_t first = 0; first < n; first += tile) {
    const std::size_t width = std::min(tile, n - first);
    HWY_DYNAMIC_DISPATCH(widen)(sums.data(), out, at + first, width);
    for (std::size_t i = 0; i < count; ++i)
      HWY_DYNAMIC_DISPATCH(add_to)(sums.data(), in, row(i) + first, width);
    HWY_DYNAMIC_DISPATCH(narrow)(out, at + first, sums.data(), width);
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

/// Adds into an f32 table row by row, which needs no order of the positions.
void add_in_place(const Tensor& d_table, const Tensor& d_out, const std::int32_t* tokens,
                  const Stream& stream) {
  const std::size_t c = last(d_out), n = rows(d_out);
  float* const table = d_table.data<float>();
  stream.parallel_for(c, channel_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = 0; i < n; ++i)
      if (tokens[i] != elsewhere) HWY_DYNAMIC_DISPATCH(add_to)
    (table + static_cast<std::size_t>(tokens[i]) * c + begin, d_out, i * c + begin, end - begin);
  });
}

/// Sums the rows of one token in f32, then rounds.
void add_by_token(const Tensor& d_table, const Tensor& d_out, const std::int32_t* tokens,
                  const Stream& stream) {
  const std::size_t c = last(d_out), n = rows(d_out);
  const std::vector<std::uint32_t>& order = positions_by_token(tokens, n);
  stream.parallel_for(c, channel_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = 0, past = 0; first < n; first = past) {
      const std::int32_t token = tokens[order[first]];
      while (past < n && tokens[order[past]] == token) ++past;
      if (token == elsewhere) continue;
      sum_rows(d_table, static_cast<std::size_t>(token) * c + begin, end - begin, d_out, past - first,
               [&](std::size_t i) { return order[first + i] * c + begin; });
    }
  });
}

void clear(const Tensor& t, const Stream& stream) { fill(t, 0, stream); }

/// The tensors have been checked, except their dtypes on the host.
void look_up(const char* op, const Tensor& out, const Tensor& tokens, const Tensor& table,
             const Stream& stream) {
  if (const auto* d = on_device(op, out, stream)) return d->embedding(out, tokens, table, stream);
  check_dtype(op, table.dtype(), {{"out", out}});
  const std::size_t bytes = last(table) * size_of(table.dtype());
  std::byte *const o = out.raw(), *const t = table.raw();
  const std::int32_t* token = tokens.data<std::int32_t>();
  stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (token[i] == elsewhere)
        std::memset(o + i * bytes, 0, bytes);
      else
        std::memcpy(o + i * bytes, t + static_cast<std::size_t>(token[i]) * bytes, bytes);
  });
}

void add_rows_of_tokens(const char* op, const Tensor& d_table, const Tensor& d_out, const Tensor& tokens,
                        Into into, const Stream& stream) {
  if (const auto* d = on_device(op, d_table, stream))
    return d->embedding_backward(d_table, d_out, tokens, into, stream);
  check_gradient_dtype(op, d_out.dtype(), {{"d_table", d_table}});
  if (into == Into::overwrite) clear(d_table, stream);
  const auto add = d_table.dtype() == DType::f32 ? add_in_place : add_by_token;
  add(d_table, d_out, tokens.data<std::int32_t>(), stream);
}

/// The tensor as a matrix of this many rows.
Tensor as_rows(const Tensor& t, std::size_t rows) { return t.reshape({rows, rows ? t.count() / rows : 0}); }

/// Errc::invalid_argument unless `part` has the shape of the index, then that of `whole` without its first
/// extent.
void check_selection(const char* op, const Argument& part, const Argument& whole, const Tensor& index) {
  const Shape &few = part.tensor.shape(), &all = whole.tensor.shape();
  const int leading = index.shape().dims();
  bool fits = all.dims() > 0 && few.dims() == leading + all.dims() - 1;
  for (int d = 0; fits && d < few.dims(); ++d)
    fits = few[d] == (d < leading ? index.shape()[d] : all[d - leading + 1]);
  check(op, {part, whole, {"index", index}}, fits, Rows::contiguous, DTypes::any);
  check(op, {part, whole}, true);
  check_indices(op, {"index", index}, index.count(), all[0]);
}

}  // namespace

void local_indices(const Tensor& out, const Tensor& in, std::size_t first, std::size_t count,
                   std::size_t total, const Stream& stream) {
  constexpr const char* op = "local_indices";
  check(op, {{"out", out}, {"in", in}}, out.count() == in.count() && first + count <= total, Rows::contiguous,
        DTypes::any);
  if (const auto* d = on_device(op, out, stream))
    return d->local_indices(out, in, first, count, total, stream);
  std::int32_t* const to = out.data<std::int32_t>();
  const std::int32_t* const from = in.data<std::int32_t>();
  for (std::size_t i = 0; i < in.count(); ++i) to[i] = local_index(from[i], first, count, total);
}

void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream& stream) {
  check("embedding", {{"out", out}, {"table", table}}, fits(out, table));
  check_indices("embedding", {"tokens", tokens}, rows(out), table.shape()[0], {elsewhere});
  look_up("embedding", out, tokens, table, stream);
}

void index_select(const Tensor& out, const Tensor& in, const Tensor& index, const Stream& stream) {
  check_selection("index_select", {"out", out}, {"in", in}, index);
  if (out.count() == 0) return;
  look_up("index_select", as_rows(out, index.count()), index, as_rows(in, in.shape()[0]), stream);
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
  stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(add_rows)
    (out, i * c, table, static_cast<std::size_t>(token[i]) * c, positions, i % length * c, c);
  });
}

void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into into,
                        const Stream& stream) {
  check("embedding_backward", {{"d_table", d_table}, {"d_out", d_out}}, fits(d_out, d_table));
  check_indices("embedding_backward", {"tokens", tokens}, rows(d_out), d_table.shape()[0], {elsewhere});
  add_rows_of_tokens("embedding_backward", d_table, d_out, tokens, into, stream);
}

void index_select_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& index, Into into,
                           const Stream& stream) {
  check_selection("index_select_backward", {"d_out", d_out}, {"d_in", d_in}, index);
  if (d_in.count() == 0) return;
  if (d_out.count() > 0)
    add_rows_of_tokens("index_select_backward", as_rows(d_in, d_in.shape()[0]), as_rows(d_out, index.count()),
                       index, into, stream);
  else if (into == Into::overwrite)
    clear(d_in, stream);
}

void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into into, const Stream& stream) {
  check("positions_backward", {{"d_positions", d_positions}, {"d_out", d_out}},
        d_out.shape().dims() == 3 && fits(d_out, d_positions) && d_out.shape()[1] <= d_positions.shape()[0]);
  if (const auto* d = on_device("positions_backward", d_positions, stream))
    return d->positions_backward(d_positions, d_out, into, stream);
  check_gradient_dtype("positions_backward", d_out.dtype(), {{"d_positions", d_positions}});
  if (into == Into::overwrite) clear(d_positions, stream);
  const std::size_t c = last(d_out), length = d_out.shape()[1], batch = d_out.shape()[0];
  stream.parallel_for(length, row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t)
      sum_rows(d_positions, t * c, c, d_out, batch, [&](std::size_t b) { return (b * length + t) * c; });
  });
}

}  // namespace ops
}  // namespace rz
#endif
