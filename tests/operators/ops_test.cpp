// Runs: ci host operators

// Norms, softmax and embeddings in f32, f16 and bf16, on the host and on a device; and what all operators
// have in common: graphs, tensors without elements, refusals.

#include "tensor/ops.h"

#include <cmath>
#include <limits>

#include "comm/device/cuda_runtime.h"
#include "tensor/attention_ops.h"
#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using ops::Into;

using RowOps = Operators;
INSTANTIATE_TEST_SUITE_P(Types, RowOps, float_types, type_name);

// Packs of four or eight in a lane, rows that are not aligned, and rows that are not kept in registers.
constexpr std::array<std::size_t, 2> norm_shapes[] = {{1, 1},    {1, 5},   {3, 8},    {9, 67},  {5, 130},
                                                      {70, 136}, {2, 768}, {3, 1600}, {2, 2056}};

Values with_a_mean(std::size_t count, unsigned seed = 1) {
  Values x = random_values(count, seed, 2);
  for (double& v : x) v = v + 3;
  return x;
}

/// Layer norm of x, weight and bias, or RMS norm of x and weight. Gradients of parameters are stored with d_x
/// in place of d_out, and added without.
Operator norm(bool layer, std::size_t n, std::size_t c, float epsilon) {
  const auto backward = [=](const Operands& o, const Tensor& d_x, const Tensor& d_w, const Tensor& d_b,
                            const Tensor& d_out, Into x_into, Into into) {
    if (layer)
      ops::layer_norm_backward(d_x, d_w, d_b, d_out, o.in[0], o.in[1], o.kept[1], o.kept[0], x_into, into,
                               o.stream);
    else
      ops::rms_norm_backward(d_x, d_w, d_out, o.in[0], o.in[1], o.kept[0], x_into, into, o.stream);
  };
  const auto parameter = [=](std::size_t of) {
    return Gradient{.of = of,
                    .backward =
                        [=](const Operands& o, const Tensor& d, Into into) {
                          const Tensor d_x = empty_on(o.stream, o.d_out.shape(), o.d_out.dtype());
                          ops::copy(d_x, o.d_out, o.stream);
                          backward(o, d_x, of == 1 ? d : Tensor(), of == 2 ? d : Tensor(),
                                   into == Into::overwrite ? d_x : o.d_out, Into::overwrite, into);
                        },
                    .reach = its_column(c),
                    .parameter = true};
  };
  Operator op{
      .name = concat(layer ? "layer_norm of " : "rms_norm of ", n, " x ", c),
      .in = {{layer ? with_a_mean(n * c) : random_values(n * c, 1, 0.5), {n, c}}, {random_values(c, 2), {c}}},
      .out = {n, c},
      .forward =
          [=](const Operands& o) {
            if (layer)
              ops::layer_norm(o.out, o.kept[1], o.kept[0], o.in[0], o.in[1], o.in[2], epsilon, o.stream);
            else
              ops::rms_norm(o.out, o.kept[0], o.in[0], o.in[1], epsilon, o.stream);
          },
      .value =
          [=](const std::vector<Values>& in) {
            return layer ? reference::layer_norm(in[0], in[1], in[2], double{epsilon})
                         : reference::rms_norm(in[0], in[1], double{epsilon});
          },
      .kept = {{{n}}, {{n}}}};
  if (layer) op.in.push_back({random_values(c, 3), {c}});
  // Of one element there is no variance, and of its square only the part by epsilon is left.
  if (c > 1)
    op.gradients.push_back(
        {.of = 0,
         .backward = [=](const Operands& o, const Tensor& d,
                         Into into) { backward(o, d, {}, {}, o.d_out, into, Into::overwrite); },
         .alias = Alias::d_out,
         .formula =
             [=](const std::vector<Values>& in, const Values&, const Values& d_out) {
               return reference::norm_gradient(in[0], in[1], d_out, double{epsilon}, layer);
             }});
  if (c > 1 || !layer) op.gradients.push_back(parameter(1));
  if (c > 1 && layer) op.gradients.push_back(parameter(2));
  return op;
}

/// An epsilon that is large enough that leaving it out is seen.
TEST_P(RowOps, Norms) {
  for (const bool layer : {true, false})
    for (const auto& [n, c] : norm_shapes) expect_right(norm(layer, n, c, layer ? 1e-5f : 1e-3f));
}

