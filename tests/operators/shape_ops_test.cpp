// Runs: ci host operators
// Not under sanitizers: Types/ShapeOps[.].*/f16$

// Operators that move elements, exactly, in random shapes of 1 to 4 extents with extents of 1, parts of 0,
// rows with a stride and every dtype; products of batches of matrices against sums in double.

#include "tensor/shape_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "comm/core/math.h"
#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Into;
using Places = std::vector<std::size_t>;

class ShapeOps : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();
  std::mt19937 random{7};

  bool adds() const { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }
  std::size_t below(std::size_t n) { return random() % n; }

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

  /// Small whole numbers, which all dtypes represent, and sums of which are exact.
  std::vector<int> numbers(std::size_t n) {
    std::vector<int> all(n);
    for (int& x : all) x = static_cast<int>(below(100));
    return all;
  }
  template <class T>
  static std::vector<std::byte> bytes_as(const std::vector<int>& values) {
    std::vector<T> typed;
    for (const int v : values) {
      if constexpr (std::is_integral_v<T>)
        typed.push_back(static_cast<T>(v));
      else
        typed.push_back(from_f32<T>(static_cast<float>(v)));
    }
    const auto bytes = std::as_bytes(std::span<const T>(typed));
    return {bytes.begin(), bytes.end()};
  }
  std::vector<std::byte> bytes_of(const std::vector<int>& values) const {
    switch (dtype) {
      case DType::u8:
        return bytes_as<std::uint8_t>(values);
      case DType::i32:
        return bytes_as<std::int32_t>(values);
      case DType::i64:
        return bytes_as<std::int64_t>(values);
      case DType::f16:
        return bytes_as<f16>(values);
      case DType::bf16:
        return bytes_as<bf16>(values);
      default:
        return bytes_as<float>(values);
    }
  }

  /// In a tensor of its own; in one of three between rows of other elements.
  Tensor place(const std::vector<int>& values, const Shape& shape) {
    const std::size_t columns = shape.dims() ? shape[-1] : 1;
    if (below(3) > 0 || columns == 0 || values.size() == columns) {
      const Tensor t = empty_on(stream, shape, dtype);
      t.assign(std::span<const std::byte>(bytes_of(values)), stream);
      return t;
    }
    const std::size_t before = below(3), stride = columns + before + below(4);
    std::vector<int> all(values.size() / columns * stride, 101);
    for (std::size_t i = 0; i < values.size(); ++i)
      all[i / columns * stride + before + i % columns] = values[i];
    const Tensor whole = empty_on(stream, shape.with_last(stride), dtype);
    whole.assign(std::span<const std::byte>(bytes_of(all)), stream);
    return whole.columns(before, columns);
  }
  void expect(const Tensor& got, const std::vector<int>& expected, const std::string& what) {
    const Tensor host = got.on_host(stream);
    const std::vector<std::byte> bytes = bytes_of(expected);
    ASSERT_EQ(host.bytes(), bytes.size()) << what;
    EXPECT_TRUE(bytes.empty() || std::memcmp(host.raw(), bytes.data(), bytes.size()) == 0) << what;
  }
  /// Moves elements by `move`, overwriting and adding; element i of the result is places[i] of the input.
  template <class Move>
  void expect_moved(const Shape& out_shape, const Shape& in_shape, const Places& places, const Move& move,
                    const std::string& what) {
    const std::vector<int> values = numbers(in_shape.count()), before = numbers(out_shape.count());
    const Tensor in = place(values, in_shape), out = place(before, out_shape);
    std::vector<int> moved;
    for (const std::size_t p : places) moved.push_back(values[p]);
    move(out, in, Into::overwrite);
    expect(out, moved, what);
    if (!adds()) return;
    const Tensor sum = place(before, out_shape);
    move(sum, in, Into::accumulate);
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += before[i];
    expect(sum, moved, what + ", added");
  }
};

INSTANTIATE_TEST_SUITE_P(Types, ShapeOps,
                         testing::Values(DType::f32, DType::f16, DType::bf16, DType::u8, DType::i32,
                                         DType::i64),
                         [](const auto& info) { return std::string(name(info.param)); });

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

