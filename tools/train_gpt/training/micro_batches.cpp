#include "tools/train_gpt/training/micro_batches.h"

#include <span>
#include <utility>

#include "comm/device/allocate.h"

namespace rz::train_gpt {

MicroBatches::MicroBatches(Tokens tokens, const BatchPlan& plan, std::size_t seq_len, const Stream& stream)
    : tokens_(std::move(tokens)), batches_(plan), seq_len_(seq_len) {
  const Shape shape{static_cast<std::size_t>(plan.sizes.micro), seq_len};
  for (std::int64_t m = 0; m < plan.sizes.accumulation; ++m)
    list_.push_back({Tensor::empty(shape, DType::i32, allocator_on(stream.device())),
                     Tensor::empty(shape, DType::i32, allocator_on(stream.device()))});
  inputs_.resize(shape.count());
  targets_.resize(shape.count());
}

void MicroBatches::read(std::uint64_t update, const Stream& stream) {
  for (std::size_t m = 0; m < list_.size(); ++m) {
    read_samples(tokens_, batches_.indices(update, m), seq_len_, inputs_, targets_);
    list_[m].inputs.assign(std::span<const std::int32_t>(inputs_), stream);
    list_[m].targets.assign(std::span<const std::int32_t>(targets_), stream);
  }
}

}  // namespace rz::train_gpt