/// Their sum is stored, and has the bits of add(); it is rounded before it is normalised.
TEST_P(RowOps, NormsOfSums) {
  for (const bool layer : {true, false})
    for (const auto& [n, c] : norm_shapes) {
      Operator op = norm(layer, n, c, 1e-5f);
      const auto of_sum = op.value;
      op.name += " of a sum";
      op.gradients.clear();
      op.in.insert(op.in.begin() + 1, {with_a_mean(n * c, 5), {n, c}});
      op.value = [=, this](std::vector<Values> in) {
        in[0] = sum_of(in[0], in[1]);
        in.erase(in.begin() + 1);
        return of_sum(in);
      };
      op.forward = [=, this](const Operands& o) {
        const Tensor sum = empty(o.out.shape()), expected = empty(o.out.shape());
        if (layer)
          ops::add_layer_norm(sum, o.out, o.kept[1], o.kept[0], o.in[0], o.in[1], o.in[2], o.in[3], 1e-5f,
                              o.stream);
        else
          ops::add_rms_norm(sum, o.out, o.kept[0], o.in[0], o.in[1], o.in[2], 1e-5f, o.stream);
        ops::add(expected, o.in[0], o.in[1], o.stream);
        EXPECT_EQ(get(sum), get(expected));
      };
      expect_right(op);
    }
}

/// Sums over more rows than a block has, of integers, which are exact.
TEST_P(RowOps, NormGradientsOfManyRowsAreExact) {
  for (const auto& [n, c] :
       {std::pair<std::size_t, std::size_t>{1025, 24}, {2600, 24}, {700, 23}, {2100, 130}}) {
    Values x(n * c), dy(n * c), dw(c), db(c);
    for (std::size_t i = 0; i < n * c; ++i) {
      x[i] = static_cast<double>(i * 7 % 13) - 6, dy[i] = static_cast<double>(i * 5 % 11) - 5;
      dw[i % c] += x[i] * dy[i], db[i % c] += dy[i];
    }
    const Tensor mean = statistics({n}), inverse = statistics({n}), scratch = empty({n, c});
    ops::fill(mean, 0, stream), ops::fill(inverse, 1, stream);
    const Tensor d_weight = empty_on(stream, {c}), d_bias = empty_on(stream, {c}),
                 weight = place(Values(c, 1.0), {c});
    for (const double times : {1.0, 2.0}) {
      ops::layer_norm_backward(scratch, d_weight, d_bias, place(dy, {n, c}), place(x, {n, c}), weight, mean,
                               inverse, Into::overwrite, times == 1 ? Into::overwrite : Into::accumulate,
                               stream);
      for (std::size_t j = 0; j < c; ++j) dw[j] *= times, db[j] *= times;
      EXPECT_EQ(get(d_weight), dw) << n << " x " << c;
      EXPECT_EQ(get(d_bias), db) << n << " x " << c;
    }
  }
}

TEST_P(RowOps, Softmax) {
  for (const auto& [n, c] :
       {std::array<std::size_t, 2>{1, 1}, {1, 9}, {4, 5}, {5, 33}, {3, 1030}, {3, 2001}, {2, 4200}})
    for (const bool log : {false, true})
      expect_right(
          {.name = concat(log ? "log_softmax of " : "softmax of ", n, " x ", c),
           .in = {{random_values(n * c, 1, log ? 3 : 2), {n, c}}},
           .out = {n, c},
           .forward =
               [=](const Operands& o) { (log ? ops::log_softmax : ops::softmax)(o.out, o.in[0], o.stream); },
           .value =
               [=, c = c](const std::vector<Values>& in) {
                 Values out = reference::softmax(in[0], c);
                 for (double& v : out) v = log ? std::log(v) : v;
                 return out;
               },
           .gradients = {{.of = 0,
                          .backward =
                              [=](const Operands& o, const Tensor& d, Into into) {
                                const auto f = log ? ops::log_softmax_backward : ops::softmax_backward;
                                f(d, o.d_out, o.out, into, o.stream);
                              },
                          .bound = log ? Bound{0, 0, 2e-5} : Bound{2e-6, 0, c == 1 ? 1e-7 : 0},
                          .formula =
                              [=, c = c](const std::vector<Values>&, const Values& y, const Values& d_out) {
                                Values d = d_out;
                                double sum = 0;  // of the row's d_out, or d_out · y
                                for (std::size_t i = 0; i < d.size(); ++i) {
                                  if (i % c == 0) {
                                    sum = 0;
                                    for (std::size_t j = i; j < i + c; ++j)
                                      sum += d_out[j] * (log ? 1 : y[j]);
                                  }
                                  d[i] = log ? d_out[i] - std::exp(y[i]) * sum : y[i] * (d_out[i] - sum);
                                }
                                return d;
                              }}},
           .bound = log ? Bound{0, 0, 2e-6} : Bound{},
           .in_place = !log,
           .strides = true});
}

