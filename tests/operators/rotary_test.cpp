// Runs: ci host operators

// Rotary position embedding and its tables.

#include <cmath>
#include <numbers>

#include "tensor/attention_ops.h"
#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using Scaling = ops::RotaryOptions::Scaling;

class Rotary : public Operators {};
INSTANTIATE_TEST_SUITE_P(Types, Rotary, float_types, type_name);

struct Case {
  std::size_t batch, tokens, heads, size, rotated, past = 0;
  std::vector<std::int32_t> positions = {};
  Shape shape() const { return {batch, tokens, heads * size}; }
};

/// As Hugging Face writes it: x · cos + rotate_half(x) · sin.
Values rotated(const Case& c, const Values& x, double sign) {
  Values out = x;
  const std::size_t half = c.rotated / 2;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const std::size_t d = n % c.size, row = n / (c.heads * c.size);
    if (d >= c.rotated) continue;
    const double position = c.positions.empty() ? static_cast<double>(c.past + row % c.tokens)
                                                : static_cast<double>(c.positions[row]);
    const double angle =
        position / std::pow(10000.0, 2 * static_cast<double>(d % half) / static_cast<double>(c.rotated));
    const double partner = d < half ? -x[n + half] : x[n - half];
    out[n] = x[n] * std::cos(angle) + sign * partner * std::sin(angle);
  }
  return out;
}

TEST_P(Rotary, IsTheRotationOfHuggingFace) {
  for (const Case& c :
       {Case{2, 5, 3, 8, 8}, Case{1, 1, 2, 64, 64, 17}, Case{2, 3, 2, 70, 70, 1}, Case{1, 4, 2, 20, 6},
        Case{3, 33, 1, 9, 8, 2}, Case{2, 5, 2, 26, 22}, Case{2, 3, 2, 128, 128, 0, {7, 0, 1, 49, 3, 3}},
        Case{2, 3, 3, 64, 64, 1, {7, 0, 1, 49, 3, 3}}}) {
    const auto rotate = [=](const Tensor& out, const Tensor& x, ops::Rotation rotation, const Stream& s) {
      const auto tables = ops::rotary_tables(c.rotated, 50, {}, s);
      const Tensor positions =
          c.positions.empty() ? Tensor() : to_device(c.positions, {c.batch, c.tokens}, s);
      ops::rotary(out, x, static_cast<int>(c.heads), tables.cosines, tables.sines, positions, c.past,
                  rotation, s);
    };
    expect_right(
        {.name = concat(name(c.shape()), ", ", c.rotated, " of ", c.size, " rotated"),
         .in = {{random_values(c.shape().count(), 1, 2), c.shape()}},
         .out = c.shape(),
         .forward = [=](const Operands& o) { rotate(o.out, o.in[0], ops::Rotation::forward, o.stream); },
         .value = [&](const std::vector<Values>& in) { return rotated(c, in[0], 1); },
         .gradients = {{.of = 0,
                        .backward = [=](const Operands& o, const Tensor& d,
                                        ops::Into) { rotate(d, o.d_out, ops::Rotation::inverse, o.stream); },
                        .alias = Alias::d_out,
                        .adds = false,
                        .bound = {2e-7},
                        .formula = [&](const std::vector<Values>&, const Values&,
                                       const Values& d_out) { return rotated(c, d_out, -1); }}},
         .bound = {2e-7},
         .in_place = true,
         .strides = true,
         .bits_of_threads = true});
  }
}

/// Quarter turns: cosine 0 and sine 1.
TEST_P(Rotary, AQuarterTurnIsExact) {
  const Tensor cosines = to_device(Values{0, 0}, {1, 2}, DType::f32, stream),
               sines = to_device(Values{1, 1}, {1, 2}, DType::f32, stream),
               x = place({1, 2, 3, 4, 5}, {1, 1, 5}), out = empty({1, 1, 5});
  ops::rotary(out, x, 1, cosines, sines, {}, 0, ops::Rotation::forward, stream);
  EXPECT_EQ(get(out), (Values{-3, -4, 1, 2, 5}));
  ops::rotary(out, x, 1, cosines, sines, {}, 0, ops::Rotation::inverse, stream);
  EXPECT_EQ(get(out), (Values{3, 4, -1, -2, 5}));
}

using RotaryTables = OnDevice;