std::string text(const std::vector<int>& order) {
  std::string all;
  for (const int d : order) all += std::to_string(d) + " ";
  return all;
}

TEST_P(ShapeOps, Permute) {
  const auto expect_permuted = [&](const Shape& in, std::vector<int> order) {
    std::vector<std::size_t> extents;
    for (const int d : order) extents.push_back(in[d]);
    const Shape out{std::span<const std::size_t>(extents)};
    Places places;
    for (std::size_t i = 0; i < out.count(); ++i) {
      const Index to = index_of(out, i);
      Index from{};
      for (std::size_t d = 0; d < order.size(); ++d) from[static_cast<std::size_t>(order[d])] = to[d];
      places.push_back(element_at(in, from));
    }
    for (int& d : order)
      if (below(2)) d -= in.dims();
    expect_moved(
        out, in, places,
        [&](const Tensor& to, const Tensor& from, Into into) { ops::permute(to, from, order, into, stream); },
        rz::concat(name(in), " by ", text(order)));
  };
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 60 : 12); ++i) {
      std::vector<int> order(static_cast<std::size_t>(dims));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      expect_permuted(random_shape(dims), order);
    }
  expect_permuted({130, 70}, {1, 0});
  expect_permuted({128, 64}, {1, 0});
  expect_permuted({130, 600}, {1, 0});
  expect_permuted({2, 3, 32, 64}, {0, 2, 1, 3});
  expect_permuted({2, 33, 3, 64}, {3, 0, 2, 1});
  expect_permuted({2, 0, 3}, {2, 1, 0});
}

TEST_P(ShapeOps, PermuteOfAScalarIsACopy) {
  expect_moved(
      {}, {}, {0},
      [&](const Tensor& to, const Tensor& from, Into into) { ops::permute(to, from, {}, into, stream); },
      "a scalar");
}

/// Elements [start, start + length) of a dimension.
Places part(const Shape& whole, int dimension, std::size_t start, std::size_t length) {
  Places places;
  for (std::size_t i = 0; i < whole.count(); ++i) {
    const std::size_t at = index_of(whole, i)[static_cast<std::size_t>(dimension)];
    if (at >= start && at < start + length) places.push_back(i);
  }
  return places;
}

TEST_P(ShapeOps, NarrowAndItsGradient) {
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 40 : 10); ++i) {
      const Shape in = random_shape(dims);
      const int d = static_cast<int>(below(static_cast<std::size_t>(dims))), given = below(2) ? d : d - dims;
      const std::size_t start = below(in[d] + 1), length = below(in[d] - start + 1);
      const Shape out = in.with(d, length);
      const Places places = part(in, d, start, length);
      const std::string what = rz::concat(start, " + ", length, " of dimension ", d, " of ", name(in));
      expect_moved(
          out, in, places,
          [&](const Tensor& to, const Tensor& from, Into into) {
            ops::narrow(to, from, given, start, into, stream);
          },
          what);
      if (!adds()) continue;
      const std::vector<int> before = numbers(in.count()), gradient = numbers(out.count());
      const Tensor d_out = place(gradient, out), stored = place(before, in), added = place(before, in);
      std::vector<int> expected(in.count()), sum = before;
      for (std::size_t k = 0; k < places.size(); ++k)
        expected[places[k]] = gradient[k], sum[places[k]] += gradient[k];
      ops::narrow_backward(stored, d_out, given, start, Into::overwrite, stream);
      expect(stored, expected, what + ": gradient");
      ops::narrow_backward(added, d_out, given, start, Into::accumulate, stream);
      expect(added, sum, what + ": added gradient");
    }
}