TEST_P(RowOps, SoftmaxOfExtremes) {
  const double inf = std::numeric_limits<double>::infinity();
  Values x(5 * 20, 1.0);
  std::fill(x.begin(), x.begin() + 19, -inf);       // one is left
  std::fill(x.begin() + 20, x.begin() + 40, -inf);  // none is
  x[45] = inf, x[65] = NAN, x[85] = -inf;
  const Tensor out = empty({5, 20});
  ops::softmax(out, place(x, {5, 20}), stream);
  const Values got = get(out);
  for (std::size_t j = 0; j < 20; ++j) {
    EXPECT_EQ(got[j], j < 19 ? 0 : 1);
    EXPECT_TRUE(std::isnan(got[20 + j]));
    EXPECT_TRUE(std::isnan(got[60 + j]));
    EXPECT_EQ(got[80 + j], j == 5 ? 0 : rounded({static_cast<float>(1.0 / 19)})[0]);
  }
  EXPECT_TRUE(std::isnan(got[45]));
}

TEST_P(RowOps, LogSoftmaxOfExtremes) {
  const Tensor out = empty({3, 3});
  ops::log_softmax(out, place({1000, 1000, -INFINITY, 0, -1000, 0, 1, NAN, 1}, {3, 3}), stream);
  const Values got = get(out);
  EXPECT_EQ(got[0], rounded({-std::log(2.0)})[0]);
  EXPECT_EQ(got[2], -INFINITY);
  EXPECT_EQ(got[4], rounded({-1000 - std::log(2.0)})[0]);
  for (int i = 6; i < 9; ++i) EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(i)]));
}

/// Tokens that repeat within a warp, across warps and across rounds of the kernel's list.
std::vector<std::int32_t> some_tokens(std::size_t n, std::size_t vocabulary) {
  std::vector<std::int32_t> ids(n);
  for (std::size_t i = 0; i < n; ++i)
    ids[i] = static_cast<std::int32_t>(i % 3 == 0 ? 1 : (i * i * 31 + i / 7) % vocabulary);
  return ids;
}

TEST_P(RowOps, Embedding) {
  struct Case {
    std::size_t vocabulary, c, batch, length;
  };
  for (const auto& [vocabulary, c, batch, length] :
       {Case{11, 19, 2, 3}, {11, 16, 2, 5}, {300, 264, 3, 17}, {2, 1, 1, 1}, {70, 8, 1, 9000}}) {
    const std::vector<std::int32_t> ids = some_tokens(batch * length, vocabulary);
    std::vector<std::size_t> rows, positions;
    for (std::size_t i = 0; i < ids.size() * c; ++i) {
      rows.push_back(static_cast<std::size_t>(ids[i / c]) * c + i % c);
      positions.push_back(i / c % length * c + i % c);
    }
    const auto tokens = [&, batch = batch, length = length](const Operands& o) {
      return to_device(ids, {batch, length}, o.stream);
    };
    const Bound bound{length > 1000 ? 2e-6 : 2e-7};
    Operator op{.name = concat("embedding of ", ids.size(), " of ", vocabulary, " x ", c),
                .in = {{random_values(vocabulary * c, 1), {vocabulary, c}}},
                .out = {batch, length, c},
                .forward = [&](const Operands& o) { ops::embedding(o.out, tokens(o), o.in[0], o.stream); },
                .value =
                    [&](const std::vector<Values>& in) {
                      Values out;
                      for (const std::size_t r : rows) out.push_back(in[0][r]);
                      return out;
                    },
                // A table in 16 bits is rounded once per list.
                .gradients = {{.of = 0,
                               .backward =
                                   [&](const Operands& o, const Tensor& d, Into into) {
                                     ops::embedding_backward(d, o.d_out, tokens(o), into, o.stream);
                                   },
                               .reach = from(rows),
                               .parameter = true,
                               .f32_alone = length > 1000,
                               .bound = bound}},
                .bound = {0}};
    expect_right(op);
    op.name = "positions and " + op.name;
    op.in.push_back({random_values((length + 2) * c, 2), {length + 2, c}});
    op.forward = [&](const Operands& o) {
      ops::embedding_with_positions(o.out, tokens(o), o.in[0], o.in[1], o.stream);
    };
    op.value = [&](const std::vector<Values>& in) {
      Values out;
      for (std::size_t i = 0; i < rows.size(); ++i) out.push_back(in[0][rows[i]] + in[1][positions[i]]);
      return out;
    };
    op.gradients = {{.of = 1,
                     .backward = [](const Operands& o, const Tensor& d,
                                    Into into) { ops::positions_backward(d, o.d_out, into, o.stream); },
                     .reach = from(positions),
                     .parameter = true,
                     .bound = bound}};
    expect_right(op);
    if (HasFatalFailure()) return;
  }
}

