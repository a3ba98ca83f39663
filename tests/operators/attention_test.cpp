// Runs: ci computes host operators

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tensor/attention_ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using Attention = OnDevice;

/// A call: by default causal self-attention of the columns of one tensor.
struct Case {
  std::size_t batch, tokens, heads, size;
  DType dtype;
  double range = 1;
  std::size_t kv_heads = 0, rows = 0, keys = 0;  ///< 0: as many as heads, tokens, rows
  bool causal = true;
  std::size_t past = 0, window = 0;
  float scale = 0;
  std::vector<std::int32_t> counts = {};
  std::size_t gap =
      0;  ///< elements between rows of q, k, v; 0: they are columns of one tensor where they can
  std::vector<std::int32_t> starts = {};  ///< document_starts

  std::size_t key_heads() const { return kv_heads ? kv_heads : heads; }
  std::size_t key_rows() const { return rows ? rows : tokens; }
  std::size_t used() const { return keys ? keys : key_rows(); }
  std::size_t channels() const { return heads * size; }
  std::size_t key_channels() const { return key_heads() * size; }
  bool fused() const { return gap == 0 && key_heads() == heads && key_rows() == tokens; }
  Shape q_shape() const { return {batch, tokens, channels()}; }
  Shape k_shape() const { return {batch, key_rows(), key_channels()}; }
  Shape log_sum_shape() const { return {batch, heads, tokens}; }

  bool exists(std::size_t b, std::size_t j) const {
    return j < used() && (counts.empty() || j < static_cast<std::size_t>(counts[b]));
  }
  /// Whether query i of sequence b attends to key j.
  bool sees(std::size_t b, std::size_t i, std::size_t j) const {
    const std::size_t position = past + i;
    if (!starts.empty() && j < static_cast<std::size_t>(starts[b * tokens + i])) return false;
    return exists(b, j) && (!causal || (j <= position && (window == 0 || j + window > position)));
  }
  std::string text() const {
    return concat(batch, " x ", tokens, " tokens, ", used(), " of ", key_rows(), " keys, ", heads, " over ",
                  key_heads(), " heads of ", size, ", ", name(dtype), causal ? ", causal" : "", ", past ",
                  past, ", window ", window, ", scale ", scale, ", gap ", gap,
                  counts.empty() ? "" : concat(", counts ", counts[0], "..."),
                  starts.empty() ? "" : ", documents");
  }
};

/// Adds documents, of which one ends after about one token in `length`.
void pack_documents(Case& c, std::mt19937& random, std::size_t length) {
  c.starts.clear();
  for (std::size_t n = 0; n < c.batch * c.tokens; ++n) {
    const std::size_t position = c.past + n % c.tokens;
    if (n % c.tokens == 0)
      c.starts.push_back(static_cast<std::int32_t>(random() % (position + 1)));
    else
      c.starts.push_back(random() % length ? c.starts.back() : static_cast<std::int32_t>(position));
  }
}

struct Inputs {
  Values q, k, v, d_out;
};
struct Results {
  Values out, log_sum, d_q, d_k, d_v;
  bool operator==(const Results&) const = default;
};

