// Runs: ci host operators
// Not under sanitizers: Types/ShapeOps[.].*/f16$

// Operators that move elements, exactly, in random shapes of 1 to 4 extents with extents of 1, parts of 0,
// rows with a stride and every dtype; products of batches of matrices against sums in double.

#include "tensor/shape_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using ops::Into;
using Elements = std::vector<std::size_t>;

class ShapeOps : public Operators {
 protected:
  std::mt19937 draws{7};

  bool adds() const { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }
  std::size_t below(std::size_t n) { return draws() % n; }

  /// Up to 20000 elements: some extents of 1, some that no tile or word divides.
  Shape random_shape(int dims) {
    constexpr std::size_t some[] = {1, 1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 70, 130};
    for (;;) {
      std::vector<std::size_t> extents;
      for (int d = 0; d < dims; ++d) extents.push_back(some[below(std::size(some))]);
      const Shape shape{std::span<const std::size_t>(extents)};
      if (shape.count() <= 20000) return shape;
    }
  }
  /// Small whole numbers, which all dtypes represent.
  Input numbers(const Shape& shape) {
    Values all(shape.count());
    for (double& x : all) x = static_cast<double>(below(100));
    return {all, shape};
  }
  Values ints(std::size_t n) { return numbers({n}).values; }

  /// Element i of the result is element places[i] of the input. Only floats are added.
  Operator moving(std::string name, const Shape& in, const Shape& out, const Elements& places,
                  const decltype(Operator::forward)& forward, const decltype(Gradient::backward)& backward) {
    Operator op{.name = std::move(name),
                .in = {numbers(in)},
                .out = out,
                .forward = forward,
                .value = [=](const std::vector<Values>& x) { return moved(x[0], places); },
                .bound = {0},
                .strides = true};
    if (!adds()) {
      op.slope = 1;
      return op;
    }
    op.unit_slopes = true;
    op.gradients.push_back({.of = 0,
                            .backward = backward,
                            .bound = {0},
                            .formula = [=](const std::vector<Values>&, const Values&, const Values& d_out) {
                              return moved_back(d_out, places, in.count());
                            }});
    return op;
  }
};

INSTANTIATE_TEST_SUITE_P(Types, ShapeOps,
                         testing::Values(DType::f32, DType::f16, DType::bf16, DType::u8, DType::i32,
                                         DType::i64),
                         type_name);

using Index = std::array<std::size_t, 4>;

Index index_of(const Shape& shape, std::size_t element) {
  Index index{};
  for (int d = shape.dims() - 1; d >= 0; --d)
    index[static_cast<std::size_t>(d)] = element % shape[d], element /= shape[d];
  return index;
}
std::size_t element_at(const Shape& shape, const Index& index) {
  std::size_t element = 0;
  for (int d = 0; d < shape.dims(); ++d) element = element * shape[d] + index[static_cast<std::size_t>(d)];
  return element;
}

TEST_P(ShapeOps, Permute) {
  const auto expect_permuted = [&](const Shape& in, std::vector<int> order) {
    std::vector<std::size_t> extents;
    for (const int d : order) extents.push_back(in[d]);
    const Shape out{std::span<const std::size_t>(extents)};
    Elements places;
    for (std::size_t i = 0; i < out.count(); ++i) {
      const Index to = index_of(out, i);
      Index from{};
      for (std::size_t d = 0; d < order.size(); ++d) from[static_cast<std::size_t>(order[d])] = to[d];
      places.push_back(element_at(in, from));
    }
    std::vector<int> back(order.size());
    std::string text;
    for (std::size_t d = 0; d < order.size(); ++d) {
      back[static_cast<std::size_t>(order[d])] = static_cast<int>(d);
      if (below(2)) order[d] -= in.dims();
      text += concat(" ", order[d]);
    }
    expect_right(moving(
        concat(name(in), " by", text), in, out, places,
        [=](const Operands& o) { ops::permute(o.out, o.in[0], order, Into::overwrite, o.stream); },
        [=](const Operands& o, const Tensor& d, Into into) {
          ops::permute(d, o.d_out, back, into, o.stream);
        }));
  };
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 30 : 12); ++i) {
      std::vector<int> order(static_cast<std::size_t>(dims));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), draws);
      expect_permuted(random_shape(dims), order);
    }
  expect_permuted({130, 70}, {1, 0});
  expect_permuted({128, 64}, {1, 0});
  expect_permuted({130, 600}, {1, 0});
  expect_permuted({2, 3, 32, 64}, {0, 2, 1, 3});
  expect_permuted({2, 33, 3, 64}, {3, 0, 2, 1});
  expect_permuted({2, 0, 3}, {2, 1, 0});
  expect_permuted({}, {});
}