TEST_P(RowOps, EmbeddingBackwardAddsInTheHostsOrder) {
  const std::size_t n = 9000, vocabulary = 5, c = 8;
  const Values dy = random(n * c, 3);
  const std::vector<std::int32_t> ids = some_tokens(n, vocabulary);
  const Tensor host = tensor_of(random_values(vocabulary * c, 4), {vocabulary, c}),
               on_device = to_device(values_of(host), {vocabulary, c}, DType::f32, stream);
  ops::embedding_backward(host, tensor_of(dy, {n, c}), tokens_of(ids, {n}), Into::accumulate, {});
  ops::embedding_backward(on_device, place(dy, {n, c}), to_device(ids, {n}, stream), Into::accumulate,
                          stream);
  EXPECT_EQ(get(on_device), values_of(host));
}

/// In f32, 2^15 - 2^15 + 2^-10 is 2^-10, and 0 in the opposite order.
TEST_P(RowOps, EmbeddingBackwardAddsRowsOfOneTokenInOrder) {
  const std::size_t c = 3;
  Values dy;
  for (const double v : {0x1p15, 5.0, -0x1p15, 0x1p-10}) dy.insert(dy.end(), c, v);
  const Tensor d_out = place(dy, {4, c}), tokens = to_device({1, 0, 1, 1}, {4}, stream);
  for (const DType t : {dtype, DType::f32}) {
    const Tensor d_table = empty_on(stream, {2, c}, t);
    ops::embedding_backward(d_table, d_out, tokens, Into::overwrite, stream);
    EXPECT_EQ(get(d_table), (Values{5, 5, 5, 0x1p-10, 0x1p-10, 0x1p-10}));
  }
}

TEST_P(RowOps, AnotherRanksTokensAreZero) {
  constexpr std::size_t c = 9;
  const std::vector<std::int32_t> ids{4, 2, 6, 0, 3};
  const Tensor own = to_device({0, 0, 0, 0, 0}, {5}, stream), out = empty({5, c}), d_table = empty({3, c});
  ops::local_indices(own, to_device(ids, {5}, stream), 2, 3, 7, stream);
  const Values table = random(3 * c, 1), dy = random(5 * c, 2);
  ops::embedding(out, own, place(table, {3, c}), stream);
  ops::embedding_backward(d_table, place(dy, {5, c}), own, Into::overwrite, stream);
  Values expected, d_expected(3 * c);
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::size_t j = 0; j < c; ++j) {
      const std::size_t row = static_cast<std::size_t>(ids[i]) - 2;
      expected.push_back(row < 3 ? table[row * c + j] : 0);
      if (row < 3) d_expected[row * c + j] += dy[i * c + j];
    }
  EXPECT_EQ(get(out), expected);
  EXPECT_EQ(get(d_table), d_expected);
}

