#pragma once
/// The operators again, in double and by their definitions, nothing shared with the library; and gradients by
/// finite differences. Matrices are row-major vectors; sizes are named as in tensor/ops.h.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

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
Values tanh(const Values&);
/// out[m, n] = a[m, k] · b[k, n]
Values matmul(const Values& a, const Values& b, std::size_t m, std::size_t n, std::size_t k);
Values transpose(const Values&, std::size_t rows, std::size_t columns);
/// weight [in, out]; bias may be empty
Values linear(const Values& x, const Values& weight, const Values& bias, std::size_t rows, std::size_t in,
              std::size_t out);
Values layer_norm(const Values& x, const Values& weight, const Values& bias, double epsilon);
Values rms_norm(const Values& x, const Values& weight, double epsilon);
Values softmax(const Values& x, std::size_t columns);
/// `factors`: one for each probability [batch, head, query, key], or none.
Values causal_attention(const Values& qkv, std::size_t batch, std::size_t tokens, std::size_t channels,
                        std::size_t heads, const Values& factors = {});
/// Losses per row; 0 where the target is -100.
Values cross_entropy(const Values& logits, std::span<const std::int32_t> targets);

}  // namespace reference
}  // namespace rz::test