/// Elements [start, start + length) of a dimension.
Elements part(const Shape& whole, int dimension, std::size_t start, std::size_t length) {
  Elements places;
  for (std::size_t i = 0; i < whole.count(); ++i) {
    const std::size_t at = index_of(whole, i)[static_cast<std::size_t>(dimension)];
    if (at >= start && at < start + length) places.push_back(i);
  }
  return places;
}

/// The part alone; added to what is there; and stored within another tensor.
TEST_P(ShapeOps, Narrow) {
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 20 : 10); ++i) {
      const Shape in = random_shape(dims);
      const int d = static_cast<int>(below(static_cast<std::size_t>(dims))), given = below(2) ? d : d - dims;
      const std::size_t start = below(in[d] + 1), length = below(in[d] - start + 1);
      const Shape out = in.with(d, length);
      const Elements places = part(in, d, start, length);
      const std::string what = concat(start, " + ", length, " of dimension ", d, " of ", name(in));
      Operator op = moving(
          what, in, out, places,
          [=](const Operands& o) { ops::narrow(o.out, o.in[0], given, start, Into::overwrite, o.stream); },
          [=](const Operands& o, const Tensor& d_in, Into into) {
            ops::narrow_backward(d_in, o.d_out, given, start, into, o.stream);
          });
      expect_right(op);
      op.gradients.clear();
      op.in.push_back(numbers(out));
      if (adds()) {
        op.name = what + ", added";
        op.forward = [=](const Operands& o) {
          ops::narrow(o.out, o.in[1], 0, 0, Into::overwrite, o.stream);
          ops::narrow(o.out, o.in[0], given, start, Into::accumulate, o.stream);
        };
        op.value = [=](const std::vector<Values>& x) {
          Values sum = moved(x[0], places);
          for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += x[1][k];
          return sum;
        };
        expect_right(op);
      }
      op.name = what + ", stored";
      op.out = in;
      op.forward = [=](const Operands& o) {
        ops::narrow(o.out, o.in[0], 0, 0, Into::overwrite, o.stream);
        ops::slice_scatter(o.out, o.in[1], given, start, o.stream);
      };
      op.value = [=](const std::vector<Values>& x) {
        Values all = x[0];
        for (std::size_t k = 0; k < places.size(); ++k) all[places[k]] = x[1][k];
        return all;
      };
      expect_right(op);
    }
}

TEST_P(ShapeOps, Cat) {
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 15 : 8); ++i) {
      const Shape like = random_shape(dims);
      const int d = static_cast<int>(below(static_cast<std::size_t>(dims))), given = below(2) ? d : d - dims;
      std::vector<Input> parts;
      std::size_t length = 0;
      for (std::size_t count = 1 + below(4); count > 0; --count) {
        const Shape shape = like.with(d, below(4) ? below(20) : 0);
        if (shape.count() > 20000) continue;
        parts.push_back(numbers(shape));
        length += shape[d];
      }
      if (parts.empty()) continue;
      const Shape out = like.with(d, length);
      expect_right({.name = concat(parts.size(), " parts along dimension ", d, " of ", name(out)),
                    .in = parts,
                    .out = out,
                    .forward = [=](const Operands& o) { ops::cat(o.out, o.in, given, o.stream); },
                    .value =
                        [&](const std::vector<Values>& x) {
                          Values all(out.count());
                          std::size_t start = 0;
                          for (std::size_t p = 0; p < parts.size(); start += parts[p++].shape[d]) {
                            const Elements places = part(out, d, start, parts[p].shape[d]);
                            for (std::size_t k = 0; k < places.size(); ++k) all[places[k]] = x[p][k];
                          }
                          return all;
                        },
                    .bound = {0},
                    .strides = true,
                    .slope = 1});
    }
}