/// By definition, in double. `factors` of the probabilities [B, H, T, keys], or none.
Results expected(const Case& c, const Inputs& in, const Values& factors) {
  Results r{Values(in.q.size()), {}, Values(in.q.size()), Values(in.k.size()), Values(in.k.size())};
  const double scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.size));
  for (std::size_t b = 0; b < c.batch; ++b)
    for (std::size_t h = 0; h < c.heads; ++h)
      for (std::size_t i = 0; i < c.tokens; ++i) {
        const std::size_t at = (b * c.tokens + i) * c.channels() + h * c.size;
        const std::size_t key_head = h / (c.heads / c.key_heads());
        const auto key = [&](std::size_t j) {
          return (b * c.key_rows() + j) * c.key_channels() + key_head * c.size;
        };
        std::vector<std::size_t> seen;
        for (std::size_t j = 0; j < c.used(); ++j)
          if (c.sees(b, i, j)) seen.push_back(j);
        Values p, factor, d_p;
        for (const std::size_t j : seen) {
          p.push_back(std::inner_product(&in.q[at], &in.q[at] + c.size, &in.k[key(j)], 0.0) * scale);
          const std::size_t decision = ((b * c.heads + h) * c.tokens + i) * c.used() + j;
          factor.push_back(factors.empty() ? 1 : factors[decision]);
        }
        const double top = seen.empty() ? 0 : *std::max_element(p.begin(), p.end());
        double sum = 0, delta = 0;
        for (double& e : p) sum += e = std::exp(e - top);
        r.log_sum.push_back(top + std::log(sum));
        for (std::size_t n = 0; n < seen.size(); ++n) {
          p[n] /= sum;
          d_p.push_back(0);
          for (std::size_t d = 0; d < c.size; ++d) {
            r.out[at + d] += p[n] * factor[n] * in.v[key(seen[n]) + d];
            r.d_v[key(seen[n]) + d] += p[n] * factor[n] * in.d_out[at + d];
            d_p[n] += in.d_out[at + d] * in.v[key(seen[n]) + d] * factor[n];
          }
          delta += p[n] * d_p[n];
        }
        for (std::size_t n = 0; n < seen.size(); ++n)
          for (std::size_t d = 0; d < c.size; ++d) {
            const double d_score = p[n] * (d_p[n] - delta) * scale;
            r.d_q[at + d] += d_score * in.k[key(seen[n]) + d];
            r.d_k[key(seen[n]) + d] += d_score * in.q[at + d];
          }
      }
  return r;
}

/// The result of the host's dropout on ones.
Values factors_of(const Case& c, const ops::DropoutMask& mask) {
  if (mask.p == 0) return {};
  const Tensor ones = Tensor::empty({c.batch * c.heads * c.tokens * c.used()});
  ops::fill(ones, 1, {});
  ops::dropout(ones, ones, mask, {});
  return values_of(ones);
}

/// Rows in memory with `gap` more columns, which are `filler`.
Values spread(const Values& values, std::size_t columns, std::size_t gap, double filler) {
  Values all(values.size() / columns * (columns + gap), filler);
  for (std::size_t i = 0; i < values.size(); ++i)
    all[i / columns * (columns + gap) + i % columns] = values[i];
  return all;
}

struct Tensors {
  Tensor q, k, v, d_out, out, log_sum, d_q, d_k, d_v;
  std::vector<Tensor> gradients;  ///< whole, with their gaps
  ops::AttentionOptions options;
};

ops::AttentionOptions options_of(const Case& c, const Stream& stream) {
  ops::AttentionOptions o{
      static_cast<int>(c.heads), static_cast<int>(c.kv_heads), c.causal, c.past, c.window, c.scale, c.keys};
  if (!c.counts.empty()) o.key_counts = to_device(c.counts, Shape{c.batch}, stream);
  if (!c.starts.empty()) o.document_starts = to_device(c.starts, Shape{c.batch, c.tokens}, stream);
  return o;
}

/// Keys that do not exist are NaN.
Inputs inputs_of(const Case& c) {
  Inputs in{random_values(c.q_shape().count(), 1, c.range), random_values(c.k_shape().count(), 2, c.range),
            random_values(c.k_shape().count(), 3, c.range), random_values(c.q_shape().count(), 4)};
  for (std::size_t n = 0; n < in.k.size(); ++n)
    if (!c.exists(n / c.key_channels() / c.key_rows(), n / c.key_channels() % c.key_rows()))
      in.k[n] = in.v[n] = NAN;
  return in;
}

