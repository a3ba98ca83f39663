// Runs: ci

/// Tensors with a row stride: what they are, and which operators refuse them.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "sharding/strategy/strategy.h"
#include "tensor/attention_ops.h"
#include "tensor/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz {
namespace {

/// 0, 1, 2, …
Tensor counting(const Shape& shape) {
  const Tensor t = Tensor::empty(shape);
  std::iota(t.data<float>(), t.data<float>() + t.count(), 0.0f);
  return t;
}

TEST(UndefinedTensor, HasNoElementsToRead) {
  const Tensor none;
  for (const Error& e : {test::error_of([&] { none.data<float>(); }), test::error_of([&] { none.buffer(); }),
                         test::error_of([&] { none.on_host({}); }),
                         test::error_of([&] { none.assign(std::span<const float>(), {}); })}) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("engine.strategy().values().whole("), std::string::npos) << e.what();
  }
  EXPECT_NO_THROW(Tensor::borrow(nullptr, {0}).data<float>());
}

TEST(RowStride, ColumnsShareTheMemory) {
  const Tensor t = counting({2, 3, 8}), c = t.columns(2, 5);
  EXPECT_EQ(c.shape(), (Shape{2, 3, 5}));
  EXPECT_EQ(c.row_stride(), 8u);
  EXPECT_FALSE(c.contiguous());
  EXPECT_EQ(c.count(), 30u);
  EXPECT_EQ(c.bytes(), 120u);
  EXPECT_EQ(c.data<float>(), t.data<float>() + 2);
  EXPECT_EQ(c.columns(1, 2).row_stride(), 8u);
  EXPECT_EQ(c.columns(1, 2).data<float>(), t.data<float>() + 3);
  EXPECT_EQ(c.use_count(), 2);
}

TEST(RowStride, AllColumnsAndSingleRowsAreContiguous) {
  const Tensor t = counting({2, 8});
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(t.row_stride(), 8u);
  EXPECT_TRUE(t.columns(0, 8).contiguous());
  EXPECT_TRUE(counting({1, 8}).columns(2, 3).contiguous());
  EXPECT_EQ(counting({1, 8}).columns(2, 3).row_stride(), 3u);
  EXPECT_TRUE(counting({8}).columns(2, 3).contiguous());
  EXPECT_EQ(Tensor::zeros({}).row_stride(), 1u);
}

TEST(RowStride, LeadingExtentsMayBeReshaped) {
  const Tensor c = counting({6, 8}).columns(0, 5);
  EXPECT_EQ(c.reshape({2, 3, 5}).row_stride(), 8u);
  EXPECT_EQ(test::error_of([&] { c.reshape({5, 6}); }).code(), Errc::invalid_argument);
}

TEST(RowStride, OnHostIsContiguous) {
  const Tensor c = counting({2, 4}).columns(1, 2).on_host(Stream());
  EXPECT_TRUE(c.contiguous());
  EXPECT_EQ(test::values_of(c), (test::Values{1, 2, 5, 6}));
}

TEST(RowStride, FlatMemoryIsRefused) {
  const Tensor c = counting({2, 8}).columns(0, 5);
  for (const auto& use : std::initializer_list<std::function<void()>>{
           [&] { c.view(0, {2}); }, [&] { c.buffer(); },
           [&] { c.assign(std::span<const float>(std::vector<float>(10)), Stream()); },
           [&] { c.columns(3, 3); }, [&] { Tensor::zeros({}).columns(0, 1); }})
    EXPECT_EQ(test::error_of(use).code(), Errc::invalid_argument);
}

/// Operators without an implementation for strides name themselves and the tensor.
TEST(RowStride, OtherOperatorsRefuseIt) {
  const Stream s;
  const Tensor c = counting({4, 8}).columns(0, 6), f = counting({4, 6}), v = counting({6}), r = counting({4});
  const Tensor tokens = test::tokens_of({0, 1, 2, 3}, {1, 4}), qkv = c.reshape({1, 4, 6});
  const Tensor one = Tensor::zeros({});
  const auto overwrite = ops::Into::overwrite;
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"gelu", [&] { ops::gelu(f, c, s); }},
      {"gelu_backward", [&] { ops::gelu_backward(f, f, c, overwrite, s); }},
      {"swiglu", [&] { ops::swiglu(f, f, c, s); }},
      {"swiglu_backward", [&] { ops::swiglu_backward(c, {}, f, f, f, overwrite, overwrite, s); }},
      {"relu", [&] { ops::unary(c, f, ops::Unary::relu, s); }},
      {"relu_backward", [&] { ops::unary_backward(f, c, f, ops::Unary::relu, overwrite, s); }},
      {"tanh", [&] { ops::unary(f, c, ops::Unary::tanh, s); }},
      {"tanh_backward", [&] { ops::unary_backward(c, f, f, ops::Unary::tanh, overwrite, s); }},
      {"where", [&] { ops::where(f, c, f, f, s); }},
      {"dropout", [&] { ops::dropout(f, c, {.p = 0.5f}, s); }},
      {"linear_gelu",
       [&] {
         ops::linear_gelu(c, f, f, counting({6, 6}), {}, ops::WeightLayout::in_out, s);
       }},
      {"linear_backward_through_gelu",
       [&] {
         ops::linear_backward_through_gelu(f, f, counting({6, 6}), c, ops::WeightLayout::in_out, s);
       }},
      {"layer_norm", [&] { ops::layer_norm(f, r, r, c, v, v, 1e-5f, s); }},
      {"add_layer_norm", [&] { ops::add_layer_norm(f, f, r, r, f, c, v, v, 1e-5f, s); }},
      {"layer_norm_backward",
       [&] { ops::layer_norm_backward(f, {}, {}, f, c, v, r, r, overwrite, overwrite, s); }},
      {"rms_norm", [&] { ops::rms_norm(f, r, c, v, 1e-5f, s); }},
      {"add_rms_norm", [&] { ops::add_rms_norm(f, f, r, c, f, v, 1e-5f, s); }},
      {"rms_norm_backward", [&] { ops::rms_norm_backward(f, {}, f, c, v, r, overwrite, overwrite, s); }},
      {"attention",
       [&] {
         ops::attention(qkv, counting({1, 1, 4}), counting({1, 4, 6}), counting({1, 4, 6}),
                        counting({1, 4, 6}), {}, {}, s);
       }},
      {"attention_backward",
       [&] {
         const Tensor x = counting({1, 4, 6});
         ops::attention_backward(x, x, x, qkv, x, counting({1, 1, 4}), x, x, x, {}, {}, s);
       }},
      {"embedding",
       [&] {
         ops::embedding(counting({1, 4, 6}), tokens, c, s);
       }},
      {"embedding_with_positions",
       [&] {
         ops::embedding_with_positions(counting({1, 4, 6}), tokens, f, c, s);
       }},
      {"embedding_backward", [&] { ops::embedding_backward(f, qkv, tokens, overwrite, s); }},
      {"positions_backward", [&] { ops::positions_backward(f, qkv, overwrite, s); }},
      {"mean_squared_error", [&] { ops::mean_squared_error(one, c, f, s); }},
      {"mean_squared_error_backward", [&] { ops::mean_squared_error_backward(f, one, f, c, overwrite, s); }},
  };
  for (const auto& [op, call] : calls) {
    const Error e = test::error_of(call);
    EXPECT_EQ(e.code(), Errc::invalid_argument) << op;
    EXPECT_EQ(std::string(e.what()).find(concat(op, ": needs contiguous rows")), 0u) << e.what();
    EXPECT_NE(std::string(e.what()).find("rows 8 elements apart"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz
