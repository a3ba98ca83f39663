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

void LanguageModel::register_head(Module& body, Module& norm, nn::Embedding& table, bool tied,
                                  double deviation, const std::string& name) {
  if (tied) {
    Scope& scope = body.register_scope("head", std::vector<Module*>{&norm});
    scope.parameters.push_back(&table.weight);
    head_ = &table, head_scope_ = &scope;
    return;
  }
  const Shape& shape = table.weight.shape;
  lm_head_.emplace(*this, name, shape[0], shape[1], static_cast<float>(deviation));
  head_ = &*lm_head_;
  head_scope_ = &body.register_scope("head", std::vector<Module*>{&norm, &*lm_head_});
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
    const Var own = head_->own_logits(tape, last_norm(tape, x));
    if (!targets.defined()) return output.logits = head_->gathered(tape, own);
    if (!head_->weight.part) output.logits = own;
    output.loss = head_->cross_entropy(tape, own, targets);
    return output.loss.sum;
  });
  return output;
}

Var LanguageModel::logits_at(Tape& tape, const Tensor& tokens, std::size_t position) {
  const Var all = checked_hidden(tape, tokens, {});
  require(tape.value(all).shape()[1] == tokens.shape()[1], Errc::invalid_argument,
          "logits_at: with sequence parallelism each rank has some positions; call it under Tape::NoGrad");
  const Var x = nn::narrow(tape, all, 1, position, 1);
  return tape.scope(*head_scope_, [&] { return head_->logits(tape, last_norm(tape, x)); });
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
  return tape.scope(*head_scope_, [&] { return head_->logits(tape, last_norm(tape, tape.constant(last))); });
}

}  // namespace rz