Tensors tensors_of(const Case& c, const Inputs& in, const Stream& stream) {
  Tensors t;
  const auto rows = [&](const Values& values, const Shape& shape) {
    const std::size_t columns = shape[-1];
    return to_device(spread(values, columns, c.gap, NAN), shape.with_last(columns + c.gap), c.dtype, stream);
  };
  if (c.fused()) {
    const std::size_t n = c.channels();
    Values all(3 * in.q.size());
    for (std::size_t i = 0; i < in.q.size(); ++i) {
      double* const row = &all[i / n * 3 * n + i % n];
      row[0] = in.q[i], row[n] = in.k[i], row[2 * n] = in.v[i];
    }
    const Shape shape = c.q_shape().with_last(3 * n);
    const Tensor qkv = to_device(all, shape, c.dtype, stream), d = to_device(all, shape, c.dtype, stream);
    t.q = qkv.columns(0, n), t.k = qkv.columns(n, n), t.v = qkv.columns(2 * n, n);
    t.d_q = d.columns(0, n), t.d_k = d.columns(n, n), t.d_v = d.columns(2 * n, n);
  } else {
    const auto columns = [](const Tensor& whole, const Shape& shape) { return whole.columns(0, shape[-1]); };
    t.q = columns(rows(in.q, c.q_shape()), c.q_shape());
    t.k = columns(rows(in.k, c.k_shape()), c.k_shape());
    t.v = columns(rows(in.v, c.k_shape()), c.k_shape());
    for (const Shape& shape : {c.q_shape(), c.k_shape(), c.k_shape()})
      t.gradients.push_back(rows(Values(shape.count(), NAN), shape));
    t.d_q = columns(t.gradients[0], c.q_shape()), t.d_k = columns(t.gradients[1], c.k_shape());
    t.d_v = columns(t.gradients[2], c.k_shape());
  }
  t.d_out = to_device(in.d_out, c.q_shape(), c.dtype, stream);
  t.out = to_device(Values(in.q.size(), NAN), c.q_shape(), c.dtype, stream);
  t.log_sum = to_device(Values(c.log_sum_shape().count(), NAN), c.log_sum_shape(), DType::f32, stream);
  t.options = options_of(c, stream);
  return t;
}

Results run(const Tensors& t, const ops::DropoutMask& mask, const Stream& stream) {
  ops::attention(t.out, t.log_sum, t.q, t.k, t.v, t.options, mask, stream);
  ops::attention_backward(t.d_q, t.d_k, t.d_v, t.d_out, t.out, t.log_sum, t.q, t.k, t.v, t.options, mask,
                          stream);
  return {from_device(t.out, stream), from_device(t.log_sum, stream), from_device(t.d_q, stream),
          from_device(t.d_k, stream), from_device(t.d_v, stream)};
}
Results run(const Case& c, const ops::DropoutMask& mask, const Stream& stream) {
  return run(tensors_of(c, inputs_of(c), stream), mask, stream);
}

/// Within tolerance · the largest magnitude of `expected` and of `others`.
void expect_near(const Values& got, const Values& expected, double tolerance, const char* what,
                 const Values& others = {}) {
  double largest = 1e-30;
  for (const double e : others) largest = std::max(largest, std::abs(e));
  for (const double e : expected)
    if (std::isfinite(e)) largest = std::max(largest, std::abs(e));
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isfinite(expected[i])) {
      ASSERT_NEAR(got[i], expected[i], tolerance * largest) << what << ' ' << i;
    } else {
      ASSERT_EQ(got[i], expected[i]) << what << ' ' << i;
    }
  }
}

/// `unit_of_f32`: of the errors in f32.
void expect_right(const Case& c, const ops::DropoutMask& mask, const Stream& stream,
                  double unit_of_f32 = 2e-6) {
  SCOPED_TRACE(c.text());
  const Tensors t = tensors_of(c, inputs_of(c), stream);
  const Results r = run(t, mask, stream);
  const Inputs in{from_device(t.q, stream), from_device(t.k, stream), from_device(t.v, stream),
                  from_device(t.d_out, stream)};
  const Results e = expected(c, in, factors_of(c, mask));
  // Probabilities and gradients of scores are rounded to the type in between, and so is out.
  const double unit = c.dtype == DType::f32 ? unit_of_f32 : c.dtype == DType::f16 ? 1e-3 : 8e-3;
  expect_near(r.log_sum, e.log_sum, 2e-6, "log_sum");
  expect_near(r.out, e.out, 2 * unit, "out");
  expect_near(r.d_q, e.d_q, 4 * unit, "d_q", e.d_v);
  expect_near(r.d_k, e.d_k, 4 * unit, "d_k", e.d_v);
  expect_near(r.d_v, e.d_v, 4 * unit, "d_v");
  for (const Tensor& whole : t.gradients) {
    const Values all = from_device(whole, stream);
    const std::size_t width = whole.shape()[-1];
    for (std::size_t i = 0; i < all.size(); ++i)
      ASSERT_EQ(std::isnan(all[i]), i % width >= width - c.gap) << "between rows: " << i;
  }
}

