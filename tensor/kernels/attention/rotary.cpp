#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/attention/rotary.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <numbers>

#include "comm/device/allocate.h"
#include "tensor/attention_ops.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// Rotates n pairs (low[i], high[i]) by angles with these cosines and `sign` times these sines.
template <class T>
void rotate_pairs(T* out_low, T* out_high, const T* low, const T* high, const float* cosines,
                  const float* sines, float sign, std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto signs = hn::Set(d, sign);
  const auto rotate = [&](auto a, auto b, auto c, auto s, const auto& put) HWY_ATTR {
    s = hn::Mul(s, signs);
    put(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)));
  };
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    rotate(load(d, low + i), load(d, high + i), load(d, cosines + i), load(d, sines + i),
           [&](auto x, auto y) HWY_ATTR { store(x, d, out_low + i), store(y, d, out_high + i); });
  const std::size_t left = n - i;
  if (left > 0)
    rotate(load_part(d, low + i, left, 0.0f), load_part(d, high + i, left, 0.0f),
           load_part(d, cosines + i, left, 0.0f), load_part(d, sines + i, left, 0.0f),
           [&](auto x, auto y)
               HWY_ATTR { store_part(x, d, out_low + i, left), store_part(y, d, out_high + i, left); });
}

/// The heads of one token.
void rotate_row(const Tensor& out, const Tensor& x, std::size_t row, std::size_t heads, const float* cosines,
                const float* sines, std::size_t half, float sign) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t size = x.shape()[-1] / heads;
    T* to = elements<T>(out) + row * out.row_stride();
    const T* from = elements<const T>(x) + row * x.row_stride();
    for (std::size_t h = 0; h < heads; ++h, to += size, from += size) {
      rotate_pairs(to, to + half, from, from + half, cosines, sines, sign, half);
      if (to != from) std::memcpy(to + 2 * half, from + 2 * half, (size - 2 * half) * sizeof(T));
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(rotate_row);

namespace ops {

namespace {

void check_scaling(const RotaryOptions& o) {
  const auto positive = [](const char* key, double value) {
    require(value > 0 && std::isfinite(value), Errc::invalid_argument, "rotary_tables: ", key, " is ", value,
            ", expected more than 0");
  };
  positive("theta", o.theta);
  positive("factor", o.factor);
  const bool trained =
      o.scaling == RotaryOptions::Scaling::dynamic || o.scaling == RotaryOptions::Scaling::llama3;
  if (trained)
    positive("original_max_position_embeddings", static_cast<double>(o.original_max_position_embeddings));
  if (o.scaling != RotaryOptions::Scaling::llama3) return;
  positive("low_freq_factor", o.low_freq_factor);
  require(o.high_freq_factor > o.low_freq_factor, Errc::invalid_argument,
          "rotary_tables: high_freq_factor is ", o.high_freq_factor,
          ", expected more than low_freq_factor, which is ", o.low_freq_factor);
}

/// theta of a longer sequence than those of the training, so that its lowest frequency turns as far ("NTK").
double theta_of(const RotaryOptions& o, std::size_t rotated, std::size_t positions) {
  if (o.scaling != RotaryOptions::Scaling::dynamic || positions <= o.original_max_position_embeddings ||
      rotated <= 2)
    return o.theta;
  const double longer =
      static_cast<double>(positions) / static_cast<double>(o.original_max_position_embeddings);
  const double channels = static_cast<double>(rotated);
  return o.theta * std::pow(o.factor * longer - (o.factor - 1), channels / (channels - 2));
}

/// Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated.
double llama3_frequency(const RotaryOptions& o, double frequency) {
  const double turns =  // of the training's longest sequence
      static_cast<double>(o.original_max_position_embeddings) * frequency / (2 * std::numbers::pi);
  if (turns < o.low_freq_factor) return frequency / o.factor;
  if (turns > o.high_freq_factor) return frequency;
  const double kept = (turns - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
  return (1 - kept) * frequency / o.factor + kept * frequency;
}

double scaled_frequency(const RotaryOptions& o, double frequency) {
  switch (o.scaling) {
    case RotaryOptions::Scaling::linear:
      return frequency / o.factor;
    case RotaryOptions::Scaling::llama3:
      return llama3_frequency(o, frequency);
    default:
      return frequency;
  }
}

}  // namespace

RotaryTables rotary_tables(std::size_t rotated, std::size_t positions, const RotaryOptions& o,
                           const Stream& stream) {
  require(rotated > 0 && rotated % 2 == 0, Errc::invalid_argument, "rotary_tables: ", rotated,
          " channels, expected an even number");
  check_scaling(o);
  const std::size_t half = rotated / 2;
  const double theta = theta_of(o, rotated, positions);
  std::vector<float> cosines(positions * half), sines(positions * half);
  for (std::size_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(rotated);
    const double frequency = scaled_frequency(o, std::pow(theta, -exponent));
    for (std::size_t p = 0; p < positions; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      cosines[p * half + i] = static_cast<float>(std::cos(angle));
      sines[p * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  const auto on_stream = [&](const std::vector<float>& values) {
    const Tensor t = Tensor::empty({positions, half}, DType::f32, allocator_on(stream.device()));
    t.assign(std::span<const float>(values), stream);
    return t;
  };
  return {on_stream(cosines), on_stream(sines)};
}

void rotary(const Tensor& out, const Tensor& x, int heads, const Tensor& cosines, const Tensor& sines,
            const Tensor& positions, std::size_t past, Rotation rotation, const Stream& stream) {
  constexpr const char* op = "rotary";
  const std::size_t count = static_cast<std::size_t>(std::max(heads, 1)), half = last(cosines);
  const bool right = heads >= 1 && x.shape().dims() == 3 && out.shape() == x.shape() &&
                     last(x) % count == 0 && cosines.shape().dims() == 2 &&
                     sines.shape() == cosines.shape() && half > 0 && 2 * half <= last(x) / count;
  check(right ? op : concat(op, " with ", heads, " heads").c_str(),
        {{"out", out}, {"x", x}, {"cosines", cosines}, {"sines", sines}}, right, Rows::any_stride);
  check(op, {{"cosines", cosines}, {"sines", sines}}, true);
  check_dtype(op, DType::f32, {{"cosines", cosines}, {"sines", sines}});
  check_dtype(op, x.dtype(), {{"out", out}});
  const std::size_t length = x.shape()[1], limit = cosines.shape()[0];
  if (positions.defined()) {
    check_indices(op, {"positions", positions}, rows(x), limit);
    require(positions.device() == x.device(), Errc::invalid_argument, op, ": positions are on ",
            name(positions.device()), ", x is on ", name(x.device()));
  } else if (past + length > limit) {
    fail(Errc::invalid_argument, op, ": ", length, " tokens after ", past, " need tables of ", past + length,
         " positions, which have ", limit);
  }
  if (const auto* d = on_device(op, out, stream))
    return d->rotary(out, x, heads, cosines, sines, positions, past, rotation, stream);
  const std::int32_t* at = positions.defined() ? positions.data<std::int32_t>() : nullptr;
  const float *c = cosines.data<float>(), *s = sines.data<float>();
  const float sign = rotation == Rotation::inverse ? -1 : 1;
  const std::size_t grain = std::max<std::size_t>(1, 16384 / last(x));
  stream.parallel_for(rows(x), grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const std::size_t position = at ? static_cast<std::size_t>(at[row]) : past + row % length;
      HWY_DYNAMIC_DISPATCH(rotate_row)
      (out, x, row, count, c + position * half, s + position * half, half, sign);
    }
  });
}

}  // namespace ops
}  // namespace rz
#endif
