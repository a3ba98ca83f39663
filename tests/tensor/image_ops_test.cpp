// Runs: ci

// Operators of images on the host: the same bits for every number of threads, and errors. Values are tested
// in tests/operators/image_ops_test.cpp, which is built for the host too.

#include "tensor/image_ops.h"

#include <gtest/gtest.h>

#include <cstring>

#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_image.h"

namespace rz::test {
namespace {

using ops::Into;

Tensor numbers(const Shape& shape, unsigned seed, DType dtype = DType::f32) {
  const Tensor out = Tensor::empty(shape, dtype);
  ops::copy(out, tensor_of(random_values(shape.count(), seed), shape), {});
  return out;
}

/// Calls f(outputs…) with 1 and with 3 threads, whose outputs have these shapes and begin with equal numbers.
template <class F>
void expect_same_bits(const std::vector<std::pair<Shape, DType>>& shapes, const F& f,
                      const std::string& what) {
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 3}) {
    std::vector<Tensor> out;
    for (const auto& [shape, dtype] : shapes) {
      if (dtype == DType::f64 || dtype == DType::i32)
        out.push_back(Tensor::zeros(shape, dtype));
      else
        out.push_back(numbers(shape, 77, dtype));
    }
    f(out, Stream::host(threads));
    results.push_back(out);
  }
  for (std::size_t i = 0; i < shapes.size(); ++i)
    EXPECT_EQ(std::memcmp(results[0][i].raw(), results[1][i].raw(), results[0][i].bytes()), 0)
        << what << ": result " << i;
}

class ImageThreads : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, ImageThreads, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(ImageThreads, ConvolutionsHaveTheSameBits) {
  const DType t = GetParam();
  std::vector<Convolution> all{{3, 48, 31, 29, 20, 3, {.padding = 1}},
                               {2, 6, 60, 61, 4, {5, 3}, {.stride = {2, 1}, .padding = 2}},
                               {3, 40, 19, 23, 12, 1, {.groups = 2}},
                               {3, 20, 33, 35, 20, 3, {.padding = 1, .groups = 20}}};
  for (unsigned seed = 1; seed < 12; ++seed) all.push_back(random_convolution(seed));
  for (const Convolution& c : all) {
    const Tensor x = numbers(c.x(), 1, t), w = numbers(c.weight(), 2, t), b = numbers({c.outputs}, 3, t),
                 d_out = numbers(c.result(), 4, t);
    expect_same_bits(
        {{c.result(), t}, {c.x(), t}, {c.weight(), t}, {{c.outputs}, t}},
        [&](const auto& out, const Stream& stream) {
          ops::conv2d(out[0], x, w, b, c.options, stream);
          ops::conv2d_backward(out[1], out[2], out[3], d_out, x, w, c.options, Into::accumulate,
                               Into::accumulate, stream);
        },
        c.text());
  }
}

TEST_P(ImageThreads, PoolsHaveTheSameBits) {
  const DType t = GetParam();
  const Shape in{3, 5, 33, 45},
      out_shape = ops::pool2d_shape("pool", in, {.kernel = 3, .stride = 2, .padding = 1}), small{3, 5, 4, 7};
  const ops::Pool2d pool{.kernel = 3, .stride = 2, .padding = 1};
  const Tensor x = numbers(in, 1, t), d_out = numbers(out_shape, 2, t), d_small = numbers(small, 3, t);
  expect_same_bits(
      {{out_shape, t}, {out_shape, DType::i32}, {in, t}, {out_shape, t}, {in, t}, {small, t}, {in, t}},
      [&](const auto& out, const Stream& stream) {
        ops::max_pool2d(out[0], out[1], x, pool, stream);
        ops::max_pool2d_backward(out[2], d_out, out[1], pool, Into::accumulate, stream);
        ops::avg_pool2d(out[3], x, pool, stream);
        ops::avg_pool2d_backward(out[4], d_out, pool, Into::accumulate, stream);
        ops::adaptive_avg_pool2d(out[5], x, stream);
        ops::adaptive_avg_pool2d_backward(out[6], d_small, Into::accumulate, stream);
      },
      "pools");
}

TEST_P(ImageThreads, NormsHaveTheSameBits) {
  const DType t = GetParam();
  for (const Shape& shape : {Shape{7, 150}, Shape{3, 6, 40, 41}}) {
    const std::size_t n = shape[0], c = shape[1];
    const Tensor x = numbers(shape, 1, t), d_out = numbers(shape, 2, t), w = numbers({c}, 3, t),
                 b = numbers({c}, 4, t);
    expect_same_bits(
        {{{2 * c + 1}, DType::f64},
         {{c}, DType::f32},
         {{c}, DType::f32},
         {shape, t},
         {{2 * c}, DType::f64},
         {{c}, t},
         {{c}, t},
         {shape, t}},
        [&](const auto& out, const Stream& stream) {
          ops::batch_norm_sums(out[0], x, stream);
          ops::batch_norm_statistics(out[1], out[2], {}, out[0], 1e-5f, stream);
          ops::batch_norm(out[3], x, out[1], out[2], w, b, stream);
          ops::batch_norm_backward_sums(out[4], d_out, x, out[1], out[2], stream);
          ops::batch_norm_parameters_backward(out[5], out[6], out[4], Into::accumulate, stream);
          ops::batch_norm_backward(out[7], d_out, x, w, out[1], out[2], out[0], out[4], Into::accumulate,
                                   stream);
        },
        "batch norm");
    expect_same_bits(
        {{shape, t}, {{n, 2}, DType::f32}, {{n, 2}, DType::f32}, {shape, t}, {{c}, t}, {{c}, t}},
        [&](const auto& out, const Stream& stream) {
          ops::group_norm(out[0], out[1], out[2], x, w, b, 1e-5f, stream);
          ops::group_norm_backward(out[3], out[4], out[5], d_out, x, w, out[1], out[2], Into::accumulate,
                                   Into::accumulate, stream);
        },
        "group norm");
  }
}