/// One token, one head, two tiles, a tile and one row, heads of more than a tile; with dropout and without.
TEST_F(Attention, IsCloseToDoubleOnTheHost) {
  if (!on_host()) GTEST_SKIP() << "devices add in another order";
  for (const Case& c : {Case{1, 1, 1, 3, DType::f32},
                        {2, 5, 2, 3, DType::f32},
                        {3, 17, 4, 3, DType::f32},
                        {1, 64, 2, 4, DType::f32},
                        {1, 65, 2, 3, DType::f32},
                        {2, 131, 1, 4, DType::f32},
                        {1, 6, 2, 70, DType::f32},
                        {1, 3, 1, 70, DType::f32}})
    for (const std::uint64_t seed : {3, 2})
      for (const float p : {0.0f, 0.25f}) {
        reschedule(seed);  // 1 thread, and 3
        Case large = c;
        large.range = 2;
        expect_right(large, {p, 5, (1ull << 34) - 3}, stream, 1e-6);
      }
}

/// The gradients of the definition are its differences.
TEST_F(Attention, TheDefinitionHasTheGradientsOfItsDifferences) {
  if (!on_host()) GTEST_SKIP() << "the definition is that of the host";
  Case c{2, 5, 4, 3, DType::f32, 2};
  c.kv_heads = 2, c.rows = 7, c.past = 1, c.window = 4, c.gap = 1;
  const Inputs in = inputs_of(c);
  for (const float p : {0.0f, 0.25f}) {
    const Values factors = factors_of(c, {p, 5, 7});
    const Results e = expected(c, in, factors);
    const auto expect = [&](Values Inputs::*of, const Values& gradient) {
      const auto out = [&](const Values& at) {
        Inputs moved = in;
        moved.*of = at;
        return expected(c, moved, factors).out;
      };
      expect_near(gradient, numeric_gradient(out, in.*of, in.d_out), 1e-7, "gradient of the definition");
    };
    expect(&Inputs::q, e.d_q), expect(&Inputs::k, e.d_k), expect(&Inputs::v, e.d_v);
  }
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

TEST_F(Attention, GroupsAndAllKeysOnTensorCores) {
  for (const bool causal : {false, true})
    for (const std::size_t tokens : {1, 33, 70, 129}) {
      Case c{tokens < 70 ? 2u : 1u, tokens, 4, 64, tokens % 2 ? DType::bf16 : DType::f16};
      c.causal = causal, c.kv_heads = 2, c.gap = 8;
      expect_right(c, {}, stream);
    }
  Case c{1, 69, 3, 128, DType::bf16};
  c.causal = false, c.kv_heads = 1, c.scale = 0.25f;
  expect_right(c, {}, stream);
  c.dtype = DType::f16, c.causal = true, c.gap = 16;
  expect_right(c, {}, stream);
}

/// The heads of one rank of three.
TEST_F(Attention, DropoutOfSomeHeadsIsTheirPartOfTheMask) {
  const Case c{2, 35, 2, 16, DType::f32};
  const std::uint64_t run = c.heads * c.tokens * c.used();
  expect_right(c, {.p = 0.25f, .seed = 9, .offset = 5 + run, .run = run, .stride = 3 * run}, stream);
}

/// A few queries of a cache that has more room than keys.
TEST_F(Attention, FewQueriesOfManyKeys) {
  std::mt19937 random(5);
  for (const DType t : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t tokens : {1, 2, 4})
      for (const std::size_t keys : {5, 63, 64, 133}) {
        if (emulated_device && (tokens + keys) % 3 != 0) continue;
        Case c{2, tokens, 6, keys == 64 ? 64u : keys == 133 ? 130u : 11u, t};
        c.kv_heads = keys == 63 ? 6 : keys == 5 ? 1 : 2;
        c.rows = keys + 3, c.keys = keys, c.past = keys - tokens, c.gap = 5;
        expect_right(c, {}, stream);
        c.window = 3;
        expect_right(c, {}, stream);
        c.counts = {static_cast<std::int32_t>(keys), 2};
        expect_right(c, {}, stream);
        c.window = 0, c.causal = false;
        expect_right(c, {}, stream);
        c.causal = true, c.counts.clear();
        pack_documents(c, random, 2);
        expect_right(c, {}, stream);
      }
}

/// The first query of a document, and others of the same tile, see none of the tiles before it.
TEST_F(Attention, Documents) {
  std::mt19937 random(3);
  for (const DType t : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t size : {64, 128, 24})
      for (const std::size_t tokens : {33, 129, 300}) {
        if (emulated_device && (tokens == 300 ? t != DType::bf16 || size != 64 : size == 24)) continue;
        Case c{tokens == 33 ? 2u : 1u, tokens, 2, size, t};
        c.kv_heads = tokens == 129 ? 1 : 2, c.gap = 8;
        pack_documents(c, random, tokens == 300 ? 90 : 20);
        expect_right(c, {}, stream);
        if (tokens == 300) continue;
        c.starts.assign(c.starts.size(), 0);
        for (std::size_t n = 0; n < c.starts.size(); ++n)  // of whole tiles, and of one token
          c.starts[n] = static_cast<std::int32_t>(n % tokens < 96 ? n % tokens / 32 * 32 : n % tokens);
        expect_right(c, {}, stream);
      }
}

/// Documents of a text have the bits of those of another text.
TEST_F(Attention, OneDocumentIsAWholeText) {
  for (const DType t : {DType::f32, DType::bf16}) {
    Case c{1, 130, 2, 64, t};
    const Results whole = run(c, {}, stream);
    c.starts.assign(130, 0);
    EXPECT_EQ(run(c, {}, stream), whole);
  }
}

TEST_F(Attention, EveryOptionAtRandom) {
  std::mt19937 random(7);
  const auto pick = [&](std::initializer_list<std::size_t> values) {
    return values.begin()[random() % values.size()];
  };
  const int cases = on_host() ? 150 : 60;
  for (int n = 0; n < cases; ++n) {
    Case c{pick({1, 2, 3}), pick({1, 2, 3, 5, 31, 64, 65, 90}), pick({1, 2, 4, 6}),
           pick({1, 3, 8, 17, 40, 64, 70}),
           std::array{DType::f32, DType::f16, DType::bf16}[static_cast<std::size_t>(n) % 3]};
    c.kv_heads = c.heads == 6 ? pick({1, 2, 3, 6}) : c.heads == 4 ? pick({1, 2, 4}) : pick({0, 1});
    c.rows = pick({c.tokens, c.tokens, 1, 7, 64, 66, 129, 150});
    if (random() % 3 == 0) c.keys = 1 + random() % c.rows;
    c.causal = random() % 3 != 0;
    if (random() % 2 == 0) c.past = random() % (c.used() + 1);
    if (random() % 3 == 0) c.past = c.used() > c.tokens ? c.used() - c.tokens : 0;
    if (c.causal && random() % 2 == 0) c.window = 1 + random() % 80;
    if (random() % 3 == 0) c.scale = 0.3f;
    if (random() % 3 == 0)
      for (std::size_t b = 0; b < c.batch; ++b)
        c.counts.push_back(static_cast<std::int32_t>(random() % (c.used() + 1)));
    c.gap = pick({0, 3, 8});
    if (c.causal && random() % 3 == 0) pack_documents(c, random, pick({3, 30}));
    const ops::DropoutMask mask{random() % 4 == 0 ? 0.25f : 0.0f, 5, (1ull << 34) - 3};
    expect_right(c, mask, stream);
    if (HasFatalFailure()) return;
  }
}

TEST_F(Attention, LargeScores) {
  const Case largest{1, 70, 1, 4, DType::f32, 100};
  const Inputs numbers = inputs_of(largest);
  expect_near(run(largest, {}, stream).out, expected(largest, numbers, {}).out, 1e-3, "out");
  for (const DType t : {DType::f32, DType::bf16}) {
    const Case c{1, 66, 1, 64, t, 30};
    const Tensors tensors = tensors_of(c, inputs_of(c), stream);
    const Results r = run(tensors, {}, stream);
    const Inputs in{from_device(tensors.q, stream), from_device(tensors.k, stream),
                    from_device(tensors.v, stream), from_device(tensors.d_out, stream)};
    expect_near(r.out, expected(c, in, {}).out, t == DType::f32 ? 1e-4 : 2e-2, "out");
    for (const Values* gradient : {&r.d_q, &r.d_k, &r.d_v})
      for (const double d : *gradient) ASSERT_TRUE(std::isfinite(d));
  }
}

TEST_F(Attention, DropsWhatTheHostDrops) {
  const ops::DropoutMask mask{0.25f, 5, (1ull << 34) - 3};
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) expect_right({2, 45, 2, 16, t}, mask, stream);
  expect_right({1, 37, 1, 64, DType::bf16}, mask, stream);
  Case cached{2, 3, 4, 16, DType::f32};
  cached.kv_heads = 2, cached.rows = 70, cached.keys = 67, cached.past = 64;
  expect_right(cached, mask, stream);
}

