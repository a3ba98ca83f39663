// Recorded operators that move elements, and products of batches of matrices: gradients of parts and of
// factors of every product, what a part's gradient costs, dtypes with autocast, errors.

#include "autograd_lite/shape_ops.h"

#include <gtest/gtest.h>

#include "tests/autograd/gradients.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::nn {
namespace {

TEST(ShapeOps, TransposeOfAMatrix) {
  Tape tape;
  const Var turned = transpose(tape, tape.constant(test::tensor_of({1, 2, 3, 4, 5, 6}, {2, 3})), -2, -1);
  EXPECT_EQ(tape.value(turned).shape(), (Shape{3, 2}));
  EXPECT_EQ(test::values_of(tape.value(turned)), (test::Values{1, 4, 2, 5, 3, 6}));
}

TEST(ShapeOps, SplitGradients) {
  const Tensor x = random({3, 6, 2}, "x");
  expect_gradients(
      [](Tape& t, const auto& v) {
        const std::vector<Var> parts = split(t, v[0], {1, 3, 0, 2}, 1);
        EXPECT_EQ(t.value(parts[2]).shape(), (Shape{3, 0, 2}));
        return cat(t, {parts[3], mul(t, parts[1], narrow(t, v[0], 1, 0, 3)), parts[2]}, 1);
      },
      {x}, 5e-3);
  // Every set of parts that have a gradient, as the only use, and as one of two.
  for (int used = 1; used < 16; ++used)
    for (const bool twice : {false, true})
      expect_gradients(
          [=](Tape& t, const auto& v) {
            const Var y = mul(t, v[0], 2);
            std::vector<Var> some;
            const std::vector<Var> parts = split(t, y, {1, 2, 1, 2}, 1);
            for (int i = 0; i < 4; ++i)
              if (used >> i & 1) some.push_back(parts[static_cast<std::size_t>(i)]);
            if (twice) some.push_back(y);
            return cat(t, some, 1);
          },
          {x});
}

TEST(ShapeOps, SelectAndFlatten) {
  const Tensor x = random({3, 4, 2, 5}, "x");
  Tape tape;
  const Var m = tape.constant(test::tensor_of({1, 2, 3, 4, 5, 6}, {3, 2})), all = tape.constant(x);
  EXPECT_EQ(test::values_of(tape.value(select(tape, m, -2, 2))), (test::Values{5, 6}));
  EXPECT_EQ(test::values_of(tape.value(select(tape, m, 1, 0))), (test::Values{1, 3, 5}));
  EXPECT_EQ(tape.value(select(tape, all, 3, 4)).shape(), (Shape{3, 4, 2}));
  EXPECT_EQ(tape.value(flatten(tape, all)).shape(), (Shape{120}));
  EXPECT_EQ(tape.value(flatten(tape, all, 1)).shape(), (Shape{3, 40}));
  EXPECT_EQ(tape.value(flatten(tape, all, -3, -2)).shape(), (Shape{3, 8, 5}));
  EXPECT_EQ(tape.value(flatten(tape, all, 0, 0)).shape(), x.shape());
  EXPECT_EQ(tape.value(flatten(tape, tape.constant(random({}, "scalar")))).shape(), (Shape{1}));
  EXPECT_STREQ(test::error_of([&] { select(tape, m, 1, 2); }).what(),
               "select: index 2 of dimension 1 of [3, 2]");
  EXPECT_STREQ(test::error_of([&] { flatten(tape, m, 1, 0); }).what(),
               "flatten: dimension 1 of [3, 2] is after dimension 0");
}

/// The gradients of all parts are written into one tensor.
TEST(ShapeOps, PartsShareTheGradient) {
  const auto bytes_of_a_pass = [](bool all) {
    Tape tape;
    const Var x = tape.variable(random({64, 30}, "x"));
    const Var y = mul(tape, x, 2);
    Var loss;
    const std::vector<Var> parts = split(tape, y, {10, 10, 10}, 1);
    for (const Var part : all ? parts : std::vector<Var>{parts[0]}) {
      const Var own = sum(tape, part);
      loss = loss.defined() ? add(tape, loss, own) : own;
    }
    tape.backward(loss);
    return tape.pool().statistics().bytes;
  };
  // The parts' own gradients, of a third each, and scalars.
  EXPECT_LT(bytes_of_a_pass(true), bytes_of_a_pass(false) + 2 * 64 * 10 * 4 + 4096);
}

TEST(ShapeOps, AnIndexIsInPlaceOfTheFirstExtent) {
  Tape tape;
  const Tensor index = test::tokens_of({3, 1, 1, 0, 3, 3}, {2, 3});
  EXPECT_EQ(tape.value(index_select(tape, tape.constant(random({4, 3, 2}, "x")), index)).shape(),
            (Shape{2, 3, 3, 2}));
}

TEST(ShapeOps, BatchedProductGradients) {
  struct Case {
    Shape of_a, of_b;
  };
  for (const auto& [of_a, of_b] : {Case{{2}, {2}}, Case{{2, 3}, {2, 3}}, Case{{2}, {}}, Case{{}, {3}},
                                   Case{{2, 2}, {}}, Case{{}, {2, 2}}})
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true}) {
        const auto factor = [](const Shape& leading, std::size_t rows, std::size_t columns, bool transposed,
                               const char* name) {
          std::vector<std::size_t> extents;
          for (int d = 0; d < leading.dims(); ++d) extents.push_back(leading[d]);
          extents.insert(extents.end(), {transposed ? columns : rows, transposed ? rows : columns});
          return random(Shape(std::span<const std::size_t>(extents)), name);
        };
        expect_gradients(
            [=](Tape& t, const auto& v) { return matmul(t, v[0], transpose_a, v[1], transpose_b); },
            {factor(of_a, 3, 4, transpose_a, "a"), factor(of_b, 4, 2, transpose_b, "b")});
      }
}

