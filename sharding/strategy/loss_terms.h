#pragma once
/// Weights of an update's micro-batches.

#include "comm/device/stream.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/tensor.h"

namespace rz {

/// Adds the weights of the micro-batches of this rank, by the rule of Strategy. On a device they are added
/// there, in the order of the stream, so that a graph counts those of each run.
class LossTerms {
 public:
  /// What has been counted since reset(): weights of 1 alone, or terms too.
  enum class Counted { nothing, scalars, terms };

  /// Errc::invalid_argument if a loss may not follow: one with terms after a scalar of the same micro-batch,
  /// whose weight would be another.
  void require_may_follow(bool has_terms, bool same_micro_batch) const;
  /// The weight of the micro-batch over the terms of a loss that follows others in it, 0 without terms: a
  /// scalar in f32, undefined for 1. `sum_count`: nn::Loss::sum_count, undefined for a scalar, which has one
  /// term. `floats`, an f32 [2], and `sums`, an f64 [2], are written.
  Tensor ratio(const Tensor& sum_count, const Tensor& floats, const Tensor& sums, const Stream&);
  /// The first loss of a micro-batch was propagated: counts its weight.
  void count(const Tensor& sum_count, const Stream&);
  /// A loss was propagated: remembers whether it is finite. `value`: the loss, a scalar.
  void check(const Tensor& value, const Stream&);
  /// Whether all losses since reset() were finite. On a device unknown: true.
  bool finite() const { return finite_; }
  /// On a device: adds a NaN if a loss since reset() was not finite.
  void add_not_finite(SquareSum&) const;
  /// Counts micro-batches of weight 1.
  void add_ones(std::int64_t, const Stream&);
  /// Counts no terms.
  void add_none(const Stream&);
  /// Starts an update.
  void reset();
  Counted counted() const { return counted_; }
  /// The weights of this rank. On a device this waits for the stream.
  ExactSum read(const Stream&) const;
  /// On a device: copies the words of the sum.
  void copy_to(const Tensor& words, const Stream&) const;

 private:
  void begin(Counted, const Stream&);
  void add(const Tensor& sum_count, const Stream&);
  const Tensor& one(const Stream&);

  Counted counted_ = Counted::nothing;
  Tensor weight_;           // of the micro-batch: nn::Loss::sum_count of its first loss; undefined: 1
  bool by_scalar_ = false;  // the micro-batch began with a scalar
  bool finite_ = true;      // on the host
  ExactSum sum_;            // on the host
  Tensor words_;            // on a device: ExactLayout::words
  Tensor one_;              // {0, 1}, as nn::Loss::sum_count
  Tensor checked_;          // on a device: the sum of the losses times 0, and zeros up to norm_block
  bool checks_ = false;     // on a device: a loss was added to checked_ since reset()
};

}  // namespace rz
