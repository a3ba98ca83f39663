// Copies and additions of rows, which the compiler vectorizes. Backward splits the channels over threads, so
// that rows of one token are added in order.

#include <algorithm>
#include <cstring>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/ops.h"

namespace rz::ops {

namespace {

constexpr std::size_t row_grain = 8;       // rows
constexpr std::size_t channel_grain = 16;  // one cache line

bool fits(const Tensor& rows_of, const Tensor& table) {
  return table.shape().dims() == 2 && last(rows_of) == last(table);
}

void add_to(float* out, const float* in, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] += in[i];
}

void clear(const Tensor& t, const Stream& stream) { fill(t, 0, stream); }

}  // namespace

void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream& stream) {
  check("embedding", {{"out", out}, {"table", table}}, fits(out, table));
  check_indices("embedding", {"tokens", tokens}, rows(out), table.shape()[0]);
  if (const auto* d = on_device("embedding", out, stream)) return d->embedding(out, tokens, table, stream);
  const std::size_t c = last(table);
  float* o = out.data<float>();
  const float* t = table.data<float>();
  const std::int32_t* token = tokens.data<std::int32_t>();
  stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      std::memcpy(o + i * c, t + static_cast<std::size_t>(token[i]) * c, c * sizeof(float));
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
  const std::size_t c = last(table), length = out.shape()[1];
  float* o = out.data<float>();
  const float *t = table.data<float>(), *p = positions.data<float>();
  const std::int32_t* token = tokens.data<std::int32_t>();
  stream.parallel_for(rows(out), row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const float *a = t + static_cast<std::size_t>(token[i]) * c, *b = p + i % length * c;
      for (std::size_t j = 0; j < c; ++j) o[i * c + j] = a[j] + b[j];
    }
  });
}

void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into into,
                        const Stream& stream) {
  check("embedding_backward", {{"d_table", d_table}, {"d_out", d_out}}, fits(d_out, d_table));
  check_indices("embedding_backward", {"tokens", tokens}, rows(d_out), d_table.shape()[0]);
  if (const auto* d = on_device("embedding_backward", d_table, stream))
    return d->embedding_backward(d_table, d_out, tokens, into, stream);
  if (into == Into::overwrite) clear(d_table, stream);
  const std::size_t c = last(d_out), n = rows(d_out);
  float* d = d_table.data<float>();
  const float* dy = d_out.data<float>();
  const std::int32_t* token = tokens.data<std::int32_t>();
  stream.parallel_for(c, channel_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = 0; i < n; ++i)
      add_to(d + static_cast<std::size_t>(token[i]) * c + begin, dy + i * c + begin, end - begin);
  });
}

void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into into, const Stream& stream) {
  check("positions_backward", {{"d_positions", d_positions}, {"d_out", d_out}},
        d_out.shape().dims() == 3 && fits(d_out, d_positions) && d_out.shape()[1] <= d_positions.shape()[0]);
  if (const auto* d = on_device("positions_backward", d_positions, stream))
    return d->positions_backward(d_positions, d_out, into, stream);
  if (into == Into::overwrite) clear(d_positions, stream);
  const std::size_t c = last(d_out), length = d_out.shape()[1], batch = d_out.shape()[0];
  float* d = d_positions.data<float>();
  const float* dy = d_out.data<float>();
  stream.parallel_for(length, row_grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t)
      for (std::size_t b = 0; b < batch; ++b) add_to(d + t * c, dy + (b * length + t) * c, c);
  });
}

}  // namespace rz::ops
