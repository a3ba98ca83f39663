#pragma once
/// The samples and the updates of a language model.

#include <cstdint>
#include <optional>

#include "autograd_lite/models/language_model.h"
#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/loader.h"
#include "sharding/data/tokens.h"
#include "sharding/engine/engine.h"
#include "sharding/lm/update_report.h"

namespace rz::lm {

/// Which samples each update has.
ContinuousBatchSampler batch_sampler(const Engine&, std::uint64_t samples, bool shuffle, std::uint64_t seed);
/// Samples of T + 1 tokens in the order of the sampler, on the device of the engine; with document_starts if
/// `document_end` is given, by it.
Loader token_loader(const Engine&, const Tokens&, std::size_t seq_len, const ContinuousBatchSampler&,
                    std::optional<std::int32_t> document_end = {});

/// Of a batch of a TokenDataset. `document_mask`: attention stays within documents.
nn::Loss loss_of(LanguageModel&, Tape&, const Batch&, bool document_mask);

/// One update over the next micro-batches, of samples of `seq_len` + 1 tokens. If it diverges, the report
/// says so, and the parameters are as before. Nothing if the run is stopped in its midst, which then is as if
/// it had not begun. Collective.
std::optional<UpdateReport> update(Engine&, LanguageModel&, Loader&, std::size_t seq_len,
                                   bool document_mask = false);

}  // namespace rz::lm