/// Forward and backward read the seed when they run.
TEST_F(Attention, ReadsItsSeedLate) {
  const Case c{2, 45, 2, 16, DType::f32};
  const auto seed = std::reinterpret_pointer_cast<std::uint64_t>(allocate_on(stream.device(), 8));
  const std::uint64_t five = 5;
  memcpy_async(seed.get(), &five, sizeof five, stream);
  EXPECT_EQ(run(c, {.p = 0.25f, .seed = 1, .seed_at = seed.get()}, stream),
            run(c, {.p = 0.25f, .seed = five}, stream));
}

/// Data that is not aligned to 16 bytes uses other kernels.
TEST_F(Attention, AnywhereInMemory) {
  const Case c{1, 20, 1, 64, DType::bf16};
  Tensors t = tensors_of(c, inputs_of(c), stream);
  const Results aligned = run(t, {}, stream);
  const auto moved = [&](Tensor& tensor) {
    const Tensor there = empty_on(stream, {tensor.count() + 1}, c.dtype).view(1, tensor.shape());
    ops::copy(there, tensor, stream);
    tensor = there;
  };
  const Tensors before = t;
  for (Tensor Tensors::*const one : {&Tensors::q, &Tensors::k, &Tensors::v, &Tensors::d_q, &Tensors::d_out}) {
    moved(t.*one);
    const Results r = run(t, {}, stream);
    expect_near(r.out, aligned.out, 1.6e-2, "out");
    expect_near(r.d_k, aligned.d_k, 3.2e-2, "d_k");
    t = before;
  }
}