TEST(ShapeOps, AutocastCastsFactorsAndMixedParts) {
  Tape tape;
  const Tape::Autocast autocast(tape, DType::bf16);
  const Var a = tape.variable(random({2, 3, 4}, "a")), b = tape.variable(random({2, 4, 3}, "b"));
  const Var product = matmul(tape, a, false, b, false);
  EXPECT_EQ(tape.value(product).dtype(), DType::bf16);
  EXPECT_EQ(tape.value(permute(tape, product, {1, 0, 2})).dtype(), DType::bf16);
  const Var both = cat(tape, {product, narrow(tape, a, 2, 0, 3)}, 0);
  EXPECT_EQ(tape.value(both).dtype(), DType::f32);
  tape.backward(sum(tape, both));
  EXPECT_EQ(tape.grad(a).dtype(), DType::f32);
  EXPECT_EQ(tape.grad(b).dtype(), DType::f32);
}

/// f32 gradients of parameters in bf16.
TEST(ShapeOps, GradientsOfParametersMayBeWider) {
  Tape tape;
  Parameter p;
  p.shape = {2, 3};
  p.value = Tensor::zeros({2, 3}, DType::bf16);
  p.grad = Tensor::zeros({2, 3});
  for (const bool fresh : {true, false}) {
    p.grad_is_fresh = fresh;
    const Var x = tape.parameter(p);
    const Tensor index = test::tokens_of({0, 1}, {2});
    Var loss = sum(tape, permute(tape, x, {1, 0}));
    const Var data = tape.constant(Tensor::zeros({4, 2, 3}, DType::bf16));
    for (const Var part : {narrow(tape, x, 0, 1, 1), index_select(tape, x, index), gather(tape, x, index),
                           cat(tape, {x, x}, 0), reshape(tape, x, {3, 2}), add(tape, x, x), mul(tape, x, 2),
                           add(tape, data, x), x})
      loss = add(tape, loss, sum(tape, part));
    tape.backward(loss);
    // permute, index_select, cat, add twice; narrow; gather; reshape, mul by 2; the sum over four; the sum
    const double n = fresh ? 1 : 2;
    EXPECT_EQ(test::values_of(p.grad), (test::Values{15 * n, 14 * n, 14 * n, 15 * n, 16 * n, 15 * n}));
    tape.reset();
  }
}

TEST(ShapeOps, ErrorsNameTheOperatorAndTheShapes) {
  Tape tape;
  const Var x = tape.constant(random({2, 3}, "x")), y = tape.constant(random({3, 2}, "y"));
  const auto refused = [](const auto& call) {
    const Error e = test::error_of(call);
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    return std::string(e.what());
  };
  EXPECT_EQ(refused([&] {
              permute(tape, x, {0, 0});
            }),
            "permute: {0, 0} is no order of the dimensions of [2, 3]");
  EXPECT_EQ(refused([&] { transpose(tape, x, 0, 2); }), "transpose: the tensor [2, 3] has no extent 2");
  EXPECT_EQ(refused([&] {
              split(tape, x, {1, 1}, -1);
            }),
            "split: the lengths of 2 parts are 2 together, and dimension -1 of [2, 3] is 3");
  EXPECT_EQ(refused([&] { narrow(tape, x, 1, 2, 2); }),
            "narrow: 2 to 4 is outside of dimension 1 of in [2, 3]");
  EXPECT_EQ(refused([&] {
              cat(tape, {x, y}, 0);
            }),
            "cat: these do not fit together along dimension 0: out [5, 3] of f32, part [2, 3] of f32, part "
            "[3, 2] of f32");
  EXPECT_EQ(refused([&] { cat(tape, std::span<const Var>(), 0); }), "cat: there is no part");
  EXPECT_EQ(refused([&] {
              index_select(tape, tape.constant(random({2, 2, 2}, "z")), Tensor::zeros({2, 2, 2}, DType::i32));
            }),
            "index_select: the result of an index [2, 2, 2] in [2, 2, 2] would have 5 extents, at most 4 are "
            "supported");
  EXPECT_EQ(refused([&] {
              gather(tape, x, test::tokens_of({0, 3}, {2}));
            }),
            "gather: index[1] = 3 is not in [0, 3)");
  EXPECT_EQ(refused([&] { matmul(tape, x, false, x, false); }),
            "matmul: these shapes do not fit together: out [2, 3], a [2, 3], b [2, 3]");
}

}  // namespace
}  // namespace rz::nn