TEST_P(ShapeOps, Cat) {
  for (int dims = 1; dims <= 4; ++dims)
    for (int i = 0; i < (on_host() ? 30 : 8); ++i) {
      const Shape like = random_shape(dims);
      const int d = static_cast<int>(below(static_cast<std::size_t>(dims))), given = below(2) ? d : d - dims;
      std::vector<Tensor> parts;
      std::vector<std::vector<int>> values;
      std::size_t length = 0;
      const std::size_t count = 1 + below(4);
      for (std::size_t p = 0; p < count; ++p) {
        const Shape shape = like.with(d, below(4) ? below(20) : 0);
        if (shape.count() > 20000) continue;
        values.push_back(numbers(shape.count()));
        parts.push_back(place(values.back(), shape));
        length += shape[d];
      }
      if (parts.empty()) continue;
      const Shape out_shape = like.with(d, length);
      const Tensor out = place(numbers(out_shape.count()), out_shape);
      std::vector<int> expected(out_shape.count());
      std::size_t start = 0;
      for (std::size_t p = 0; p < parts.size(); ++p) {
        const std::size_t own = parts[p].shape()[d];
        const Places places = part(out_shape, d, start, own);
        for (std::size_t k = 0; k < places.size(); ++k) expected[places[k]] = values[p][k];
        start += own;
      }
      ops::cat(out, parts, given, stream);
      expect(out, expected, rz::concat(parts.size(), " parts along dimension ", d, " of ", name(out_shape)));
    }
}

/// What lies between the rows of the output stays as it is.
TEST_P(ShapeOps, GapsBetweenRowsAreNotWritten) {
  const Tensor whole = empty_on(stream, {6, 9}, dtype);
  const std::vector<int> before = numbers(54), values = numbers(24);
  whole.assign(std::span<const std::byte>(bytes_of(before)), stream);
  const Tensor in = empty_on(stream, {4, 6}, dtype);
  in.assign(std::span<const std::byte>(bytes_of(values)), stream);
  const int order[] = {1, 0};
  ops::permute(whole.columns(3, 4), in, order, Into::overwrite, stream);
  std::vector<int> expected = before;
  for (std::size_t r = 0; r < 6; ++r)
    for (std::size_t c = 0; c < 4; ++c) expected[r * 9 + 3 + c] = values[c * 6 + r];
  expect(whole, expected, "columns 3 to 7");
}

class Selection : public ShapeOps {
 protected:
  std::vector<std::int32_t> indices(std::size_t n, std::size_t limit) {
    std::vector<std::int32_t> all(n);
    for (auto& x : all) x = static_cast<std::int32_t>(below(limit));
    return all;
  }
  Tensor flat(const std::vector<int>& values, const Shape& shape) const {
    const Tensor t = empty_on(stream, shape, dtype);
    t.assign(std::span<const std::byte>(bytes_of(values)), stream);
    return t;
  }
};

INSTANTIATE_TEST_SUITE_P(Types, Selection, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(Selection, IndexSelect) {
  struct Case {
    Shape index, in;
  };
  for (const auto& [index_shape, in] : {Case{{5}, {7, 33}}, Case{{2, 3}, {4, 5}}, Case{{40}, {3, 2, 9}},
                                        Case{{6}, {50}}, Case{{3}, {4, 2, 3, 5}}, Case{{}, {4, 3}}}) {
    const std::size_t n = index_shape.count(), row = in.count() / in[0];
    std::vector<std::size_t> extents;
    for (int d = 0; d < index_shape.dims(); ++d) extents.push_back(index_shape[d]);
    for (int d = 1; d < in.dims(); ++d) extents.push_back(in[d]);
    const Shape out_shape{std::span<const std::size_t>(extents)};
    const std::vector<int> values = numbers(in.count()), before = numbers(in.count());
    std::vector<int> gradient = numbers(n * row);
    for (int& g : gradient) g %= 4;  // sums of 40 and one below 100 are exact in bf16
    const auto chosen = indices(n, in[0]);
    std::vector<int> expected, d_in(in.count()), sum = before;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < row; ++j) {
        const std::size_t at = static_cast<std::size_t>(chosen[i]) * row + j;
        expected.push_back(values[at]);
        d_in[at] += gradient[i * row + j], sum[at] += gradient[i * row + j];
      }
    const Tensor index = to_device(chosen, index_shape, stream), out = empty_on(stream, out_shape, dtype);
    ops::index_select(out, flat(values, in), index, stream);
    expect(out, expected, name(in));
    const Tensor stored = flat(before, in), added = flat(before, in), d_out = flat(gradient, out_shape);
    ops::index_select_backward(stored, d_out, index, Into::overwrite, stream);
    expect(stored, d_in, name(in) + ": gradient");
    ops::index_select_backward(added, d_out, index, Into::accumulate, stream);
    expect(added, sum, name(in) + ": added gradient");
  }
}

