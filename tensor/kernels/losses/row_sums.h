#pragma once
/// What the host's losses share: checks, sums over rows, results. A row's sums are in double and in one
/// order; sums over rows do not depend on the number of threads.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tensor/kernels/check.h"
#include "tensor/kernels/ordered_sum.h"

namespace rz::ops::losses {

/// Errc::invalid_argument unless `t` can hold the sum and the count of a loss of `x`.
inline void check_pair(const char* op, const char* what, const Tensor& t, const Tensor& x) {
  require(t.defined() && t.dtype() == DType::f64 && t.count() == 2 && t.device() == x.device(),
          Errc::invalid_argument, op, ": '", what, "' must be 2 f64 on ", name(x.device()));
}

inline void write_sums(const Tensor& loss, const Tensor& sums, double sum, std::size_t count) {
  sums.data<double>()[0] = sum;
  sums.data<double>()[1] = static_cast<double>(count);
  *loss.data<float>() = static_cast<float>(sum);
}

/// Calls f(begin, end) for ranges of rows of `t`, each on one thread.
template <class F>
void ranges_of_rows(const Tensor& t, const Stream& stream, const F& f) {
  const std::size_t elements = 2048;  // at least, of a thread
  stream.parallel_for(rows(t), std::max<std::size_t>(1, elements / std::max<std::size_t>(1, last(t))), f);
}

}  // namespace rz::ops::losses
