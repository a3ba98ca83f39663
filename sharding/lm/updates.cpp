#include "sharding/lm/updates.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "comm/core/error.h"
#include "sharding/data/tokens.h"
#include "sharding/strategy/strategy.h"

namespace rz::lm {

ContinuousBatchSampler batch_sampler(const Engine& engine, std::uint64_t samples, bool shuffle,
                                     std::uint64_t seed) {
  const BatchSizes& sizes = engine.config().sizes;
  return ContinuousBatchSampler({.samples = samples,
                                 .batch_size = static_cast<std::size_t>(sizes.micro),
                                 .accumulation = static_cast<std::size_t>(sizes.accumulation),
                                 .ranks = engine.mesh().data().size(),
                                 .rank = engine.mesh().data().rank(),
                                 .shuffle = shuffle,
                                 .drop_last = engine.config().drop_last,
                                 .seed = seed,
                                 .consecutive = engine.config().world_size_invariant});
}

Loader token_loader(const Engine& engine, const Tokens& tokens, std::size_t seq_len,
                    const ContinuousBatchSampler& sampler, std::optional<std::int32_t> document_end) {
  return Loader(std::make_shared<TokenDataset>(tokens, seq_len, document_end),
                std::make_shared<ContinuousBatchSampler>(sampler), engine.stream(),
                {.slots = static_cast<std::size_t>(engine.config().sizes.accumulation),
                 .positions = engine.loader_positions(),
                 .name = "train"});
}

nn::Loss loss_of(LanguageModel& model, Tape& tape, const Batch& batch, bool document_mask) {
  const Tensor starts = document_mask ? batch["document_starts"] : Tensor();
  return model.forward(tape, batch["inputs"], batch["targets"], starts).loss;
}

namespace {

/// Returns why the update has diverged, which is left to the report; or an empty text.
std::string train_batch(Engine& engine, LanguageModel& model, Loader& loader, bool document_mask) {
  try {
    engine.train_batch(
        loader, [&](Tape& tape, const Batch& batch) { return loss_of(model, tape, batch, document_mask); });
  } catch (const Error& e) {
    if (e.code() != Errc::diverged) throw;
    const std::string what = e.what();  // "update 4: …"
    return what.substr(what.find(": ") + 2);
  }
  return "";
}

}  // namespace

std::optional<UpdateReport> update(Engine& engine, LanguageModel& model, Loader& loader, std::size_t seq_len,
                                   bool document_mask) {
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t before = engine.global_steps();
  const MeshTraffic sent = engine.strategy().traffic();
  const std::string diverged = train_batch(engine, model, loader, document_mask);
  if (diverged.empty() && engine.global_steps() == before) return std::nullopt;
  const StepReport& step = engine.report();
  UpdateReport report{.step = static_cast<std::uint64_t>(step.step),
                      .loss = engine.loss(),
                      .grad_norm = step.grad_norm,
                      .lr = step.lr,
                      .exposed_comm_ms = step.exposed_seconds * 1e3,
                      .skipped = step.skipped,
                      .without_terms = step.without_terms,
                      .diverged = diverged,
                      .sent = engine.strategy().traffic() - sent};
  const Precision& precision = engine.config().strategy.precision;
  if (precision.parameters == DType::f16) report.loss_scale = step.loss_scale;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  report.step_ms = seconds.count() * 1e3;
  report.tokens_per_second =
      static_cast<double>(engine.config().sizes.train) * static_cast<double>(seq_len) / seconds.count();
  return report;
}

std::vector<std::int32_t> sample(Engine& engine, LanguageModel& model,
                                 const std::vector<std::int32_t>& prompt, const GenerationConfig& how) {
  return engine.evaluate([&](Tape& tape) { return generate(model, tape, std::span(&prompt, 1), how); })[0];
}

void save(Engine& engine, LanguageModel& model, const std::string& folder, const SaveOptions& options) {
  // Not inside a graph's memory: evaluate() ends it.
  engine.evaluate([&](Tape&) {
    save_pretrained(folder, model, engine.strategy(), engine.world().rank(), engine.stream(), options);
  });
}

}  // namespace rz::lm
