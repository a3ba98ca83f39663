#include <algorithm>
#include <cmath>

#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using Attention = OnDevice;

struct Case {
  std::size_t batch, tokens, heads, size;
  DType dtype;
  double range = 1;
  std::size_t channels() const { return heads * size; }
  std::size_t count() const { return batch * tokens * channels(); }
  Shape out_shape() const { return {batch, tokens, channels()}; }
  Shape qkv_shape() const { return {batch, tokens, 3 * channels()}; }
};

struct Gradient {
  Values out, log_sum, d_qkv;
};

/// The probabilities, in double, of query i of one head.
Values probabilities(const Case& c, const Values& qkv, std::size_t b, std::size_t h, std::size_t i,
                     double& log_sum) {
  const auto at = [&](std::size_t token, std::size_t part) {
    return qkv.data() + (b * c.tokens + token) * 3 * c.channels() + part * c.channels() + h * c.size;
  };
  Values p(i + 1, 0);
  for (std::size_t j = 0; j <= i; ++j)
    for (std::size_t d = 0; d < c.size; ++d)
      p[j] += at(i, 0)[d] * at(j, 1)[d] / std::sqrt(static_cast<double>(c.size));
  const double most = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& e : p) sum += e = std::exp(e - most);
  for (double& e : p) e /= sum;
  log_sum = most + std::log(sum);
  return p;
}

/// Backward by its definition; `factors` as in reference::causal_attention.
Gradient expected(const Case& c, const Values& qkv, const Values& d_out, const Values& factors) {
  Gradient g;
  g.out = reference::causal_attention(qkv, c.batch, c.tokens, c.channels(), c.heads, factors);
  g.d_qkv.assign(qkv.size(), 0);
  const double scale = 1 / std::sqrt(static_cast<double>(c.size));
  for (std::size_t b = 0; b < c.batch; ++b)
    for (std::size_t h = 0; h < c.heads; ++h)
      for (std::size_t i = 0; i < c.tokens; ++i) {
        const auto at = [&](std::size_t token, std::size_t part) {
          return (b * c.tokens + token) * 3 * c.channels() + part * c.channels() + h * c.size;
        };
        double log_sum = 0;
        const Values p = probabilities(c, qkv, b, h, i, log_sum);
        g.log_sum.push_back(log_sum);
        const double* dy = d_out.data() + (b * c.tokens + i) * c.channels() + h * c.size;
        Values d_p(i + 1, 0);
        double delta = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          const double factor =
              factors.empty() ? 1 : factors[((b * c.heads + h) * c.tokens + i) * c.tokens + j];
          for (std::size_t d = 0; d < c.size; ++d) {
            d_p[j] += dy[d] * qkv[at(j, 2) + d] * factor;
            g.d_qkv[at(j, 2) + d] += p[j] * factor * dy[d];
          }
          delta += p[j] * d_p[j];
        }
        for (std::size_t j = 0; j <= i; ++j)
          for (std::size_t d = 0; d < c.size; ++d) {
            const double d_score = p[j] * (d_p[j] - delta) * scale;
            g.d_qkv[at(i, 0) + d] += d_score * qkv[at(j, 1) + d];
            g.d_qkv[at(j, 1) + d] += d_score * qkv[at(i, 0) + d];
          }
      }
  return g;
}

/// The result of the host's dropout on ones.
Values factors_of(const Case& c, const ops::DropoutMask& mask) {
  if (mask.p == 0) return {};
  const Tensor ones = Tensor::empty({c.batch * c.heads * c.tokens * c.tokens});
  ops::fill(ones, 1, {});
  ops::dropout(ones, ones, mask, {});
  return values_of(ones);
}

struct Tensors {
  Tensor qkv, d_out, out, log_sum, d_qkv;
};

Tensors run(const Case& c, const ops::DropoutMask& mask, const Stream& stream) {
  Tensors r;
  r.qkv = to_device(random_values(3 * c.count(), 1, c.range), c.qkv_shape(), c.dtype, stream);
  r.d_out = to_device(random_values(c.count(), 2), c.out_shape(), c.dtype, stream);
  r.out = empty_on(stream, c.out_shape(), c.dtype);
  r.log_sum = empty_on(stream, {c.batch, c.heads, c.tokens});
  r.d_qkv = empty_on(stream, c.qkv_shape(), c.dtype);
  const int heads = static_cast<int>(c.heads);
  ops::causal_attention(r.out, r.log_sum, r.qkv, heads, mask, stream);
  ops::causal_attention_backward(r.d_qkv, r.d_out, r.out, r.log_sum, r.qkv, heads, mask, stream);
  return r;
}

void expect_near(const Values& got, const Values& expected, double tolerance, const char* what) {
  double most = 1e-30;
  for (const double e : expected) most = std::max(most, std::abs(e));
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], expected[i], tolerance * most) << what << ' ' << i;
}

void expect_right(const Case& c, const ops::DropoutMask& mask, const Stream& stream) {
  SCOPED_TRACE(
      concat(c.batch, " x ", c.tokens, " tokens, ", c.heads, " heads of ", c.size, ", ", name(c.dtype)));
  const Tensors r = run(c, mask, stream);
  const Gradient e =
      expected(c, from_device(r.qkv, stream), from_device(r.d_out, stream), factors_of(c, mask));
  // Probabilities and gradients of scores are rounded to the type in between, and so is out.
  const double unit = c.dtype == DType::f32 ? 2e-6 : c.dtype == DType::f16 ? 1e-3 : 8e-3;
  expect_near(from_device(r.log_sum, stream), e.log_sum, 2e-6, "log_sum");
  expect_near(from_device(r.out, stream), e.out, 2 * unit, "out");
  expect_near(from_device(r.d_qkv, stream), e.d_qkv, 4 * unit, "d_qkv");
}

