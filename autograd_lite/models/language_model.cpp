#include "autograd_lite/models/language_model.h"

#include <algorithm>
#include <cmath>

#include "autograd_lite/models/kv_cache.h"
#include "autograd_lite/shape_ops.h"

namespace rz {

void check_sizes(std::initializer_list<std::pair<const char*, std::size_t>> sizes) {
  for (const auto& [key, size] : sizes) {
    require(size > 0, Errc::config, key, " is 0, expected at least 1");
    require(size < (std::size_t{1} << 31) || std::string_view(key) != "vocab_size", Errc::config, key, " is ",
            size, ", expected less than 2^31");
  }
}

void check_number(const char* key, double value, bool valid, const char* expected) {
  require(valid && std::isfinite(value), Errc::config, key, " is ", value, ", expected ", expected);
}

void check_probability(const char* key, double value) {
  require(value >= 0 && value < 1, Errc::config, key, " is ", value, ", expected 0 <= ", key, " < 1");
}

void LanguageModel::register_head(Module& body, Module& norm, Parameter& table, bool tied, double deviation,
                                  const std::string& name) {
  if (tied) {
    Scope& scope = body.register_scope("head", std::vector<Module*>{&norm});
    scope.parameters.push_back(&table);
    head_weight_ = &table, head_scope_ = &scope;
    return;
  }
  lm_head_.emplace(*this, name, table.shape[1], table.shape[0], ops::WeightLayout::out_in,
                   /*with_bias=*/false);
  lm_head_->weight.initial = {Initial::normal, static_cast<float>(deviation)};
  head_weight_ = &lm_head_->weight;
  head_scope_ = &body.register_scope("head", std::vector<Module*>{&norm, &*lm_head_});
}

/// In head_scope_.
Var LanguageModel::head(Tape& tape, Var x) {
  const Var norm = last_norm(tape, x);
  return nn::linear_aligned(tape, norm, tape.parameter(*head_weight_), ops::WeightLayout::out_in);
}

Var LanguageModel::checked_hidden(Tape& tape, const Tensor& tokens, const Tensor& document_starts,
                                  KvCache* cache) {
  const ModelFacts f = facts();
  if (tokens.shape().dims() != 2 || tokens.shape()[1] > f.positions)
    fail(Errc::invalid_argument, f.name, ": tokens are ", rz::name(tokens.shape()),
         ", expected [batch, at most ", f.positions, "], the positions of the model");
  return hidden(tape, tokens, document_starts, cache);
}

LanguageModel::Output LanguageModel::forward(Tape& tape, const Tensor& tokens, const Tensor& targets,
                                             const Tensor& document_starts) {
  Output output;
  const Var x = checked_hidden(tape, tokens, document_starts);
  tape.scope(*head_scope_, [&] {
    output.logits = head(tape, x);
    if (!targets.defined()) return output.logits;
    output.loss = nn::cross_entropy(tape, output.logits, targets);
    return output.loss.sum;
  });
  return output;
}

Var LanguageModel::logits_at(Tape& tape, const Tensor& tokens, std::size_t position) {
  const Var x = nn::narrow(tape, checked_hidden(tape, tokens, {}), 1, position, 1);
  return tape.scope(*head_scope_, [&] { return head(tape, x); });
}

Var LanguageModel::next_logits(Tape& tape, const Tensor& tokens, const std::vector<std::size_t>& counts,
                               KvCache& cache) {
  const Tape::NoGrad no_grad(tape);
  require(tokens.shape().dims() == 2 && tokens.shape()[0] == counts.size(), Errc::invalid_argument,
          "next_logits: the tokens are ", rz::name(tokens.shape()), ", expected a row for each of ",
          counts.size(), " sequences");
  cache.begin(tape, tokens.shape()[1], counts);
  const Tensor all = tape.value(checked_hidden(tape, tokens, {}, &cache));
  const std::size_t length = all.shape()[1], channels = all.shape()[2];
  const Tensor last = tape.empty({counts.size(), 1, channels}, all.dtype());
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const std::size_t at = b * length + std::max<std::size_t>(counts[b], 1) - 1;
    ops::copy(last.view(b * channels, {channels}), all.view(at * channels, {channels}), tape.stream());
  }
  cache.end();
  return tape.scope(*head_scope_, [&] { return head(tape, tape.constant(last)); });
}

}  // namespace rz