TEST_P(RowOps, TokensOutOfRangeAreSeenAndDoNoHarm) {
  if (on_host()) GTEST_SKIP() << "the host refuses such tokens";
  const std::size_t c = 8;
  const Values table = random(3 * c, 1), dy(4 * c, 1.0);
  const Tensor tokens = to_device({2, 3, -1, std::numeric_limits<std::int32_t>::min() + 1}, {1, 4}, stream),
               t = place(table, {3, c}), out = empty({1, 4, c}),
               gradient_and_more = place(Values(4 * c, 7.0), {4, c}),
               d_table = gradient_and_more.view(0, {3, c});
  const auto expect_rows = [&](double added) {
    const Values got = get(out);
    for (std::size_t i = 0; i < got.size(); ++i)
      if (i < c)
        EXPECT_EQ(got[i], rounded({table[2 * c + i] + added})[0]);
      else
        EXPECT_TRUE(std::isnan(got[i])) << i;
  };
  ops::embedding(out, tokens, t, stream);
  expect_rows(0);
  ops::embedding_with_positions(out, tokens, t, place(Values(4 * c, 1.0), {4, c}), stream);
  expect_rows(1);
  ops::embedding_backward(d_table, place(dy, {1, 4, c}), tokens, Into::overwrite, stream);
  Values expected(4 * c);
  std::fill_n(expected.begin() + 2 * c, c, 1.0);
  std::fill_n(expected.begin() + 3 * c, c, 7.0);
  EXPECT_EQ(get(gradient_and_more), expected);
}

TEST_P(RowOps, TensorsWithoutElementsAreNoWork) {
  const Tensor none = Tensor::empty({0, 8}, dtype, allocator_on(device)),
               tokens = Tensor::empty({0}, DType::i32, allocator_on(device)),
               statistic = Tensor::empty({0}, DType::f32, allocator_on(device));
  const Tensor w = place(Values(8, 1.0), {8}), table = place(Values(16, 1.0), {2, 8});
  ops::fill(none, 1, stream);
  ops::copy(none, none, stream);
  ops::add(none, none, none, stream);
  ops::gelu_backward(none, none, none, Into::accumulate, stream);
  ops::dropout(none, none, {0.5f, 1, 2}, stream);
  ops::softmax(none, none, stream);
  ops::softmax_backward(none, none, none, Into::overwrite, stream);
  ops::layer_norm(none, statistic, statistic, none, w, w, 1e-5f, stream);
  const Tensor d = place(Values(8, 3.0), {8});
  ops::layer_norm_backward(none, d, {}, none, none, w, statistic, statistic, Into::overwrite,
                           Into::accumulate, stream);
  EXPECT_EQ(get(d), Values(8, 3.0));
  ops::layer_norm_backward(none, d, {}, none, none, w, statistic, statistic, Into::overwrite, Into::overwrite,
                           stream);
  EXPECT_EQ(get(d), Values(8, 0.0));
  ops::fill(d, 3, stream);
  ops::rms_norm(none, statistic, none, w, 1e-5f, stream);
  ops::rms_norm_backward(none, d, none, none, w, statistic, Into::overwrite, Into::overwrite, stream);
  EXPECT_EQ(get(d), Values(8, 0.0));
  ops::embedding(none, tokens, table, stream);
  ops::embedding_backward(table, none, tokens, Into::overwrite, stream);
  EXPECT_EQ(get(table), Values(16, 0.0));
  const Tensor loss = statistics({}), sums = empty_on(stream, {2}, DType::f64);
  ops::mean_squared_error(loss, none, none, stream);
  EXPECT_EQ(get(loss), Values{0});
  ops::cross_entropy(loss, sums, statistic, statistic, none, tokens, stream);
  EXPECT_EQ(get(loss), Values{0});
}