TEST_F(Attention, EveryLengthOfF32) {
  for (const std::size_t tokens : {1, 2, 31, 32, 33, 64, 65, 130})
    expect_right({1, tokens, 2, 16, DType::f32}, {}, stream);
}

TEST_F(Attention, EveryHeadSizeOfF32) {
  for (const std::size_t size : {1, 5, 8, 64, 80, 128, 256})
    expect_right({2, 35, 2, size, DType::f32}, {}, stream);
}

TEST_F(Attention, OddHeadSizesOf16Bits) {
  for (const DType t : {DType::f16, DType::bf16})
    for (const std::size_t size : {8, 80}) expect_right({1, 67, 2, size, t}, {}, stream);
}

/// Tensor cores.
TEST_F(Attention, EveryLengthOfHeadsOf64) {
  for (const std::size_t tokens : {1, 17, 32, 64, 65, 130})
    expect_right({1, tokens, 1, 64, tokens % 2 ? DType::f16 : DType::bf16}, {}, stream);
}

TEST_F(Attention, SeveralHeadsAndSequencesOf64) {
  expect_right({2, 66, 2, 64, DType::f16}, {}, stream);
  expect_right({2, 34, 3, 64, DType::bf16}, {}, stream);
}

TEST_F(Attention, HeadsOf128) {
  for (const DType t : {DType::f16, DType::bf16}) expect_right({1, 68, 2, 128, t}, {}, stream);
}

TEST_F(Attention, LargeScores) {
  for (const DType t : {DType::f32, DType::bf16}) {
    const Case c{1, 66, 1, 64, t, 30};
    const Tensors r = run(c, {}, stream);
    expect_near(from_device(r.out, stream),
                reference::causal_attention(from_device(r.qkv, stream), 1, c.tokens, c.size, 1),
                t == DType::f32 ? 1e-4 : 2e-2, "out");
    for (const double d : from_device(r.d_qkv, stream)) ASSERT_TRUE(std::isfinite(d));
  }
}

TEST_F(Attention, DropsWhatTheHostDrops) {
  const ops::DropoutMask mask{0.25f, 5, (1ull << 34) - 3};
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) expect_right({2, 45, 2, 16, t}, mask, stream);
  expect_right({1, 37, 1, 64, DType::bf16}, mask, stream);
}

/// Forward and backward read the seed when they run.
TEST_F(Attention, ReadsItsSeedLate) {
  const Case c{2, 45, 2, 16, DType::f32};
  const auto seed = std::reinterpret_pointer_cast<std::uint64_t>(allocate_on(stream.device(), 8));
  const std::uint64_t five = 5;
  memcpy_async(seed.get(), &five, sizeof five, stream);
  const Tensors late = run(c, {.p = 0.25f, .seed = 1, .seed_at = seed.get()}, stream),
                early = run(c, {.p = 0.25f, .seed = five}, stream);
  EXPECT_EQ(from_device(late.out, stream), from_device(early.out, stream));
  EXPECT_EQ(from_device(late.d_qkv, stream), from_device(early.d_qkv, stream));
}

/// Data that is not aligned to 16 bytes uses other kernels.
TEST_F(Attention, AnywhereInMemory) {
  const Case c{1, 20, 1, 64, DType::bf16};
  const Tensors r = run(c, {}, stream);
  const Tensor memory = empty_on(stream, {3 * c.count() + 1}, c.dtype),
               out = empty_on(stream, c.out_shape(), c.dtype);
  const Tensor moved = memory.view(1, c.qkv_shape());
  memcpy_async(moved.raw(), r.qkv.raw(), r.qkv.bytes(), stream);
  ops::causal_attention(out, r.log_sum, moved, 1, {}, stream);
  expect_near(from_device(out, stream), from_device(r.out, stream), 1.6e-2, "out");
}

TEST_F(Attention, IsDeterministic) {
  for (const Case& c : {Case{1, 70, 2, 64, DType::bf16}, Case{1, 70, 2, 24, DType::f32}}) {
    std::vector<Values> first;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      reschedule(seed);
      const Tensors r = run(c, {}, stream);
      const std::vector<Values> now{from_device(r.out, stream), from_device(r.log_sum, stream),
                                    from_device(r.d_qkv, stream)};
      if (first.empty()) first = now;
      EXPECT_EQ(now, first);
    }
  }
}

TEST_F(Attention, WhatDoesNotFitIsRefused) {
  if (on_host()) GTEST_SKIP() << "the limits are those of devices";
  const Tensor qkv = empty_on(stream, {2, 3, 24}), out = empty_on(stream, {2, 3, 8});
  const Tensor log_sum = empty_on(stream, {2, 2, 3});
  EXPECT_THROW(ops::causal_attention(out, log_sum, qkv, 3, {}, stream), Error);
  EXPECT_THROW(ops::causal_attention(out, empty_on(stream, {2, 2, 4}), qkv, 2, {}, stream), Error);
  const auto refused = [&](const Tensor& o, const Tensor& l, const Tensor& x, int heads, const char* words) {
    try {
      ops::causal_attention(o, l, x, heads, {}, stream);
      ADD_FAILURE() << "accepted: " << words;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  refused(out, log_sum, empty_on(stream, {2, 3, 24}, DType::bf16), 2, "they must be of one type");
  refused(out, empty_on(stream, {2, 2, 3}, DType::f16), qkv, 2, "log_sum is f16");
  refused(empty_on(stream, {1, 1, 257}), empty_on(stream, {1, 1, 1}), empty_on(stream, {1, 1, 771}), 1,
          "at most 256");
}

}  // namespace
}  // namespace rz::test
