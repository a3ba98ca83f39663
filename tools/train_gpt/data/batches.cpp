#include "tools/train_gpt/data/batches.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::train_gpt {

Batches::Batches(BatchPlan plan) : plan_(plan) {
  if (plan.shuffle)
    sampler_.emplace(SamplerOptions{.samples = plan.samples,
                                    .ranks = plan.ranks,
                                    .rank = plan.rank,
                                    .shuffle = true,
                                    .drop_last = plan.drop_last,
                                    .seed = plan.seed});
  require(!sampler_ || sampler_->per_rank() > 0, Errc::invalid_argument, plan.samples,
          " samples are too few for ", plan.ranks,
          " ranks; give more data, or set dataloader_drop_last to false");
}

std::vector<std::uint64_t> Batches::indices(std::uint64_t update, std::uint64_t micro_batch) const {
  const auto micro = static_cast<std::uint64_t>(plan_.sizes.micro);
  const auto accumulation = static_cast<std::uint64_t>(plan_.sizes.accumulation);
  const auto global = static_cast<std::uint64_t>(plan_.sizes.train);
  std::vector<std::uint64_t> out(micro);
  for (std::uint64_t j = 0; j < micro; ++j) {
    const std::uint64_t in_rank = micro_batch * micro + j;
    if (sampler_) {
      const std::uint64_t position = update * micro * accumulation + in_rank;
      out[j] = sampler_->index(position / sampler_->per_rank(), position % sampler_->per_rank());
    } else {
      const std::uint64_t first =
          update * global + static_cast<std::uint64_t>(plan_.rank) * micro * accumulation;
      out[j] = (first + in_rank) % plan_.samples;
    }
  }
  return out;
}

std::uint64_t Batches::updates_per_epoch() const {
  return std::max<std::uint64_t>(1, plan_.samples / static_cast<std::uint64_t>(plan_.sizes.train));
}

void read_samples(const Tokens& tokens, std::span<const std::uint64_t> indices, std::uint64_t seq_len,
                  std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
  std::vector<std::int32_t> sample(seq_len + 1);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    tokens.read(indices[i] * seq_len, sample);
    std::copy_n(sample.begin(), seq_len, inputs.begin() + static_cast<std::ptrdiff_t>(i * seq_len));
    std::copy_n(sample.begin() + 1, seq_len, targets.begin() + static_cast<std::ptrdiff_t>(i * seq_len));
  }
}

}  // namespace rz::train_gpt