/// Columns of one tensor, or tensors of their own.
TEST_F(Attention, StridesChangeNoBit) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const std::size_t size : {16, 64}) {
      Case c{1, 67, 2, size, t};
      const Results fused = run(c, {}, stream);
      for (const std::size_t gap : {8, 24}) {
        c.gap = gap;
        EXPECT_EQ(run(c, {}, stream), fused);
      }
    }
}

/// Each query head attends as if its key head were its own; gradients of key heads are sums over the group.
TEST_F(Attention, HeadsOfAGroupReadTheSameKeys) {
  for (const std::size_t tokens : {2, 67}) {
    Case grouped{1, tokens, 6, 16, DType::f32}, all = grouped;
    grouped.kv_heads = 2, grouped.rows = all.rows = 70, grouped.past = all.past = 3;
    grouped.gap = all.gap = 4;
    Inputs in = inputs_of(grouped);
    const Results g = run(tensors_of(grouped, in, stream), {}, stream);
    const auto repeated = [&](const Values& values) {
      Values wide(70 * all.channels());
      for (std::size_t n = 0; n < wide.size(); ++n)
        wide[n] = values[n / 96 * 32 + n % 96 / 16 / 3 * 16 + n % 16];
      return wide;
    };
    in.k = repeated(in.k), in.v = repeated(in.v);
    const Results a = run(tensors_of(all, in, stream), {}, stream);
    EXPECT_EQ(g.out, a.out);
    EXPECT_EQ(g.log_sum, a.log_sum);
    EXPECT_EQ(g.d_q, a.d_q);
    Values sums(g.d_k.size());
    for (std::size_t n = 0; n < a.d_k.size(); ++n)
      sums[n / 96 * 32 + n % 96 / 16 / 3 * 16 + n % 16] += a.d_k[n];
    expect_near(g.d_k, sums, 1e-6, "d_k");
  }
}

