#pragma once
/// Sums of squares that are independent of the order of summation and of the distribution over ranks. The
/// global gradient norm has the same bits for every sharding.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/device/stream.h"
#include "tensor/kernels/scalar/superaccumulator.h"
#include "tensor/tensor.h"

namespace rz {

/// An exact sum of doubles: a fixed-point number wide enough for all of them, rounded once when it is read
/// (Kulisch accumulator; for its use in reproducible summation see Demmel and Nguyen,
/// doi:10.1109/TC.2014.2345391). The layout is ExactLayout.
class ExactSum {
 public:
  /// Adds one number exactly.
  void add(double);
  /// Adds the sum of another rank or thread.
  void add(const ExactSum&);
  /// Adds the words of a sum computed on a device (ops::device::add_squares), by one rank or reduced over
  /// ranks.
  void add(std::span<const std::int64_t, ExactLayout::words>);
  /// The sum, rounded to nearest even; NaN and infinities as in ordinary addition.
  double value() const;
  /// Replaces this sum by the sum over the ranks. Collective.
  void all_reduce(Communicator&);
  /// all_reduce() of several sums in one call of the communicator, with the words of all in `words`. `more`:
  /// other numbers to be summed in the same call.
  static void all_reduce(std::span<ExactSum>, std::vector<std::int64_t>& words, Communicator&,
                         std::span<std::int64_t> more = {});

 private:
  void carry();
  std::int64_t word_[ExactLayout::words] = {};
  std::int64_t pending_ = 0;  // additions since the last carry()
};

/// Number of elements whose squares are summed in double before they are added to an ExactSum. Blocks start
/// at multiples of it in every parameter, in every strategy.
inline constexpr std::size_t norm_block = 64;

/// Adds the squares of x[0, count); count must be a multiple of norm_block.
void add_squares(ExactSum&, const float* x, std::size_t count, const Stream&);

/// A sum of squares, computed on the device of the tensors, in the order of a stream.
class SquareSum {
 public:
  /// On a device the sum is computed in `words`, which is allocated if undefined. Keep `words` from one sum
  /// to the next: freeing device memory waits for all work on the device.
  SquareSum(Stream stream, Tensor& words) : stream_(std::move(stream)), words_(words) {}
  /// Adds a tensor of f32, f16 or bf16 on the device of the stream; its count must be a multiple of
  /// norm_block.
  void add(const Tensor&);
  /// On a device: the memory that holds the sum.
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
