#include "sharding/strategy/loss_terms.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "comm/device/meta.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/loss_ops.h"
#include "tensor/ops.h"

namespace rz {

void LossTerms::require_may_follow(bool has_terms, bool same_micro_batch) const {
  require(!(has_terms && same_micro_batch && by_scalar_), Errc::invalid_argument,
          "backward() of a loss a with terms after a loss b without, in one micro-batch: b has entered with "
          "weight 1, not with the terms of a; propagate a before b, or their sum, a + b");
}

const Tensor& LossTerms::one(const Stream& stream) {
  if (one_.defined()) return one_;
  constexpr double sum_count[] = {0, 1};
  one_ = Tensor::empty({2}, DType::f64, allocator_on(stream.device()));
  one_.assign(std::span<const double>(sum_count), stream);
  return one_;
}

Tensor LossTerms::ratio(const Tensor& sum_count, const Tensor& floats, const Tensor& sums,
                        const Stream& stream) {
  if (!weight_.defined()) return {};
  const Tensor ratio = floats.view(0, {});
  ops::add_losses(floats.view(1, {}), sums, ratio, weight_, sum_count.defined() ? sum_count : one(stream),
                  stream);
  return ratio;
}

void LossTerms::count(const Tensor& sum_count, const Stream& stream) {
  weight_ = sum_count;
  by_scalar_ = !sum_count.defined();
  begin(by_scalar_ ? Counted::scalars : Counted::terms, stream);
  add(by_scalar_ ? one(stream) : sum_count, stream);
}

void LossTerms::begin(Counted counted, const Stream& stream) {
  const bool first = counted_ == Counted::nothing;
  counted_ = std::max(counted_, counted);
  if (!first) return;
  if (stream.device().kind == Device::host) {
    sum_ = {};
    return;
  }
  if (!words_.defined())
    words_ = Tensor::empty({ExactLayout::words}, DType::i64, allocator_on(stream.device()));
  memset_async(words_.raw(), 0, words_.bytes(), stream);
}

void LossTerms::add(const Tensor& sum_count, const Stream& stream) {
  const double* const count = sum_count.data<double>() + 1;
  if (stream.device().kind == Device::host)
    sum_.add(*count);
  else
    ops::device_ops().optimizer.add_exact(words_.data<std::int64_t>(), count, stream);
}

void LossTerms::check(const Tensor& value, const Stream& stream) {
  if (is_meta(value.device())) return;
  if (stream.device().kind == Device::host) {
    float loss = 0;
    ops::copy(Tensor::borrow(&loss, value.shape()), value, stream);
    finite_ = finite_ && std::isfinite(loss);
    return;
  }
  if (!checked_.defined())
    checked_ = Tensor::empty({norm_block + 1}, DType::f32, allocator_on(stream.device()));
  if (!std::exchange(checks_, true)) memset_async(checked_.raw(), 0, checked_.bytes(), stream);
  const Tensor sum = checked_.view(0, {}), product = checked_.view(norm_block, {});
  ops::copy(product.reshape(value.shape()), value, stream);
  ops::scale(product, product, 0, stream);
  ops::binary(sum, sum, product, ops::Binary::add, stream);
}

void LossTerms::add_not_finite(SquareSum& sum) const {
  if (checks_) sum.add(checked_.view(0, {norm_block}));
}

void LossTerms::add_ones(std::int64_t micro_batches, const Stream& stream) {
  begin(Counted::scalars, stream);
  for (std::int64_t m = 0; m < micro_batches; ++m) add(one(stream), stream);
}

void LossTerms::add_none(const Stream& stream) { begin(Counted::terms, stream); }

void LossTerms::reset() {
  counted_ = Counted::nothing;
  weight_ = {};
  by_scalar_ = false;
  finite_ = true;
  checks_ = false;
}

ExactSum LossTerms::read(const Stream& stream) const {
  if (counted_ == Counted::nothing || stream.device().kind == Device::host)
    return counted_ == Counted::nothing ? ExactSum() : sum_;
  const Tensor words = words_.on_host(stream);
  ExactSum sum;
  sum.add(std::span<const std::int64_t, ExactLayout::words>(words.data<std::int64_t>(), ExactLayout::words));
  return sum;
}

void LossTerms::copy_to(const Tensor& words, const Stream& stream) const {
  memcpy_async(words.raw(), words_.raw(), words_.bytes(), stream);
}

}  // namespace rz
