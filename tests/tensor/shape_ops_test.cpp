// Runs: ci

// Operators that move elements: errors, and the same bits for every number of threads. What they compute is
// tested in tests/operators/shape_ops_test.cpp, which runs on the host too.

#include "tensor/shape_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "tensor/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz {
namespace {

using ops::Into;
using test::tensor_of;
using test::tokens_of;

Tensor zeros(const Shape& shape, DType dtype = DType::f32) { return Tensor::zeros(shape, dtype); }

void expect_refused(const std::function<void()>& call, const std::string& message) {
  const Error e = test::error_of(call);
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_EQ(std::string(e.what()), message);
}

TEST(ShapeOps, ErrorsOfPermuteNameTheShapes) {
  const Stream s;
  const int swapped[] = {1, 0}, twice[] = {0, 0}, beyond[] = {0, 2}, three[] = {0, 1, 2};
  const Tensor a = zeros({2, 3}), b = zeros({3, 2}), other = zeros({3, 2}, DType::bf16);
  const auto overwrite = Into::overwrite;
  for (const std::span<const int> order : {std::span<const int>(twice), {beyond}, {three}}) {
    const Error e = test::error_of([&] { ops::permute(b, a, order, overwrite, s); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("is no order of the dimensions of [2, 3]"), std::string::npos)
        << e.what();
  }
  expect_refused([&] { ops::permute(a, a, swapped, overwrite, s); },
                 "permute: these shapes do not fit together: out [2, 3], in [2, 3]");
  expect_refused([&] { ops::permute(other, a, swapped, overwrite, s); },
                 "permute: these shapes do not fit together: out [3, 2] of bf16, in [2, 3]");
  const Tensor integers = zeros({2, 3}, DType::i32), turned = zeros({3, 2}, DType::i32);
  EXPECT_NO_THROW(ops::permute(turned, integers, swapped, overwrite, s));
  expect_refused([&] { ops::permute(turned, integers, swapped, Into::accumulate, s); },
                 "permute: these shapes do not fit together: out [3, 2] of i32, in [2, 3] of i32");
}

TEST(ShapeOps, ErrorsOfNarrowNameTheShapes) {
  const Stream s;
  const Tensor a = zeros({2, 3});
  const auto overwrite = Into::overwrite;
  expect_refused(
      [&] {
        ops::narrow(zeros({2, 2}), a, 2, 0, overwrite, s);
      },
      "narrow: the tensor [2, 3] has no extent 2");
  expect_refused(
      [&] {
        ops::narrow(zeros({2, 2}), a, -3, 0, overwrite, s);
      },
      "narrow: the tensor [2, 3] has no extent -3");
  expect_refused(
      [&] {
        ops::narrow(zeros({2, 2}), a, 1, 2, overwrite, s);
      },
      "narrow: 2 to 4 is outside of dimension 1 of in [2, 3]");
  expect_refused(
      [&] {
        ops::narrow(zeros({1, 2}), a, -1, 0, overwrite, s);
      },
      "narrow: these shapes do not fit together: in [2, 3], out [1, 2]");
  expect_refused(
      [&] {
        ops::narrow_backward(a, zeros({2, 2}), 1, ~std::size_t{0}, overwrite, s);
      },
      concat("narrow_backward: ", ~std::size_t{0}, " to ", 1, " is outside of dimension 1 of d_in [2, 3]"));
}

TEST(ShapeOps, ErrorsOfCatNameTheShapes) {
  const Stream s;
  const Tensor a = zeros({2, 3}), b = zeros({3, 2}), other = zeros({3, 2}, DType::bf16);
  const std::vector<Tensor> parts{a, b}, mixed{b, other};
  expect_refused(
      [&] {
        ops::cat(zeros({5, 3}), parts, 0, s);
      },
      "cat: these do not fit together along dimension 0: out [5, 3] of f32, part [2, 3] of f32, part "
      "[3, 2] of f32");
  expect_refused(
      [&] {
        ops::cat(zeros({6, 2}), mixed, 0, s);
      },
      "cat: these do not fit together along dimension 0: out [6, 2] of f32, part [3, 2] of f32, part "
      "[3, 2] of bf16");
  expect_refused(
      [&] {
        ops::cat(zeros({6, 2}), std::vector<Tensor>{b}, 0, s);
      },
      "cat: these do not fit together along dimension 0: out [6, 2] of f32, part [3, 2] of f32");
  expect_refused([&] { ops::cat(a, {}, 0, s); }, "cat: there is no part");
  expect_refused([&] { ops::cat(a, std::vector<Tensor>{a}, 2, s); },
                 "cat: the tensor [2, 3] has no extent 2");
}

TEST(ShapeOps, AnIndexOutOfRangeIsNamed) {
  const Stream s;
  const Tensor in = zeros({2, 3}), out = zeros({2, 3}), index = tokens_of({1, 2}, {2});
  expect_refused([&] { ops::index_select(out, in, index, s); },
                 "index_select: index[1] = 2 is not in [0, 2)");
  expect_refused(
      [&] {
        ops::index_select_backward(in, out, tokens_of({-1, 0}, {2}), Into::overwrite, s);
      },
      "index_select_backward: index[0] = -1 is not in [0, 2)");
  expect_refused(
      [&] {
        ops::index_select(zeros({3, 3}), in, index, s);
      },
      "index_select: these shapes do not fit together: out [3, 3], in [2, 3], index [2] of i32");
  expect_refused(
      [&] {
        ops::gather(zeros({2}), in, tokens_of({0, 3}, {2}), s);
      },
      "gather: index[1] = 3 is not in [0, 3)");
  expect_refused([&] { ops::gather(zeros({3}), in, index, s); },
                 "gather: these shapes do not fit together: out [3], in [2, 3]");
  expect_refused([&] { ops::gather_backward(in, zeros({2}), tokens_of({0}, {1}), Into::overwrite, s); },
                 "gather_backward: needs 2 i32: index [1] of i32");
}

TEST(ShapeOps, ProductsOfOtherShapesAreRefused) {
  const Stream s;
  const auto refuse = [&](const Shape& out, const Shape& a, const Shape& b) {
    expect_refused([&] { ops::matmul(zeros(out), zeros(a), false, zeros(b), false, Into::overwrite, s); },
                   concat("matmul: these shapes do not fit together: out ", name(out), ", a ", name(a),
                          ", b ", name(b)));
  };
  refuse({2, 3, 5}, {2, 3, 4}, {3, 4, 5});
  refuse({2, 3, 5}, {1, 3, 4}, {2, 4, 5});
  refuse({2, 3, 5}, {2, 1, 3, 4}, {4, 5});
  refuse({3, 5}, {2, 3, 4}, {2, 4, 5});
  refuse({2, 3, 5}, {3, 4}, {4, 5});
  refuse({2, 3, 5}, {2, 3, 4}, {2, 5, 4});
  refuse({3}, {3, 4}, {4});
}

/// The bytes of the results on this many threads.
std::vector<std::byte> results(int threads, DType dtype) {
  const Stream s = Stream::host(threads, Stream::Reproducible::for_any_threads);
  std::vector<std::byte> all;
  const auto rounded = [&](const Shape& shape, unsigned seed) {
    const Tensor t = Tensor::empty(shape, dtype);
    ops::copy(t, tensor_of(test::random_values(shape.count(), seed), shape), {});
    return t;
  };
  const auto keep = [&](const Tensor& t) { all.insert(all.end(), t.raw(), t.raw() + t.bytes()); };
  const auto into = Into::accumulate;
  const int order[] = {2, 0, 3, 1};
  const Tensor x = rounded({5, 33, 7, 70}, 1), turned = rounded({7, 5, 70, 33}, 2);
  ops::permute(turned, x, order, into, s);
  keep(turned);
  const int runs[] = {2, 1, 0, 3};
  const Tensor moved = rounded({7, 33, 5, 70}, 11);
  ops::permute(moved, x, runs, into, s);
  keep(moved);
  const Tensor part = rounded({5, 20, 7, 70}, 3);
  ops::narrow(part, x, 1, 9, into, s);
  ops::narrow_backward(x, part, 1, 2, into, s);
  keep(x);
  std::vector<std::int32_t> rows;
  for (int i = 0; i < 900; ++i) rows.push_back(i * 7 % 13);
  const Tensor table = rounded({13, 40}, 4), chosen = rounded({900, 40}, 5), index = tokens_of(rows, {900});
  ops::index_select_backward(table, chosen, index, into, s);
  keep(table);
  const Tensor one = rounded({900}, 6), columns = rounded({900, 13}, 7);
  ops::gather(one, columns, index, s);
  ops::gather_backward(columns, one, index, into, s);
  keep(columns);
  struct Case {
    Shape leading;
    std::size_t m, n, k;
  };
  for (const auto& [leading, m, n, k] :
       {Case{{40}, 17, 9, 12}, Case{{3}, 150, 140, 130}, Case{{5, 7}, 64, 64, 64}}) {
    std::vector<std::size_t> extents;
    for (int d = 0; d < leading.dims(); ++d) extents.push_back(leading[d]);
    extents.insert(extents.end(), {m, n});
    const Shape shape{std::span<const std::size_t>(extents)};
    const int dims = shape.dims();
    const Tensor out = rounded(shape, 8), a = rounded(shape.with(dims - 1, k), 9),
                 b = rounded(shape.with(dims - 2, k), 10);
    ops::matmul(out, a, false, b, false, into, s);
    keep(out);
    ops::matmul(a, out, false, b, true, into, s);
    keep(a);
  }
  return all;
}

/// Outputs that are stored past the caches, with rows that begin and end within a cache line, in another
/// order than smaller ones.
TEST(ShapeOps, OutputsOfManyMegabytes) {
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

TEST(ShapeOps, ResultsHaveTheSameBitsForEveryNumberOfThreads) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<std::byte> one = results(1, dtype);
    for (const int threads : {2, 3, 8}) EXPECT_TRUE(results(threads, dtype) == one) << name(dtype) << threads;
  }
}

}  // namespace
}  // namespace rz
