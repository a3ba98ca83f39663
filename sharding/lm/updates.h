#pragma once
/// What is done with a language model and its engine.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/language_model.h"
#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/loader.h"
#include "sharding/data/tokens.h"
#include "sharding/engine/engine.h"
#include "sharding/huggingface/save_pretrained.h"
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

/// The tokens that continue a prompt, which must not be empty. Collective.
std::vector<std::int32_t> sample(Engine&, LanguageModel&, const std::vector<std::int32_t>& prompt,
                                 const GenerationConfig&);

/// save_pretrained(). Collective.
void save(Engine&, LanguageModel&, const std::string& folder, const SaveOptions& = {});

}  // namespace rz::lm
