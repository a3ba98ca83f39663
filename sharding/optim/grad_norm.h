#pragma once
/// Sums of squares that do not depend on the order of summation, nor on who sums what: the same global
/// gradient norm, bit for bit, however gradients are spread over ranks.

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "comm/device/stream.h"
#include "tensor/kernels/superaccumulator.h"
#include "tensor/tensor.h"

namespace rz {

/// An exact sum of doubles: a fixed-point number wide enough for all of them, rounded once when it is read
/// (Kulisch accumulator; for its use in reproducible summation see Demmel and Nguyen,
/// doi:10.1109/TC.2014.2345391), laid out as ExactLayout says.
class ExactSum {
 public:
  void add(double);
  /// Adds another rank's or thread's sum.
  void add(const ExactSum&);
  /// Adds the words of a sum that a device made (ops::device::add_squares), its own or added up over ranks.
  void add(std::span<const std::int64_t, ExactLayout::words>);
  /// The sum, correctly rounded to nearest even; NaN and infinities as in ordinary addition.
  double value() const;
  /// Replaces this sum by the sum over the ranks. Collective.
  void all_reduce(Communicator&);

 private:
  void carry();
  std::int64_t word_[ExactLayout::words] = {};
  std::int64_t pending_ = 0;  // additions since the last carry()
};

/// Elements that are squared and added in double before they enter an ExactSum. Blocks start at multiples of
/// it in every parameter, in every strategy.
inline constexpr std::size_t norm_block = 64;

/// Adds the squares of x[0, count); count is a multiple of norm_block.
void add_squares(ExactSum&, const float* x, std::size_t count, const Stream&);

/// A sum of squares that is made where the tensors are, in the order of a stream.
class SquareSum {
 public:
  /// On a device the sum is made in `words`, which is given memory if it has none: to be kept from one sum to
  /// the next, since giving device memory back waits for all that runs there.
  SquareSum(Stream stream, Tensor& words) : stream_(std::move(stream)), words_(words) {}
  /// Of an f32 tensor on the stream's device, whose count is a multiple of norm_block.
  void add(const Tensor&);
  /// On a device: where the sum is made.
  const Tensor& words();
  /// On a device this waits for the stream.
  ExactSum read() const;

 private:
  Stream stream_;
  ExactSum sum_;
  Tensor& words_;
  bool begun_ = false;
};

}  // namespace rz