class Selection : public ShapeOps {
 protected:
  std::vector<std::int32_t> indices(std::size_t n, std::size_t limit) {
    std::vector<std::int32_t> all(n);
    for (auto& x : all) x = static_cast<std::int32_t>(below(limit));
    return all;
  }
  static Shape joined(const Shape& a, const Shape& b, int from = 0) {
    std::vector<std::size_t> extents;
    for (int d = 0; d < a.dims(); ++d) extents.push_back(a[d]);
    for (int d = from; d < b.dims(); ++d) extents.push_back(b[d]);
    return Shape{std::span<const std::size_t>(extents)};
  }
};

INSTANTIATE_TEST_SUITE_P(Types, Selection, float_types, type_name);

/// Sums of many rows have the same bits for every number of threads.
TEST_P(Selection, IndexSelect) {
  struct Case {
    Shape index, in;
  };
  for (const auto& [index_shape, in] :
       {Case{{5}, {7, 33}}, Case{{2, 3}, {4, 5}}, Case{{40}, {3, 2, 9}}, Case{{6}, {50}},
        Case{{3}, {4, 2, 3, 5}}, Case{{}, {4, 3}}, Case{{900}, {13, 40}}}) {
    const std::size_t n = index_shape.count(), row = in.count() / in[0];
    const auto chosen = indices(n, in[0]);
    Elements places;
    for (std::size_t i = 0; i < n * row; ++i)
      places.push_back(static_cast<std::size_t>(chosen[i / row]) * row + i % row);
    const auto index = [&, index_shape = index_shape](const Operands& o) {
      return to_device(chosen, index_shape, o.stream);
    };
    Operator op = moving(
        concat(n, " of ", name(in)), in, joined(index_shape, in, 1), places,
        [&](const Operands& o) { ops::index_select(o.out, o.in[0], index(o), o.stream); },
        [&](const Operands& o, const Tensor& d, Into into) {
          ops::index_select_backward(d, o.d_out, index(o), into, o.stream);
        });
    op.strides = false, op.bits_of_threads = true;
    op.unit_slopes = n < 900;
    op.gradients[0].bound = {n < 900 ? 2e-7 : 2e-6};
    expect_right(op);
  }
}

TEST_P(Selection, IndexSelectOfNothing) {
  const Tensor index = empty_on(stream, {0}, DType::i32), in = place(ints(6), {2, 3}), out = empty({0, 3});
  ops::index_select(out, in, index, stream);
  ops::index_select_backward(in, out, index, Into::accumulate, stream);
  ops::index_select_backward(in, out, index, Into::overwrite, stream);
  EXPECT_EQ(get(in), Values(6)) << "a gradient of nothing";
}

TEST_P(Selection, GatherOfOneElementOfEachRow) {
  struct Case {
    Shape index;
    std::size_t columns;
  };
  for (const auto& [index_shape, columns] :
       {Case{{300}, 9}, Case{{3, 5}, 33}, Case{{}, 4}, Case{{2, 3, 4}, 1}, Case{{900}, 13}}) {
    const auto chosen = indices(index_shape.count(), columns);
    Elements places;
    for (std::size_t r = 0; r < chosen.size(); ++r)
      places.push_back(r * columns + static_cast<std::size_t>(chosen[r]));
    const auto index = [&, index_shape = index_shape](const Operands& o) {
      return to_device(chosen, index_shape, o.stream);
    };
    const Shape in = joined(index_shape, {columns});
    Operator op = moving(
        name(in), in, index_shape, places,
        [&](const Operands& o) { ops::gather(o.out, o.in[0], index(o), o.stream); },
        [&](const Operands& o, const Tensor& d, Into into) {
          ops::gather_backward(d, o.d_out, index(o), into, o.stream);
        });
    op.strides = index_shape.dims() < 2;  // what is gathered has none
    expect_right(op);
  }
}

