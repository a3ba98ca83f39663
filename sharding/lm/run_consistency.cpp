// Whether all ranks were started with the same inputs.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/data/tokens.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/checksum.h"
#include "sharding/lm/inputs.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz::lm {
namespace {

const char* yes(bool x) { return x ? "yes" : "no"; }
std::string or_not_given(const std::string& x) { return x.empty() ? "not given" : x; }

/// Adds one fact for every leaf of a JSON document, named by its path.
void add_json(std::vector<Fact>& facts, const char* flag, const std::string& text) {
  const nlohmann::json values = nlohmann::json::parse(text).flatten();
  for (const auto& [path, value] : values.items()) facts.push_back({concat(flag, " ", path), value.dump()});
}

void add_flags(std::vector<Fact>& facts, const Options& o, const Inputs& in) {
  facts.insert(
      facts.end(),
      {{"--seed", concat(o.seed)},
       {"--init given", yes(in.checkpoint.has_value())},
       {"--adapter given", yes(!o.adapter.empty())},
       {"--save-adapter given", yes(!o.save_adapter.empty())},
       {"--strategy", name(in.strategy)},
       {"--decay", o.decay == Decay::all ? "all" : "matrices"},
       {"--seq-len", concat(in.seq_len)},
       {"--tokenizer", in.tokenizer ? checksum_text(in.tokenizer->checksum()) : "none"},
       {"--text-key", o.text_key},
       {"--prompt-key", or_not_given(o.prompt_key)},
       {"--answer-key", or_not_given(o.answer_key)},
       {"--long-samples", o.long_samples},
       {"--document-mask", yes(o.document_mask)},
       {"--steps", o.steps ? concat(*o.steps)
                           : concat(o.arguments.num_train_epochs.value_or(1), " passes over the data")},
       {"shuffle", yes(o.shuffle)},
       {"overlap", yes(o.overlap)},
       {"--bucket-mb", o.bucket_mb ? concat(*o.bucket_mb) : "not given"},
       {"--recompute", yes(o.recompute)},
       {"graph", yes(o.graph)},
       {"resume_from_checkpoint", or_not_given(o.resume())},
       {"output_dir", or_not_given(o.checkpoint_dir())},
       {"evaluation", yes(in.validation.has_value())},
       {"--tensorboard given", yes(!o.tensorboard.empty())},
       {"--trace given", yes(!o.trace.empty())},
       {"--trace-steps", or_not_given(o.trace_steps)},
       {"--save given", yes(!o.save.empty())},
       {"--save-nonfinite", yes(o.save_nonfinite)},
       {"--save-dtype", o.save_dtype},
       {"--max-shard-size", o.max_shard_size},
       {"--sample", o.sample ? concat('"', *o.sample, '"') : "not given"},
       {"--sample-tokens", concat(o.sample_tokens)},
       {"--sample-temperature", concat(o.sample_temperature)},
       {"--sample-top-k", concat(o.sample_top_k)}});
}

/// Hash of the first, middle and last elements of every parameter.
std::uint64_t hash_of(const PretrainedWeights& checkpoint, std::span<Parameter* const> parameters) {
  constexpr std::size_t piece = 16384;
  std::vector<float> values(piece);
  std::uint64_t hash = 0;
  for (const Parameter* p : parameters) {
    const std::size_t count = std::min(piece, p->count());
    for (const std::size_t begin : {std::size_t{0}, (p->count() - count) / 2, p->count() - count}) {
      checkpoint.read(*p, {begin, begin + count}, values.data());
      hash = hash_bytes(values.data(), count * sizeof(float), hash);
      if (count == p->count()) break;
    }
  }
  return hash;
}

}  // namespace

void require_same_run(const Options& o, const Inputs& in, Communicator& communicator) {
  if (communicator.size() == 1) return;
  std::vector<Fact> facts;
  add_flags(facts, o, in);
  add_json(facts, "--model", config_json(*in.model));
  add_json(facts, "--config", resolved_json(in.ds));
  if (!o.samples_only)
    facts.insert(facts.end(), {{"the number of tokens", concat(in.tokens.count())},
                               {"the hash of the tokens", checksum_text(checksum(in.tokens))}});
  if (in.validation)
    facts.insert(facts.end(), {{"the number of samples that are evaluated", concat(in.validation->samples)},
                               {"the hash of the tokens that are evaluated",
                                checksum_text(checksum(in.validation->tokens))}});
  if (in.checkpoint)
    facts.push_back({"the hash of --init", hash_text(hash_of(*in.checkpoint, in.model->parameters()))});
  require_same("the run", facts, "start every rank alike", communicator);
}

}  // namespace rz::lm