TEST_P(RowOps, AGraphOfOperatorsRunsAgain) {
  if (on_host()) GTEST_SKIP() << "graphs are of devices";
  using cuda::check;
  const std::size_t n = 6, c = 40;
  const Tensor x = place(random(n * c, 1), {n, c}), w = place(random(c, 2), {c}), out = empty({n, c}),
               mean = statistics({n}), inverse = statistics({n}), y = empty_on(stream, {n, c}),
               tokens = to_device({0, 1, 2, 1, 1, 0}, {n}, stream), table = empty({3, c});
  const auto run = [&] {
    ops::layer_norm(out, mean, inverse, x, w, w, 1e-5f, stream);
    ops::gelu(out, out, stream);
    ops::embedding_backward(table, out, tokens, Into::overwrite, stream);
    ops::copy(y, out, stream);
  };
  run();
  const Values expected = get(table), copied = get(y);
  void *graph = nullptr, *executable = nullptr;
  const cuda::Runtime& runtime = cuda::runtime();
  check(runtime.begin_capture(stream.native()), "begin_capture", device);
  run();
  check(runtime.end_capture(stream.native(), &graph), "end_capture", device);
  check(runtime.instantiate(&executable, graph), "instantiate", device);
  for (int i = 0; i < 2; ++i) {
    ops::fill(out, NAN, stream), ops::fill(table, NAN, stream), ops::fill(y, NAN, stream);
    check(runtime.launch_graph(executable, stream.native()), "launch_graph", device);
    EXPECT_EQ(get(table), expected);
    EXPECT_EQ(get(y), copied);
  }
  check(runtime.destroy_executable(executable), "destroy_executable", device);
  check(runtime.destroy_graph(graph), "destroy_graph", device);
}

/// In f32, whatever the type of the others. Sums are in double, results are rounded once or twice.
TEST_P(RowOps, NormsOfMatrices) {
  for (const auto& [n, r] : {std::array<std::size_t, 2>{1, 1}, {7, 1}, {40, 3}, {1203, 4}}) {
    const Values x = random_values(n * r, 1, 2);
    const Tensor in = place(x, {n, r}, DType::f32, n % 2), out = empty_on(stream, {n, r});
    const Values at = get(in);
    double squares = 0;
    for (const double v : at) squares += v * v;
    Values expected;
    for (const double v : at) expected.push_back(v / (std::sqrt(squares) + 0.25));
    ops::normalize(out, in, 0.25f, stream);
    expect_close(out, expected, {4e-7}, "normalize");
    Values q = at;  // modified Gram-Schmidt
    for (std::size_t k = 0; k < r; ++k) {
      const auto dot = [&](std::size_t a, std::size_t b) {
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) sum += q[i * r + a] * q[i * r + b];
        return sum;
      };
      for (std::size_t b = 0; b < k; ++b) {
        const double part = dot(b, k);
        for (std::size_t i = 0; i < n; ++i) q[i * r + k] -= part * q[i * r + b];
      }
      const double length = std::sqrt(dot(k, k)) + 1e-8;
      for (std::size_t i = 0; i < n; ++i) q[i * r + k] /= length;
    }
    ops::orthogonalize_columns(in, 1e-8f, stream);
    expect_close(in, q, {}, "orthogonalize_columns");
  }
  const Tensor same = place({3, 6, 4, 8}, {2, 2}, DType::f32);  // the second column is twice the first
  ops::orthogonalize_columns(same, 1e-3f, stream);
  const Values got = get(same);
  EXPECT_NEAR(got[0], 3 / 5.001, 1e-6);
  EXPECT_LT(std::abs(got[1]), 0.9) << "small, not random";
  if (dtype != DType::f32) {
    const Tensor a = empty({2, 2});
    EXPECT_THROW(ops::normalize(a, a, 0, stream), Error);
    EXPECT_THROW(ops::orthogonalize_columns(a, 0, stream), Error);
  }
}