TEST_P(Selection, AnIndexOutOfRangeOnADeviceIsSeenAndDoesNoHarm) {
  if (on_host()) GTEST_SKIP() << "the host refuses such an index";
  const Tensor in = place({1, 2, 3, 4, 5, 6, 7, 8}, {4, 2});
  const Tensor index = to_device({1, 2, -1, std::numeric_limits<std::int32_t>::max()}, {4}, stream);
  const Tensor out = empty({4}), d_in = empty({4, 2});
  ops::gather(out, in, index, stream);
  const Values got = get(out);
  EXPECT_EQ(got[0], 2);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
  ops::gather_backward(d_in, place({1, 1, 1, 1}, {4}), index, Into::overwrite, stream);
  EXPECT_EQ(get(d_in), (Values{0, 1, 0, 0, 0, 0, 0, 0}));
}

// ---- products

struct Product {
  Shape of_a, of_b;  ///< a factor without leading extents is that of every product
  std::size_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  bool for_any_threads = false;

  Shape leading() const { return of_a.dims() ? of_a : of_b; }
  /// Calls f(a, b, d_out), matrices that are not transposed, of each product, and joins the results.
  template <class F>
  Values each(const std::vector<Values>& in, const Values& d_out, const F& f) const {
    const auto matrix = [](const Values& all, bool one, std::size_t i, std::size_t rows, std::size_t columns,
                           bool transposed) {
      const auto first = all.begin() + static_cast<long>(one ? 0 : i * rows * columns);
      const Values m(first, first + static_cast<long>(rows * columns));
      return transposed ? reference::transpose(m, columns, rows) : m;
    };
    Values all;
    for (std::size_t i = 0; i < leading().count(); ++i) {
      const Values result = f(matrix(in[0], of_a.dims() == 0, i, m, k, transpose_a),
                              matrix(in[1], of_b.dims() == 0, i, k, n, transpose_b),
                              d_out.empty() ? d_out : matrix(d_out, false, i, m, n, false));
      all.insert(all.end(), result.begin(), result.end());
    }
    return all;
  }
};

class BatchedProducts : public Selection {
 protected:
  // Some kernels of cuBLASLt round once more.
  const Bound bound{2e-6, on_host() || emulated_device ? 0 : rounding};

  struct Factor {
    const Tensor& of;
    bool transposed;
  };
  static void multiply(const Product& p, const Operands& o, const Tensor& out, Factor a, Factor b,
                       Into into) {
    ops::matmul(out, a.of, a.transposed, b.of, b.transposed, into,
                p.for_any_threads ? Stream::host(o.stream.threads(), Stream::Reproducible::for_any_threads)
                                  : o.stream);
  }
  /// A product too, of every form, which may be added or f32.
  Gradient gradient_of_a(const Product& p) const {
    return {.of = 0,
            .backward =
                [=](const Operands& o, const Tensor& d, Into into) {
                  if (p.transpose_a)
                    multiply(p, o, d, {o.in[1], p.transpose_b}, {o.d_out, true}, into);
                  else
                    multiply(p, o, d, {o.d_out, false}, {o.in[1], !p.transpose_b}, into);
                },
            .parameter = true,
            .bound = bound,
            .formula =
                [=](const std::vector<Values>& in, const Values&, const Values& d_out) {
                  return p.each(in, d_out, [&](const Values&, const Values& y, const Values& g) {
                    const Values d = reference::matmul(g, reference::transpose(y, p.k, p.n), p.m, p.k, p.n);
                    return p.transpose_a ? reference::transpose(d, p.m, p.k) : d;
                  });
                }};
  }
  Gradient gradient_of_b(const Product& p) const {
    return {.of = 1,
            .backward =
                [=](const Operands& o, const Tensor& d, Into into) {
                  if (p.transpose_b)
                    multiply(p, o, d, {o.d_out, true}, {o.in[0], p.transpose_a}, into);
                  else
                    multiply(p, o, d, {o.in[0], !p.transpose_a}, {o.d_out, false}, into);
                },
            .parameter = true,
            .bound = bound,
            .formula =
                [=](const std::vector<Values>& in, const Values&, const Values& d_out) {
                  return p.each(in, d_out, [&](const Values& x, const Values&, const Values& g) {
                    const Values d = reference::matmul(reference::transpose(x, p.m, p.k), g, p.k, p.n, p.m);
                    return p.transpose_b ? reference::transpose(d, p.k, p.n) : d;
                  });
                }};
  }
  /// The gradient of a factor of every product is a sum, which this operator doesn't compute.
  Operator product(const Product& p) const {
    const auto shape = [](const Shape& leading, std::size_t rows, std::size_t columns, bool transposed) {
      return joined(leading, transposed ? Shape{columns, rows} : Shape{rows, columns});
    };
    const Shape a = shape(p.of_a, p.m, p.k, p.transpose_a), b = shape(p.of_b, p.k, p.n, p.transpose_b);
    Operator op{
        .name = concat(name(a), p.transpose_a ? "ᵀ · " : " · ", name(b), p.transpose_b ? "ᵀ" : ""),
        .in = {{random_values(a.count(), 1), a}, {random_values(b.count(), 2), b}},
        .out = shape(p.leading(), p.m, p.n, false),
        .forward =
            [=](const Operands& o) {
              multiply(p, o, o.out, {o.in[0], p.transpose_a}, {o.in[1], p.transpose_b}, Into::overwrite);
            },
        .value =
            [=](const std::vector<Values>& in) {
              return p.each(in, {}, [&](const Values& x, const Values& y, const Values&) {
                return reference::matmul(x, y, p.m, p.n, p.k);
              });
            },
        .bound = bound,
        .strides = true,
        .bits_of_threads = p.for_any_threads};
    if (p.of_a.dims() == p.leading().dims()) op.gradients.push_back(gradient_of_a(p));
    if (p.of_b.dims() == p.leading().dims()) op.gradients.push_back(gradient_of_b(p));
    return op;
  }
};

