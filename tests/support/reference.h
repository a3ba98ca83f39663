#pragma once
/// The operators again, in double and by their definitions, nothing shared with the library; and gradients by
/// finite differences. Matrices are row-major vectors; sizes are named as in tensor/ops.h.

#include <cstdint>
#include <functional>
#include <vector>

#include "tensor/loss_ops.h"
#include "tensor/tensor.h"

namespace rz::test {

using Values = std::vector<double>;

/// n values in [-range, range], exact in f32, a function of the seed.
Values random_values(std::size_t n, unsigned seed, double range = 1);
Tensor tensor_of(const Values&, Shape);
Tensor tokens_of(const std::vector<std::int32_t>&, Shape);
Values values_of(const Tensor&);
/// Each element within tolerance · (largest magnitude of `expected` + 1e-30).
void expect_close(const Tensor& got, const Values& expected, double tolerance, const char* what);

using Function = std::function<Values(const Values&)>;
/// The gradient of <f(x), d_out> by central differences with steps of 1e-5: accurate to about 1e-9.
Values numeric_gradient(const Function& f, const Values& x, const Values& d_out);

namespace reference {

Values gelu(const Values&);
Values relu(const Values&);
/// out[m, n] = a[m, k] · b[k, n]
Values matmul(const Values& a, const Values& b, std::size_t m, std::size_t n, std::size_t k);
Values transpose(const Values&, std::size_t rows, std::size_t columns);
/// weight [in, out]; bias may be empty
Values linear(const Values& x, const Values& weight, const Values& bias, std::size_t rows, std::size_t in,
              std::size_t out);
Values layer_norm(const Values& x, const Values& weight, const Values& bias, double epsilon);
Values rms_norm(const Values& x, const Values& weight, double epsilon);
/// That of x in a layer norm, or in an RMS norm.
Values norm_gradient(const Values& x, const Values& weight, const Values& d_out, double epsilon, bool layer);
Values softmax(const Values& x, std::size_t columns);
/// For each row weight · Σ q (log q - log p), or -Σ q log p, with p = softmax(x / temperature).
Values soft_losses(const Values& x, const Values& q, std::size_t v,
                   const ops::SoftLoss& how = {.divergence = false});
/// Of `slope` times their sum.
Values soft_loss_gradients(const Values& x, const Values& q, std::size_t v, double slope,
                           const ops::SoftLoss& how = {.divergence = false});
Values element_losses(const Values& x, const Values& y, ops::ElementLoss);

}  // namespace reference
}  // namespace rz::test