/// Frequencies as transformers computes them (modeling_rope_utils.py), in double.
Values frequencies(std::size_t rotated, std::size_t positions, const ops::RotaryOptions& o) {
  const auto longest = static_cast<double>(o.original_max_position_embeddings);
  double base = o.theta;
  const double dim = static_cast<double>(rotated);
  if (o.scaling == Scaling::dynamic) {
    const double length = std::max(static_cast<double>(positions), longest);
    base *= std::pow((o.factor * length / longest) - (o.factor - 1), dim / (dim - 2));
  }
  Values all;
  for (std::size_t i = 0; i < rotated; i += 2) {
    double f = 1 / std::pow(base, static_cast<double>(i) / dim);
    const double wavelength = 2 * std::numbers::pi / f;
    if (o.scaling == Scaling::linear) f /= o.factor;
    if (o.scaling == Scaling::llama3) {
      const double low = longest / o.low_freq_factor, high = longest / o.high_freq_factor;
      const double smooth =
          (longest / wavelength - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
      if (wavelength > low)
        f /= o.factor;
      else if (wavelength >= high)
        f = (1 - smooth) * f / o.factor + smooth * f;
    }
    all.push_back(f);
  }
  return all;
}

TEST_F(RotaryTables, FollowTheScaling) {
  const ops::RotaryOptions cases[] = {
      {},
      {500000, Scaling::linear, 4},
      {10000, Scaling::dynamic, 2, 1, 4, 20},
      {10000, Scaling::dynamic, 2, 1, 4, 60},
      {500000, Scaling::llama3, 8, 1, 4, 8192},
      {500000, Scaling::llama3, 32, 1, 4, 64},
  };
  for (const ops::RotaryOptions& o : cases) {
    const auto tables = ops::rotary_tables(64, 50, o, stream);
    const Values cosines = from_device(tables.cosines, stream), sines = from_device(tables.sines, stream);
    ASSERT_EQ(tables.cosines.shape(), (Shape{50, 32}));
    const Values f = frequencies(64, 50, o);
    for (std::size_t p = 0; p < 50; ++p)
      for (std::size_t i = 0; i < 32; ++i) {
        ASSERT_NEAR(cosines[p * 32 + i], std::cos(static_cast<double>(p) * f[i]), 6e-8);
        ASSERT_NEAR(sines[p * 32 + i], std::sin(static_cast<double>(p) * f[i]), 6e-8);
      }
  }
}

TEST_F(RotaryTables, WhatDoesNotFitIsRefused) {
  const auto refused = [](const auto& call, const char* words) {
    expect_refused(call, Errc::invalid_argument, {words});
  };
  const auto tables = ops::rotary_tables(8, 6, {}, stream);
  const Tensor x = to_device(Values(2 * 3 * 16, 1), {2, 3, 16}, DType::f32, stream),
               out = empty_on(stream, {2, 3, 16});
  const auto call = [&](int heads, std::size_t past, const Tensor& positions) {
    return [&, heads, past, positions] {
      ops::rotary(out, x, heads, tables.cosines, tables.sines, positions, past, ops::Rotation::forward,
                  stream);
    };
  };
  EXPECT_NO_THROW(call(2, 3, {})());
  refused(call(2, 4, {}), "3 tokens after 4 need tables of 7 positions, which have 6");
  refused(call(3, 0, {}), "rotary with 3 heads");
  refused(call(4, 0, {}), "rotary with 4 heads");  // of 4 channels, with tables for 8
  refused(call(2, 0, to_device(std::vector<std::int32_t>(5), {5}, stream)), "needs 6 i32");
  const Tensor outside = to_device(std::vector<std::int32_t>{0, 1, 6, -1, 5, 0}, {2, 3}, stream);
  if (on_host()) {
    refused(call(2, 0, outside), "positions[2] = 6");
  } else {
    call(2, 0, outside)();
    const Values values = from_device(out, stream);
    for (std::size_t n = 0; n < values.size(); ++n)
      ASSERT_EQ(std::isnan(values[n]), n / 16 == 2 || n / 16 == 3) << n;
  }
  const auto made = [&](std::size_t rotated, const ops::RotaryOptions& o) {
    return [=, this] { ops::rotary_tables(rotated, 6, o, stream); };
  };
  refused(made(7, {}), "7 channels");
  refused(made(8, {10000, Scaling::dynamic, 2}), "original_max_position_embeddings is 0");
  refused(made(8, {10000, Scaling::linear, 0}), "factor is 0");
  refused(made(8, {10000, Scaling::llama3, 8, 4, 4, 64}), "high_freq_factor is 4");
}

}  // namespace
}  // namespace rz::test