INSTANTIATE_TEST_SUITE_P(Types, BatchedProducts, float_types, type_name);

TEST_P(BatchedProducts, AreThoseOfTheirMatrices) {
  for (const Product& sizes :
       {Product{{3}, {3}, 5, 7, 4}, Product{{2, 3}, {2, 3}, 8, 8, 16}, Product{{40}, {40}, 3, 9, 5},
        Product{{3}, {}, 5, 6, 7}, Product{{}, {2, 2}, 4, 3, 5}, Product{{2}, {2}, 130, 110, 120},
        Product{{}, {}, 5, 37, 11}, Product{{}, {}, 17, 23, 40}, Product{{1, 2}, {1, 2}, 16, 1, 3},
        Product{{2, 2}, {}, 6, 5, 8}})
    for (int form = 0; form < 4; ++form) {
      Product p = sizes;
      p.transpose_a = form & 1, p.transpose_b = form & 2;
      expect_right(product(p));
    }
}

TEST_P(BatchedProducts, HaveTheSameBitsForEveryNumberOfThreads) {
  if (!on_host()) GTEST_SKIP() << "threads are the host's";
  for (const Product& p : {Product{{40}, {40}, 17, 9, 12}, Product{{3}, {3}, 150, 140, 130},
                           Product{{5, 7}, {5, 7}, 64, 64, 64}}) {
    Product any = p;
    any.for_any_threads = true;
    const Operator op = product(any);
    expect_right(op);
    const Tensor a = place(op.in[0].values, op.in[0].shape), b = place(op.in[1].values, op.in[1].shape);
    std::vector<Values> of_threads;
    for (const int threads : {1, 2, 8}) {
      const Stream other = Stream::host(threads);
      const Tensor out = empty(op.out);
      op.forward({.stream = other, .in = {a, b}, .kept = {}, .out = out, .d_out = {}});
      of_threads.push_back(get(out));
      EXPECT_EQ(of_threads.back(), of_threads.front()) << op.name << " on " << threads << " threads";
    }
  }
}

TEST_P(BatchedProducts, ASumOfNothingIsZero) {
  const Tensor out = place(Values(12, 3), {2, 2, 3}), a = empty({2, 2, 0}), b = empty({2, 0, 3});
  ops::matmul(out, a, false, b, false, Into::accumulate, stream);
  EXPECT_EQ(get(out), Values(12, 3));
  ops::matmul(out, a, false, b, false, Into::overwrite, stream);
  EXPECT_EQ(get(out), Values(12, 0));
}