TEST_P(Selection, IndexSelectOfNothing) {
  const Tensor index = empty_on(stream, {0}, DType::i32), in = flat(numbers(6), {2, 3}),
               out = empty_on(stream, {0, 3}, dtype);
  ops::index_select(out, in, index, stream);
  ops::index_select_backward(in, out, index, Into::accumulate, stream);
  ops::index_select_backward(in, out, index, Into::overwrite, stream);
  expect(in, std::vector<int>(6), "a gradient of nothing");
}

TEST_P(Selection, GatherOfOneElementOfEachRow) {
  struct Case {
    Shape index;
    std::size_t columns;
  };
  for (const auto& [index_shape, columns] :
       {Case{{300}, 9}, Case{{3, 5}, 33}, Case{{}, 4}, Case{{2, 3, 4}, 1}}) {
    const std::size_t n = index_shape.count();
    std::vector<std::size_t> extents;
    for (int d = 0; d < index_shape.dims(); ++d) extents.push_back(index_shape[d]);
    extents.push_back(columns);
    const Shape shape{std::span<const std::size_t>(extents)};
    const std::vector<int> values = numbers(n * columns), gradient = numbers(n),
                           before = numbers(n * columns);
    const auto chosen = indices(n, columns);
    std::vector<int> expected, d_in(n * columns), sum = before;
    for (std::size_t r = 0; r < n; ++r) {
      const std::size_t at = r * columns + static_cast<std::size_t>(chosen[r]);
      expected.push_back(values[at]);
      d_in[at] = gradient[r], sum[at] += gradient[r];
    }
    const Tensor index = to_device(chosen, index_shape, stream), out = empty_on(stream, index_shape, dtype);
    ops::gather(out, place(values, shape), index, stream);
    expect(out, expected, name(shape));
    const Tensor stored = place(before, shape), added = place(before, shape),
                 d_out = flat(gradient, index_shape);
    ops::gather_backward(stored, d_out, index, Into::overwrite, stream);
    expect(stored, d_in, name(shape) + ": gradient");
    ops::gather_backward(added, d_out, index, Into::accumulate, stream);
    expect(added, sum, name(shape) + ": added gradient");
  }
}

TEST_P(Selection, AnIndexOutOfRangeOnADeviceIsSeenAndDoesNoHarm) {
  if (on_host()) GTEST_SKIP() << "the host refuses such an index";
  const Tensor in = flat({1, 2, 3, 4, 5, 6, 7, 8}, {4, 2});
  const Tensor index = to_device({1, 2, -1, std::numeric_limits<std::int32_t>::max()}, {4}, stream);
  const Tensor out = empty_on(stream, {4}, dtype), d_in = empty_on(stream, {4, 2}, dtype);
  ops::gather(out, in, index, stream);
  const Values got = from_device(out, stream);
  EXPECT_EQ(got[0], 2);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
  ops::gather_backward(d_in, flat({1, 1, 1, 1}, {4}), index, Into::overwrite, stream);
  EXPECT_EQ(from_device(d_in, stream), (Values{0, 1, 0, 0, 0, 0, 0, 0}));
}

// ---- products

class BatchedProducts : public Selection {
 protected:
  struct Matrices {
    Values values;
    Shape shape;
    bool transposed;
    /// That of a batch, not transposed.
    Values matrix(std::size_t batch, std::size_t rows, std::size_t columns) const {
      const auto first = values.begin() + static_cast<long>(shape.dims() > 2 ? batch * rows * columns : 0);
      const Values m(first, first + static_cast<long>(rows * columns));
      return transposed ? reference::transpose(m, columns, rows) : m;
    }
  };
  Matrices matrices(const Shape& leading, std::size_t rows, std::size_t columns, bool transposed) {
    std::vector<std::size_t> extents;
    for (int d = 0; d < leading.dims(); ++d) extents.push_back(leading[d]);
    extents.push_back(transposed ? columns : rows);
    extents.push_back(transposed ? rows : columns);
    const Shape shape{std::span<const std::size_t>(extents)};
    return {from_device(to_device(random_values(shape.count(), static_cast<unsigned>(random())),
                                  {shape.count()}, dtype, stream),
                        stream),
            shape, transposed};
  }
  /// In rows with a stride, if a number is.
  Tensor tensor_of(const Values& values, const Shape& shape, DType t, std::size_t gap) const {
    const std::size_t columns = shape[-1], stride = columns + gap;
    Values all(values.size() / columns * stride, NAN);
    for (std::size_t i = 0; i < values.size(); ++i) all[i / columns * stride + i % columns] = values[i];
    return to_device(all, shape.with_last(stride), t, stream).columns(0, columns);
  }
};

