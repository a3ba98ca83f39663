#pragma once
/// Vectorized loops over consecutive elements of tensors of f32, f16 or bf16, on the calling thread.

#include <cstddef>

#include "tensor/image_ops.h"

namespace rz::ops::image {

/// sum[i] += in[i]
void add_floats(float* sum, const float* in, std::size_t n);
/// out[at + i] = in[i], or its sum with in[i], rounded once.
void store_floats(const Tensor& out, std::size_t at, const float* in, std::size_t n, Into);
/// out[i] = in[at + i]
void load_floats(float* out, const Tensor& in, std::size_t at, std::size_t n);
/// Σ of elements [at, at + n), in double.
double sum_elements(const Tensor& in, std::size_t at, std::size_t n);
/// Stores a number in an element.
void store_number(const Tensor& out, std::size_t at, double value, Into);
double load_number(const Tensor&, std::size_t at);

// ---- norms, of elements [at, at + n)
struct Sums {
  double first = 0, second = 0;
};
/// Σ x and Σ x².
Sums sums_of(const Tensor& x, std::size_t at, std::size_t n);
/// Σ (x - centre) and Σ (x - centre)². Differences, squares and sums of four are rounded to f32.
Sums centred_sums(const Tensor& x, std::size_t at, std::size_t n, float centre);
/// Σ d_out and Σ d_out · normalized x.
Sums gradient_sums(const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                   float inverse_deviation);
/// out = (x - mean) · inverse_deviation · weight + bias
void normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, float mean,
               float inverse_deviation, float weight, float bias);
/// d_x = inverse_deviation · (d_out · weight - g - n · gn), where n is normalized x.
struct NormGradient {
  float mean, inverse_deviation, weight, g, gn;
};
void normalize_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                        std::size_t n, const NormGradient&, Into);

// ---- the same for `planes` planes of n elements, of one group
/// The gradient sums of each plane; terms and sums of four are rounded to f32.
void group_sums_of_gradients(Sums* sums, const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n,
                             std::size_t planes, float mean, float inverse_deviation);
void normalize_group(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, std::size_t planes,
                     float mean, float inverse_deviation, const float* weight, const float* bias);
/// The weights are those of the planes.
void normalize_group_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                              std::size_t n, std::size_t planes, const NormGradient&, const float* weight,
                              Into);

/// d_x = factor · d_out
void scale_gradient(const Tensor& d_x, const Tensor& d_out, std::size_t at, std::size_t n, float factor,
                    Into);

// ---- the same for a row of channels [c, c + n), which begins at element at + c
void add_row_sums(double* first, double* second, const Tensor& x, std::size_t at, std::size_t n);
/// The same sums of a row, from mean and inverse_deviation on in floats.
void add_row_gradient_sums(double* first, double* second, const Tensor& d_out, const Tensor& x,
                           std::size_t at, std::size_t n, const float* mean, const float* inverse_deviation);
/// All floats are of n channels.
void normalize_row(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, const float* mean,
                   const float* inverse_deviation, const float* weight, const float* bias);
struct RowNormGradient {
  const float *mean, *inverse_deviation, *weight, *g, *gn;
};
void normalize_row_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                            std::size_t n, const RowNormGradient&, Into);

}  // namespace rz::ops::image