// ---- errors

class ShapeErrors : public OnDevice {
 protected:
  void SetUp() override {
    if (!on_host()) GTEST_SKIP() << "a device's messages name it too";
    OnDevice::SetUp();
  }
  Tensor zeros(const Shape& shape, DType t = DType::f32) const { return empty_on(stream, shape, t); }
  template <class F>
  static void expect_message(const F& call, const std::string& message) {
    EXPECT_EQ(refusal(call, Errc::invalid_argument), message);
  }
};

TEST_F(ShapeErrors, OfPermuteNameTheShapes) {
  const int swapped[] = {1, 0}, twice[] = {0, 0}, beyond[] = {0, 2}, three[] = {0, 1, 2};
  const Tensor a = zeros({2, 3}), b = zeros({3, 2}), other = zeros({3, 2}, DType::bf16);
  const auto overwrite = Into::overwrite;
  for (const std::span<const int> order : {std::span<const int>(twice), {beyond}, {three}})
    expect_refused([&] { ops::permute(b, a, order, overwrite, stream); }, Errc::invalid_argument,
                   {"is no order of the dimensions of [2, 3]"});
  expect_message([&] { ops::permute(a, a, swapped, overwrite, stream); },
                 "permute: these shapes do not fit together: out [2, 3], in [2, 3]");
  expect_message([&] { ops::permute(other, a, swapped, overwrite, stream); },
                 "permute: these shapes do not fit together: out [3, 2] of bf16, in [2, 3]");
  const Tensor integers = zeros({2, 3}, DType::i32), turned = zeros({3, 2}, DType::i32);
  EXPECT_NO_THROW(ops::permute(turned, integers, swapped, overwrite, stream));
  expect_message([&] { ops::permute(turned, integers, swapped, Into::accumulate, stream); },
                 "permute: these shapes do not fit together: out [3, 2] of i32, in [2, 3] of i32");
}

TEST_F(ShapeErrors, OfNarrowNameTheShapes) {
  const Tensor a = zeros({2, 3});
  const auto refuse = [&](const Shape& out, int dimension, std::size_t start, const std::string& message) {
    expect_message([&] { ops::narrow(zeros(out), a, dimension, start, Into::overwrite, stream); }, message);
  };
  refuse({2, 2}, 2, 0, "narrow: the tensor [2, 3] has no extent 2");
  refuse({2, 2}, -3, 0, "narrow: the tensor [2, 3] has no extent -3");
  refuse({2, 2}, 1, 2, "narrow: 2 to 4 is outside of dimension 1 of in [2, 3]");
  refuse({1, 2}, -1, 0, "narrow: these shapes do not fit together: in [2, 3], out [1, 2]");
  const Tensor part = zeros({2, 2});
  expect_message(
      [&] { ops::narrow_backward(a, part, 1, ~std::size_t{0}, Into::overwrite, stream); },
      concat("narrow_backward: ", ~std::size_t{0}, " to ", 1, " is outside of dimension 1 of d_in [2, 3]"));
}

TEST_F(ShapeErrors, OfCatNameTheShapes) {
  const Tensor a = zeros({2, 3}), b = zeros({3, 2}), other = zeros({3, 2}, DType::bf16);
  const auto refuse = [&](const Shape& out, const std::vector<Tensor>& parts, const std::string& message) {
    expect_message([&] { ops::cat(zeros(out), parts, 0, stream); }, "cat: " + message);
  };
  const std::string misfit = "these do not fit together along dimension 0: out ";
  refuse({5, 3}, {a, b}, misfit + "[5, 3] of f32, part [2, 3] of f32, part [3, 2] of f32");
  refuse({6, 2}, {b, other}, misfit + "[6, 2] of f32, part [3, 2] of f32, part [3, 2] of bf16");
  refuse({6, 2}, {b}, misfit + "[6, 2] of f32, part [3, 2] of f32");
  refuse({2, 3}, {}, "there is no part");
  expect_message([&] { ops::cat(a, std::vector<Tensor>{a}, 2, stream); },
                 "cat: the tensor [2, 3] has no extent 2");
}

