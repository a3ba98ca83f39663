#include "tensor/kernels/linear_algebra/blas.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace rz::kernels {

namespace {

/// Below, the launch of a second kernel takes longer than it saves: some 10 us.
constexpr std::size_t min_split_size = std::size_t{1} << 30;

template <class T>
void advance(T*& pointer, std::size_t elements, DType t) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  if (pointer) pointer = static_cast<Byte*>(pointer) + elements * size_of(t);
}

bool whole_words(const GemmCall& c, std::size_t word) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  return c.a_stride % word == 0 && c.b_stride % word == 0 && c.d_stride % word == 0 && aligned(c.a) &&
         aligned(c.b) && aligned(c.d);
}

GemmCall columns_from(GemmCall c, std::size_t n) {
  advance(c.b, n * (c.transpose_b ? c.b_stride : 1), c.factors);
  advance(c.d, n, c.result);
  advance(c.bias, n, c.result);
  c.n -= n;
  return c;
}
GemmCall rows_from(GemmCall c, std::size_t m) {
  advance(c.a, m * (c.transpose_a ? 1 : c.a_stride), c.factors);
  advance(c.d, m * c.d_stride, c.result);
  if (c.epilogue == Epilogue::row_sums_of_a) advance(c.bias, m, c.result);
  c.m -= m;
  return c;
}
GemmCall terms_from(GemmCall c, std::size_t k) {
  advance(c.a, k * (c.transpose_a ? c.a_stride : 1), c.factors);
  advance(c.b, k * (c.transpose_b ? 1 : c.b_stride), c.factors);
  c.k -= k;
  return c;
}

}  // namespace

std::optional<std::pair<GemmCall, GemmCall>> split_whole_words(const GemmCall& c) {
  const std::size_t word = 16 / size_of(c.factors);
  if (size_of(c.factors) != 2 || c.batch.count != 1 || c.m * c.n * c.k < min_split_size ||
      !whole_words(c, word))
    return std::nullopt;
  const bool plain = c.epilogue == Epilogue::none || c.epilogue == Epilogue::bias;
  GemmCall main = c;
  if (const std::size_t rest = c.n % word; rest && (plain || c.epilogue == Epilogue::column_sums_of_b)) {
    main.n -= rest;
    return std::pair(main, columns_from(c, main.n));
  }
  if (const std::size_t rest = c.m % word;
      rest && c.transpose_a && (plain || c.epilogue == Epilogue::row_sums_of_a)) {
    main.m -= rest;
    return std::pair(main, rows_from(c, main.m));
  }
  // The few terms come first: what is rounded in between is their sum, not that of nearly all terms.
  if (const std::size_t rest = c.k % word;
      rest && (!c.transpose_a || c.transpose_b) && plain && (c.beta == 0 || c.result == DType::f32)) {
    main.k -= rest;
    GemmCall few = terms_from(c, main.k);
    few.epilogue = Epilogue::none;
    few.bias = nullptr;
    main.beta = 1;
    return std::pair(few, main);
  }
  return std::nullopt;
}

}  // namespace rz::kernels
