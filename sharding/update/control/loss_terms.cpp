#include "sharding/update/control/loss_terms.h"

#include <span>
#include <utility>

#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "tensor/kernels/device_ops.h"

namespace rz {

void LossTerms::add_none(const Stream& stream) {
  if (std::exchange(counted_, true)) return;
  if (stream.device().kind == Device::host) {
    sum_ = {};
    return;
  }
  if (!words_.defined())
    words_ = Tensor::empty({ExactLayout::words}, DType::i64, allocator_on(stream.device()));
  memset_async(words_.raw(), 0, words_.bytes(), stream);
}

void LossTerms::add(const Tensor& sum_count, const Stream& stream) {
  add_none(stream);
  const double* const count = sum_count.data<double>() + 1;
  if (stream.device().kind == Device::host)
    sum_.add(*count);
  else
    ops::device_ops().optimizer.add_exact(words_.data<std::int64_t>(), count, stream);
}

ExactSum LossTerms::read(const Stream& stream) const {
  if (!counted_ || stream.device().kind == Device::host) return counted_ ? sum_ : ExactSum();
  const Tensor words = words_.on_host(stream);
  ExactSum sum;
  sum.add(std::span<const std::int64_t, ExactLayout::words>(words.data<std::int64_t>(), ExactLayout::words));
  return sum;
}

void LossTerms::copy_to(const Tensor& words, const Stream& stream) const {
  memcpy_async(words.raw(), words_.raw(), words_.bytes(), stream);
}

}  // namespace rz