/// Scores of 0 and whole numbers: means of 1, 2, 4 … keys are exact in every dtype.
TEST_F(Attention, EqualScoresAreMeans) {
  for (const DType t : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t tokens : {1, 2, 70}) {
      Case c{1, tokens, 2, 64, t};
      c.kv_heads = 1, c.rows = 72, c.past = 72 - tokens, c.window = 4, c.gap = 8;
      Inputs in = inputs_of(c);
      std::fill(in.q.begin(), in.q.end(), 0);
      for (std::size_t n = 0; n < in.v.size(); ++n) in.v[n] = static_cast<double>(n / 64 % 7 * 4 + n % 3);
      const Results r = run(tensors_of(c, in, stream), {}, stream);
      for (std::size_t n = 0; n < r.out.size(); ++n) {
        const std::size_t last = c.past + n / 128;
        if (last < 3) continue;  // a mean of 3
        double mean = 0;
        for (std::size_t j = last - 3; j <= last; ++j) mean += in.v[j * 64 + n % 64] / 4;
        ASSERT_EQ(r.out[n], mean) << n;
      }
    }
}

/// With a window of one key, out is that key's value, and log_sum its score.
TEST_F(Attention, AWindowOfOneIsACopy) {
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) {
    Case c{2, 66, 2, 16, t};
    c.window = 1;
    const Tensors tensors = tensors_of(c, inputs_of(c), stream);
    const Results r = run(tensors, {}, stream);
    EXPECT_EQ(r.out, from_device(tensors.v, stream));
    EXPECT_EQ(r.d_v, from_device(tensors.d_out, stream));
  }
}

/// On a device starts are not checked: each query attends to itself at least.
TEST_F(Attention, StartsOfADeviceAreClamped) {
  if (on_host()) GTEST_SKIP() << "the host refuses them";
  for (const DType t : {DType::f32, DType::bf16}) {
    Case c{1, 70, 1, 64, t};
    c.starts.assign(70, -3);
    const Results whole = run(c, {}, stream);
    c.starts.clear();
    EXPECT_EQ(whole, run(c, {}, stream));
    c.starts.assign(70, 1000);
    const Tensors tensors = tensors_of(c, inputs_of(c), stream);
    EXPECT_EQ(run(tensors, {}, stream).out, from_device(tensors.v, stream));
  }
}

TEST_F(Attention, AQueryWithoutAKeyIsZero) {
  for (const DType t : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t tokens : {2, 70}) {
      Case c{2, tokens, 2, 16, t};
      c.rows = 70, c.causal = false, c.counts = {0, 3}, c.gap = 1;
      const Results r = run(c, {}, stream);
      const std::size_t half = r.out.size() / 2;
      for (std::size_t n = 0; n < half; ++n) ASSERT_EQ(r.out[n], 0) << n;
      for (std::size_t n = 0; n < half; ++n) ASSERT_EQ(r.d_q[n], 0) << n;
      for (std::size_t n = 0; n < r.log_sum.size() / 2; ++n) ASSERT_EQ(r.log_sum[n], -INFINITY) << n;
      EXPECT_NE(r.out[half], 0);
    }
}

/// As a key that has the largest score must have no weight, what a query sees is decided before the maximum.
TEST_F(Attention, HiddenKeysDoNotShiftScores) {
  Case c{1, 40, 1, 8, DType::f32};
  c.window = 2, c.gap = 1;
  Inputs in = inputs_of(c);
  std::fill_n(in.k.begin(), 8, 1e4);
  const Tensors t = tensors_of(c, in, stream);
  expect_near(run(t, {}, stream).out, expected(c, in, {}).out, 4e-6, "out");
}

TEST_F(Attention, IsDeterministic) {
  Case grouped{1, 67, 6, 24, DType::f32};
  grouped.kv_heads = 2;
  Case wide = grouped;
  wide.dtype = DType::bf16, wide.causal = false, wide.counts = {33};
  Case few{2, 3, 6, 24, DType::f32};
  few.kv_heads = 3, few.rows = 200, few.past = 197;
  Case cores{1, 70, 4, 64, DType::bf16};
  cores.kv_heads = 1;
  for (const Case& c :
       {Case{1, 70, 2, 64, DType::bf16}, Case{1, 70, 2, 24, DType::f32}, grouped, wide, few, cores}) {
    SCOPED_TRACE(c.text());
    std::vector<Results> first;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      reschedule(seed);
      const Results now = run(c, {}, stream);
      if (first.empty()) first.push_back(now);
      EXPECT_EQ(now, first[0]);
    }
  }
}