TEST_P(RowOps, TypesThatDoNotFitAreRefused) {
  const std::size_t n = 1 << 15;  // several threads on the host
  const Tensor a = empty({n}), other = empty_on(stream, {n}, dtype == DType::f32 ? DType::f16 : DType::f32);
  EXPECT_THROW(ops::add(a, a, other, stream), Error);
  EXPECT_THROW(ops::gelu(a, other, stream), Error);
  EXPECT_THROW(ops::unary_backward(a, a, other, ops::Unary::relu, Into::overwrite, stream), Error);
  EXPECT_THROW(ops::dropout(a, other, {.p = 0.5f}, stream), Error);
  EXPECT_THROW(ops::softmax(a, other, stream), Error);
  EXPECT_THROW(ops::softmax_backward(a, a, other, Into::overwrite, stream), Error);
  const Tensor x = a.reshape({n / 8, 8}), w = empty({8}), foreign = other.view(0, {8}),
               mean = statistics({n / 8}),
               ids = to_device(std::vector<std::int32_t>(n / 8, 0), {n / 8}, stream);
  EXPECT_THROW(ops::layer_norm(x, mean, mean, x, w, foreign, 1e-5f, stream), Error);
  EXPECT_THROW(ops::add_layer_norm(x, x, mean, mean, x, other.reshape({n / 8, 8}), w, w, 1e-5f, stream),
               Error);
  EXPECT_THROW(ops::layer_norm_backward(x, {}, {}, x, x, foreign, mean, mean, Into::overwrite,
                                        Into::overwrite, stream),
               Error);
  EXPECT_THROW(ops::rms_norm(x, mean, x, foreign, 1e-5f, stream), Error);
  EXPECT_THROW(ops::add_rms_norm(x, x, mean, other.reshape({n / 8, 8}), x, w, 1e-5f, stream), Error);
  EXPECT_THROW(ops::rms_norm_backward(x, {}, x, x, foreign, mean, Into::overwrite, Into::overwrite, stream),
               Error);
  EXPECT_THROW(ops::embedding(x, ids, other.view(0, {2, 8}), stream), Error);
  if (on_host()) {
    const std::string text = error_of([&] { ops::add(a, a, other, stream); }).what();
    EXPECT_NE(text.find(concat("add: b is ", name(other.dtype()), ", and must be ", name(dtype))),
              std::string::npos)
        << text;
  }
  if (!on_host()) {
    EXPECT_THROW(ops::add(a, a, a, {}), Error);  // a stream of the host
  }
}

void expect_refused(const std::function<void()>& f, std::initializer_list<const char*> words) {
  const Error e = error_of(f);
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  for (const char* word : words) EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
}

TEST(HostOps, WrongArgumentsAreNamed) {
  const Tensor a = Tensor::zeros({2, 3}), b = Tensor::zeros({3, 5}), v = Tensor::zeros({4}), none;
  const Stream stream;
  expect_refused([&] { ops::add(a, a, b, stream); }, {"add", "[2, 3]", "[3, 5]"});
  expect_refused([&] { ops::gelu(none, a, stream); }, {"gelu", "out (undefined)"});
  expect_refused([&] { ops::linear(a, a, b, none, ops::WeightLayout::in_out, stream); },
                 {"linear", "[3, 5]"});
  expect_refused([&] { ops::layer_norm(a, v, v, a, v, v, 1e-5f, stream); }, {"layer_norm", "[4]"});
  expect_refused([&] { ops::rms_norm(a, v, a, v, 1e-5f, stream); }, {"rms_norm", "[2, 3]", "[4]"});
  expect_refused([&] { ops::add_rms_norm(a, a, v, a, b, v, 1e-5f, stream); }, {"add_rms_norm", "[3, 5]"});
  expect_refused([&] { ops::rms_norm_backward(a, v, a, a, v, v, Into::overwrite, Into::overwrite, stream); },
                 {"rms_norm_backward", "[4]"});
  expect_refused([&] { ops::attention(a, a, a, a, a, {.heads = 2}, {}, stream); },
                 {"attention with 2 heads and 2 key heads", "[2, 3]"});
  expect_refused([&] { ops::matmul(a, a, false, a, false, Into::overwrite, stream); }, {"matmul"});
  expect_refused([&] { ops::dropout(a, a, {1, 0, 0}, stream); }, {"dropout", "p = 1"});
  const Tensor out = Tensor::zeros({2, 5});
  expect_refused(
      [&] {
        ops::embedding(out, tokens_of({1, 3}, {2}), b, stream);
      },
      {"embedding", "tokens[1] = 3", "[0, 3)"});
  expect_refused([&] { ops::embedding(out, tokens_of({-1, 0}, {2}), b, stream); }, {"tokens[0] = -1"});
  expect_refused([&] { ops::embedding(out, a, b, stream); }, {"embedding", "2 i32", "[2, 3]"});
  const Tensor l = Tensor::zeros({2}), one = Tensor::zeros({}), sums = Tensor::zeros({2}, DType::f64);
  expect_refused(
      [&] {
        ops::cross_entropy(one, sums, l, l, a, tokens_of({-100, 3}, {2}), stream);
      },
      {"cross_entropy", "targets[1] = 3"});
  const Tensor whole = Tensor::zeros({2, 3}, DType::i32);
  expect_refused([&] { ops::unary(a, whole, ops::Unary::relu, stream); }, {"relu", "i32"});
}

}  // namespace
}  // namespace rz::test
