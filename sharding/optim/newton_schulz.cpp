#include "sharding/optim/newton_schulz.h"

#include <utility>

#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

void newton_schulz(const Tensor& matrix, int steps, const Workspace& workspace, const Stream& stream) {
  require(matrix.shape().dims() == 2, Errc::invalid_argument, "newton_schulz() of a tensor of shape ",
          name(matrix.shape()), "; expected two dimensions");
  constexpr auto overwrite = ops::Into::overwrite;
  const bool tall = matrix.shape()[0] > matrix.shape()[1];
  const std::size_t small = matrix.shape()[tall];
  ops::normalize(matrix, matrix, 1e-7f, stream);
  Tensor x = matrix, next = workspace(matrix.shape());
  const Tensor gram = workspace({small, small}), polynomial = workspace({small, small});
  for (int i = 0; i < steps; ++i) {
    ops::matmul(gram, x, tall, x, !tall, overwrite, stream);
    ops::matmul(polynomial, gram, false, gram, false, overwrite, stream);
    ops::scale(polynomial, polynomial, 2.0315f, stream);
    ops::add_scaled(polynomial, gram, -4.7750f, stream);
    ops::matmul(next, tall ? x : polynomial, false, tall ? polynomial : x, false, overwrite, stream);
    ops::add_scaled(next, x, 3.4445f, stream);
    std::swap(x, next);
  }
  if (x.raw() != matrix.raw()) ops::copy(matrix, x, stream);
}

}  // namespace rz