TEST_F(Attention, WhatDoesNotFitIsRefused) {
  const auto refused = [](const auto& call, const char* words) {
    expect_refused(call, Errc::invalid_argument, {words});
  };
  const auto make = [&](std::size_t batch, std::size_t tokens, std::size_t channels, DType t = DType::f32) {
    return empty_on(stream, {batch, tokens, channels}, t);
  };
  const Tensor q = make(2, 3, 8), k = make(2, 5, 4), v = make(2, 5, 4), out = make(2, 3, 8),
               log_sum = make(2, 4, 3);
  const ops::AttentionOptions right{.heads = 4, .kv_heads = 2, .causal = true};
  const auto call = [&](const auto& change, const Tensor& o, const Tensor& l, const Tensor& keys) {
    return [&, o, l, keys, change] {
      ops::AttentionOptions options = right;
      change(options);
      ops::attention(o, l, q, keys, v, options, {}, stream);
    };
  };
  const auto nothing = [](ops::AttentionOptions&) {};
  EXPECT_NO_THROW(call(nothing, out, log_sum, k)());
  refused(call([](auto& o) { o.heads = 3; }, out, log_sum, k), "attention with 3 heads and 2 key heads");
  refused(call([](auto& o) { o.kv_heads = 3; }, out, log_sum, k), "attention with 4 heads and 3 key heads");
  refused(call([](auto& o) { o.kv_heads = 0; }, out, log_sum, k), "k [2, 5, 4]");
  refused(call([](auto& o) { o.keys = 6; }, out, log_sum, k),
          "attention with 4 heads and 2 key heads, 6 keys");
  refused(call([](auto& o) { o.causal = false, o.window = 2; }, out, log_sum, k), "a window of 2 keys");
  refused(call(nothing, out, make(2, 4, 4), k), "log_sum [2, 4, 4]");
  refused(call(nothing, out, make(2, 4, 3, DType::f16), k), "log_sum is f16");
  refused(call(nothing, make(2, 3, 8, DType::bf16), log_sum, k), "out is bf16, and must be f32");
  refused(call(nothing, make(2, 3, 9).columns(0, 8), log_sum, k), "needs contiguous rows");
  refused(call(nothing, out, log_sum, make(2, 4, 4)), "k [2, 4, 4]");
  const auto counted = [&](const Tensor& counts) {
    return call([counts](auto& o) { o.key_counts = counts; }, out, log_sum, k);
  };
  refused(counted(to_device(std::vector<std::int32_t>{1}, {1}, stream)), "needs 2 i32");
  const auto documents = [&](std::vector<std::int32_t> starts, std::size_t past, bool causal = true) {
    const Tensor t = to_device(starts, Shape{starts.size()}, stream);
    return call([=](auto& o) { o.document_starts = t, o.past = past, o.causal = causal; }, out, log_sum, k);
  };
  refused(documents({0, 0, 0, 0, 0, 0}, 0, false), "document_starts need `causal`");
  refused(documents({0, 0, 0}, 0), "needs 6 i32: document_starts");
  EXPECT_NO_THROW(documents({0, 1, 2, 2, 3, 4}, 2)());
  if (on_host()) {
    refused(documents({0, 1, 2, 2, 3, 3}, 1), "document_starts[1, 0] = 2");
    refused(documents({0, 1, 0, 0, 0, 0}, 0), "document_starts[0, 2] = 0");
    refused(documents({0, 1, 3, 0, 0, 0}, 0), "document_starts[2] = 3");
    refused(counted(to_device(std::vector<std::int32_t>{5, 6}, {2}, stream)), "key_counts[1] = 6");
  } else {
    refused(counted(Tensor::zeros({2}, DType::i32)), "key_counts are on host");
    const Tensor starts = Tensor::zeros({2, 3}, DType::i32);
    refused(call([&](auto& o) { o.document_starts = starts; }, out, log_sum, k),
            "document_starts are on host");
    const Tensor wide = make(1, 1, 257), one = make(1, 1, 1);
    expect_refused([&] { ops::attention(wide, one, wide, wide, wide, {}, {}, stream); }, Errc::unsupported,
                   {"at most 256"});
  }
}

}  // namespace
}  // namespace rz::test
