#include "sharding/lm/validation.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "sharding/data/batch_sampler.h"
#include "sharding/data/tokens.h"
#include "sharding/lm/updates.h"

namespace rz::lm {

ValidationDataset::ValidationDataset(ValidationData data, std::size_t seq_len, std::uint64_t multiple)
    : all_(std::move(data.tokens), seq_len, data.document_end),
      first_(data.first),
      samples_(data.samples),
      size_((samples_ + multiple - 1) / multiple * multiple) {}

void ValidationDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  constexpr std::int32_t ignored = -100;
  if (index < samples_) return all_.read(first_ + index, to, row);
  std::ranges::fill(to.row<std::int32_t>("inputs", row), 0);
  std::ranges::fill(to.row<std::int32_t>("targets", row), ignored);
  if (fields().size() > 2) std::ranges::fill(to.row<std::int32_t>("document_starts", row), 0);
}

namespace {

Loader validation_loader(const Engine& engine, const ValidationData& data, std::size_t seq_len) {
  const auto micro = static_cast<std::size_t>(engine.config().sizes.micro);
  const int ranks = engine.mesh().data().size();
  auto dataset =
      std::make_shared<ValidationDataset>(data, seq_len, micro * static_cast<std::uint64_t>(ranks));
  const BatchSamplerOptions sampling{.samples = dataset->size(),
                                     .batch_size = micro,
                                     .ranks = ranks,
                                     .rank = engine.mesh().data().rank(),
                                     .shuffle = false};
  auto sampler = std::make_shared<ConsecutiveBatchSampler>(sampling, 1);
  return Loader(std::move(dataset), std::move(sampler), engine.stream());
}

}  // namespace

EvaluatedData::EvaluatedData(const Engine& engine, const ValidationData& data, std::size_t seq_len)
    : positions_(engine.loader_positions()),
      data_(concat(data.samples, " samples of ", seq_len, " + 1 tokens from number ", data.first,
                   " on, checksum ", checksum(data.tokens))) {
  positions_->attach("evaluation", *this);
}

EvaluatedData::~EvaluatedData() { positions_->detach(*this); }

Validation::Validation(const Engine& engine, const ValidationData& data, std::size_t seq_len)
    : loader_(validation_loader(engine, data, seq_len)), document_mask_(data.document_end.has_value()) {}

std::optional<double> Validation::loss(Engine& engine, LanguageModel& model) {
  std::vector<Mean> own;
  for (const Batch& batch : loader_) {
    if (engine.checkpoints().stop_requested()) return std::nullopt;
    own.push_back(engine.evaluate(
        [&](Tape& tape) { return engine.item(loss_of(model, tape, batch, document_mask_)); }));
  }
  return engine.mean(own);
}

}  // namespace rz::lm