// ---- errors

std::string message_of(const std::function<void()>& call) {
  const Error e = error_of(call);
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  return e.what();
}
void expect_named(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
}

TEST(ImageErrors, NameTheOperatorAndTheShapes) {
  const Tensor x = numbers({1, 4, 5, 6}, 1), w = numbers({2, 4, 3, 3}, 2), out = numbers({1, 2, 3, 4}, 3);
  expect_named(message_of([&] {
                 ops::conv2d_shape({1, 4, 5, 6}, {2, 3, 3, 3}, {});
               }),
               {"conv2d", "[1, 4, 5, 6]", "[2, 3, 3, 3]", "groups 1"});
  expect_named(message_of([&] {
                 ops::conv2d_shape({1, 4, 5, 6}, {2, 4, 6, 3}, {});
               }),
               {"conv2d", "larger than the padded image", "[2, 4, 6, 3]"});
  expect_named(message_of([&] {
                 ops::conv2d_shape({1, 4, 5, 6}, {2, 4, 3, 3}, {.stride = {1, 0}});
               }),
               {"at least 1", "stride 1 x 0"});
  expect_named(message_of([&] {
                 ops::conv2d_shape({4, 5, 6}, {2, 4, 3, 3}, {});
               }),
               {"four extents", "[4, 5, 6]"});
  expect_named(message_of([&] {
                 ops::conv2d(numbers({1, 2, 3, 3}, 1), x, w, {}, {}, {});
               }),
               {"conv2d", "out [1, 2, 3, 3]", "x [1, 4, 5, 6]", "weight [2, 4, 3, 3]"});
  expect_named(message_of([&] { ops::conv2d(out, x, w, numbers({3}, 1), {}, {}); }), {"conv2d", "bias [3]"});
  expect_named(message_of([&] {
                 ops::conv2d(out, x, numbers({2, 4, 3, 3}, 1, DType::bf16), {}, {}, {});
               }),
               {"conv2d", "weight is bf16"});
  expect_named(message_of([&] {
                 ops::conv2d_backward({}, numbers({2, 4, 3, 2}, 1), {}, out, x, w, {}, {}, {}, {});
               }),
               {"conv2d_backward", "d_weight [2, 4, 3, 2]"});

  expect_named(message_of([&] {
                 ops::pool2d_shape("max_pool2d", {1, 4, 5, 6}, {.kernel = 3, .padding = 2});
               }),
               {"max_pool2d", "half of the kernel", "kernel 3 x 3", "padding 2 x 2", "[1, 4, 5, 6]"});
  expect_named(message_of([&] {
                 ops::pool2d_shape("avg_pool2d", {1, 4, 5, 6}, {.kernel = {3, 7}});
               }),
               {"avg_pool2d", "larger than the padded image"});
  expect_named(message_of([&] {
                 ops::max_pool2d(numbers({1, 4, 2, 3}, 1), numbers({1, 4, 2, 3}, 1), x, {}, {});
               }),
               {"max_pool2d", "indices must be i32 [1, 4, 2, 3]"});
  expect_named(message_of([&] {
                 ops::adaptive_avg_pool2d(numbers({1, 3, 1, 1}, 1), x, {});
               }),
               {"adaptive_avg_pool2d", "[1, 3, 1, 1]", "[1, 4, 5, 6]"});

  expect_named(message_of([&] { ops::batch_norm_sums(Tensor::zeros({8}, DType::f64), x, {}); }),
               {"batch_norm_sums", "sums must be f64 [9]"});
  expect_named(message_of([&] { ops::batch_norm_sums(Tensor::zeros({8}, DType::f64), numbers({4}, 1), {}); }),
               {"batch_norm_sums", "no channels", "[4]"});
  expect_named(message_of([&] {
                 ops::group_norm(x, numbers({1, 3}, 1), numbers({1, 3}, 1), x, numbers({4}, 1),
                                 numbers({4}, 1), 0, {});
               }),
               {"group_norm", "mean [1, 3]", "x [1, 4, 5, 6]"});
}

TEST(ImageErrors, AreThoseOfTheMetaDevice) {
  const Stream stream = Stream::create(meta_device);
  const auto meta = [&](const Shape& shape) {
    return Tensor::zeros(shape, DType::f32, allocator_on(meta_device));
  };
  const Tensor x = meta({1 << 20, 4, 64, 64});
  ops::conv2d(meta({1 << 20, 2, 62, 62}), x, meta({2, 4, 3, 3}), {}, {}, stream);
  message_of([&] { ops::conv2d(meta({1 << 20, 2, 62, 61}), x, meta({2, 4, 3, 3}), {}, {}, stream); });
}

}  // namespace
}  // namespace rz::test
