#include "sharding/optim/newton_schulz.h"

#include <cmath>
#include <utility>

#include "tensor/kernels/gemm.h"
#include "tensor/ops.h"

namespace rz {

namespace {

using kernels::Matrix;

float norm_of(const Tensor& x) {
  double sum = 0;
  for (std::size_t i = 0; i < x.count(); ++i) {
    const double value = x.data<float>()[i];
    sum += value * value;
  }
  return static_cast<float>(std::sqrt(sum));
}

}  // namespace

void newton_schulz(const Tensor& matrix, int steps, const Stream& stream) {
  require(matrix.shape().dims() == 2, Errc::invalid_argument, "newton_schulz() of a tensor of shape ",
          name(matrix.shape()), "; expected two dimensions");
  const std::size_t rows = matrix.shape()[0], columns = matrix.shape()[1];
  const bool tall = rows > columns;
  const std::size_t small = tall ? columns : rows, large = tall ? rows : columns;
  ops::scale(matrix, matrix, 1 / (norm_of(matrix) + 1e-7f), stream);
  Tensor x = matrix, next = Tensor::empty(matrix.shape());
  const Tensor gram = Tensor::empty({small, small}), polynomial = Tensor::empty({small, small});
  const Matrix a{gram.data<float>(), small}, b{polynomial.data<float>(), small};
  for (int i = 0; i < steps; ++i) {
    const Matrix plain{x.data<float>(), columns}, transposed{x.data<float>(), columns, true};
    kernels::gemm(gram.data<float>(), small, small, small, large, 1, tall ? transposed : plain,
                  tall ? plain : transposed, 0, stream);
    ops::copy(polynomial, gram, stream);
    kernels::gemm(polynomial.data<float>(), small, small, small, small, 2.0315f, a, a, -4.7750f, stream);
    ops::copy(next, x, stream);
    kernels::gemm(next.data<float>(), columns, rows, columns, small, 1, tall ? plain : b, tall ? b : plain,
                  3.4445f, stream);
    std::swap(x, next);
  }
  if (x.raw() != matrix.raw()) ops::copy(matrix, x, stream);
}

}  // namespace rz