TEST_F(ShapeErrors, AnIndexOutOfRangeIsNamed) {
  const Tensor in = zeros({2, 3}), out = zeros({2, 3}), index = tokens_of({1, 2}, {2});
  expect_message([&] { ops::index_select(out, in, index, stream); },
                 "index_select: index[1] = 2 is not in [0, 2)");
  const Tensor negative = tokens_of({-1, 0}, {2}), large = tokens_of({0, 3}, {2}), two = zeros({2});
  expect_message([&] { ops::index_select_backward(in, out, negative, Into::overwrite, stream); },
                 "index_select_backward: index[0] = -1 is not in [0, 2)");
  const Tensor three = zeros({3, 3});
  expect_message([&] { ops::index_select(three, in, index, stream); },
                 "index_select: these shapes do not fit together: out [3, 3], in [2, 3], index [2] of i32");
  expect_message([&] { ops::gather(two, in, large, stream); }, "gather: index[1] = 3 is not in [0, 3)");
  expect_message([&] { ops::gather(zeros({3}), in, index, stream); },
                 "gather: these shapes do not fit together: out [3], in [2, 3]");
  expect_message([&] { ops::gather_backward(in, zeros({2}), tokens_of({0}, {1}), Into::overwrite, stream); },
                 "gather_backward: needs 2 i32: index [1] of i32");
}

TEST_F(ShapeErrors, ProductsOfOtherShapesAreRefused) {
  const auto refuse = [&](const Shape& out, const Shape& a, const Shape& b) {
    expect_message(
        [&] { ops::matmul(zeros(out), zeros(a), false, zeros(b), false, Into::overwrite, stream); },
        concat("matmul: these shapes do not fit together: out ", name(out), ", a ", name(a), ", b ",
               name(b)));
  };
  refuse({2, 3, 5}, {2, 3, 4}, {3, 4, 5});
  refuse({2, 3, 5}, {1, 3, 4}, {2, 4, 5});
  refuse({2, 3, 5}, {2, 1, 3, 4}, {4, 5});
  refuse({3, 5}, {2, 3, 4}, {2, 4, 5});
  refuse({2, 3, 5}, {3, 4}, {4, 5});
  refuse({2, 3, 5}, {2, 3, 4}, {2, 5, 4});
  refuse({3}, {3, 4}, {4});
}

using LargeOutputs = ShapeErrors;

/// Outputs that are stored past the caches, with rows that begin and end within a cache line, in another
/// order than smaller ones.
TEST_F(LargeOutputs, AreThoseOfSmallOnes) {
  constexpr std::size_t rows = 601, heads = 5, columns = 1403;
  const Shape in_shape{1, rows, heads, columns}, out_shape{1, heads, rows, columns};
  const Tensor in = zeros(in_shape), permuted = zeros(out_shape),
               joined = zeros({rows, heads * columns + 77});
  for (std::size_t i = 0; i < in.count(); ++i) in.data<float>()[i] = static_cast<float>(i);
  const Tensor matrix = in.view(0, {rows, heads * columns}), rest = zeros({rows, 77});
  ops::fill(rest, -1, Stream());
  const int order[] = {0, 2, 1, 3};
  for (const int threads : {1, 3}) {
    const Stream s = Stream::host(threads);
    ops::fill(permuted, 0, s), ops::fill(joined, 0, s);
    ops::permute(permuted, in, order, Into::overwrite, s);
    ops::cat(joined, std::vector<Tensor>{rest, matrix}, 1, s);
    std::size_t wrong = 0;
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t h = 0; h < heads; ++h) {
        const float* const row = in.data<float>() + (r * heads + h) * columns;
        const float* const at = permuted.data<float>() + (h * rows + r) * columns;
        const float* const part = joined.data<float>() + r * (heads * columns + 77) + 77 + h * columns;
        wrong += !std::equal(row, row + columns, at) + !std::equal(row, row + columns, part);
      }
    EXPECT_EQ(wrong, 0u) << threads;
  }
}

}  // namespace
}  // namespace rz::test