INSTANTIATE_TEST_SUITE_P(Types, BatchedProducts, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(BatchedProducts, AreThoseOfTheirMatrices) {
  struct Case {
    Shape of_a, of_b;
    std::size_t m, n, k;
  };
  const Case cases[] = {{{3}, {3}, 5, 7, 4},  {{2, 3}, {2, 3}, 8, 8, 16}, {{40}, {40}, 3, 9, 5},
                        {{3}, {}, 5, 6, 7},   {{}, {2, 2}, 4, 3, 5},      {{2}, {2}, 130, 110, 120},
                        {{}, {}, 5, 37, 11},  {{}, {}, 17, 23, 40},       {{1, 2}, {1, 2}, 16, 1, 3},
                        {{2, 2}, {}, 6, 5, 8}};
  for (const auto& [of_a, of_b, m, n, k] : cases)
    for (int form = 0; form < 8; ++form) {
      const Matrices a = matrices(of_a, m, k, form & 1), b = matrices(of_b, k, n, form & 2);
      const Into into = form & 4 ? Into::accumulate : Into::overwrite;
      const std::size_t gap = below(2) * 8;
      const Shape leading = of_a.dims() ? of_a : of_b;
      const Matrices before = matrices(leading, m, n, false);
      const DType results[] = {dtype, DType::f32};
      Values got[2];
      for (int r = 0; r < 2; ++r) {
        const Tensor out = tensor_of(before.values, before.shape, results[r], gap);
        ops::matmul(out, tensor_of(a.values, a.shape, dtype, gap), a.transposed,
                    tensor_of(b.values, b.shape, dtype, gap), b.transposed, into, stream);
        got[r] = from_device(out, stream);
      }
      for (std::size_t batch = 0; batch < leading.count(); ++batch) {
        Values x = a.matrix(batch, m, k), y = b.matrix(batch, k, n);
        Values sums = reference::matmul(x, y, m, n, k);
        for (double& v : x) v = std::abs(v);
        for (double& v : y) v = std::abs(v);
        const Values sizes = reference::matmul(x, y, m, n, k);
        for (std::size_t i = 0; i < m * n; ++i) {
          const std::size_t at = batch * m * n + i;
          double rounded = 1e-3;  // what is rounded to the result's type
          if (into == Into::accumulate) {
            if (!on_host() && !emulated_device) rounded += std::abs(sums[i]);  // by some kernels of cuBLASLt
            sums[i] += before.values[at];
          }
          rounded += std::abs(sums[i]);
          for (int r = 0; r < 2; ++r) {
            const double u = results[r] == DType::bf16 ? 0x1p-8 : results[r] == DType::f16 ? 0x1p-11 : 0;
            ASSERT_NEAR(got[r][at], sums[i], 4e-7 * (1 + sizes[i]) + u * rounded)
                << name(a.shape) << (a.transposed ? "ᵀ · " : " · ") << name(b.shape)
                << (b.transposed ? "ᵀ" : "") << " into " << name(results[r]) << ": " << at;
          }
        }
      }
    }
}

TEST_P(BatchedProducts, ASumOfNothingIsZero) {
  const Tensor out = to_device(Values(12, 3), {2, 2, 3}, dtype, stream),
               a = empty_on(stream, {2, 2, 0}, dtype), b = empty_on(stream, {2, 0, 3}, dtype);
  ops::matmul(out, a, false, b, false, Into::accumulate, stream);
  EXPECT_EQ(from_device(out, stream), Values(12, 3));
  ops::matmul(out, a, false, b, false, Into::overwrite, stream);
  EXPECT_EQ(from_device(out, stream), Values(12, 0));
}

}  // namespace
}  // namespace rz::test
