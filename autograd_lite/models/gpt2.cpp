#include "autograd_lite/models/gpt2.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd_lite/init.h"
#include "comm/core/integer_math.h"

namespace rz {
namespace {

float deviation(const Gpt2Config& c) { return static_cast<float>(c.initializer_range); }

/// GPT-2's Conv1D: weight [in, out].
nn::Linear conv1d(const std::string& name, std::size_t in, std::size_t out, float weight_deviation) {
  nn::Linear layer(name, in, out, ops::WeightLayout::in_out);
  layer.weight.initial = {Initial::normal, weight_deviation};
  layer.bias.initial = {Initial::constant, 0};
  return layer;
}

void require_probability(const char* key, double p) {
  require(p >= 0 && p < 1, Errc::config, key, " is ", p, ", expected 0 <= ", key, " < 1");
}

}  // namespace

void check(const Gpt2Config& c) {
  const auto positive = [](const char* key, std::size_t value) {
    require(value > 0, Errc::config, key, " is 0, expected at least 1");
  };
  positive("n_layer", c.n_layer);
  positive("n_head", c.n_head);
  positive("n_embd", c.n_embd);
  positive("n_positions", c.n_positions);
  positive("vocab_size", c.vocab_size);
  require(c.vocab_size < (std::size_t{1} << 31), Errc::config, "vocab_size is ", c.vocab_size,
          ", expected less than 2^31");
  require(c.n_embd % c.n_head == 0, Errc::config, "n_embd is ", c.n_embd, ", which n_head ", c.n_head,
          " does not divide");
  require(c.layer_norm_epsilon > 0 && std::isfinite(c.layer_norm_epsilon), Errc::config,
          "layer_norm_epsilon is ", c.layer_norm_epsilon, ", expected more than 0");
  require(c.initializer_range >= 0 && std::isfinite(c.initializer_range), Errc::config,
          "initializer_range is ", c.initializer_range, ", expected 0 or more");
  require_probability("embd_pdrop", c.embd_pdrop);
  require_probability("resid_pdrop", c.resid_pdrop);
  require_probability("attn_pdrop", c.attn_pdrop);
}

struct Gpt2::Block {
  Block(const Gpt2Config& c, const std::string& name)
      : ln_1(name + ".ln_1", c.n_embd, static_cast<float>(c.layer_norm_epsilon)),
        c_attn(conv1d(name + ".attn.c_attn", c.n_embd, 3 * c.n_embd, deviation(c))),
        attn_proj(conv1d(name + ".attn.c_proj", c.n_embd, c.n_embd, residual_deviation(c))),
        ln_2(name + ".ln_2", c.n_embd, static_cast<float>(c.layer_norm_epsilon)),
        c_fc(conv1d(name + ".mlp.c_fc", c.n_embd, 4 * c.n_embd, deviation(c))),
        mlp_proj(conv1d(name + ".mlp.c_proj", 4 * c.n_embd, c.n_embd, residual_deviation(c))) {
    scope.name = name;
    ln_1.append_parameters(scope.parameters);
    c_attn.append_parameters(scope.parameters);
    attn_proj.append_parameters(scope.parameters);
    ln_2.append_parameters(scope.parameters);
    c_fc.append_parameters(scope.parameters);
    mlp_proj.append_parameters(scope.parameters);
  }

  /// Each block adds to the residual stream twice, hence 2 n_layer additions.
  static float residual_deviation(const Gpt2Config& c) {
    return deviation(c) / std::sqrt(2 * static_cast<float>(c.n_layer));
  }

  nn::LayerNorm ln_1;
  nn::Linear c_attn, attn_proj;
  nn::LayerNorm ln_2;
  nn::Linear c_fc, mlp_proj;
  nn::Dropout dropout{0};
  Scope scope;
};

Gpt2::Gpt2(const Gpt2Config& c)
    : config_((check(c), c)),
      wte_("transformer.wte", c.vocab_size, c.n_embd, deviation(c)),
      wpe_("transformer.wpe", c.n_positions, c.n_embd, deviation(c)),
      dropout_(static_cast<float>(c.embd_pdrop)),
      ln_f_("transformer.ln_f", c.n_embd, static_cast<float>(c.layer_norm_epsilon)) {
  for (std::size_t i = 0; i < c.n_layer; ++i) {
    blocks_.push_back(std::make_unique<Block>(c, concat("transformer.h.", i)));
    blocks_.back()->dropout.p = static_cast<float>(c.resid_pdrop);
  }
  embeddings_scope_.name = "transformer.embeddings";
  wte_.append_parameters(embeddings_scope_.parameters);
  wpe_.append_parameters(embeddings_scope_.parameters);
  head_scope_.name = "transformer.head";
  ln_f_.append_parameters(head_scope_.parameters);
  if (c.tie_word_embeddings) {
    wte_.append_parameters(head_scope_.parameters);
    return;
  }
  lm_head_ = std::make_unique<nn::Linear>("lm_head", c.n_embd, c.vocab_size, ops::WeightLayout::out_in,
                                          /*with_bias=*/false);
  lm_head_->weight.initial = {Initial::normal, deviation(config_)};
  lm_head_->append_parameters(head_scope_.parameters);
}

Gpt2::~Gpt2() = default;

std::vector<Parameter*> Gpt2::parameters() {
  std::vector<Parameter*> all;
  for (const Scope* scope : scopes()) {
    for (Parameter* p : scope->parameters) {
      if (std::find(all.begin(), all.end(), p) == all.end()) all.push_back(p);
    }
  }
  return all;
}

std::vector<const Scope*> Gpt2::scopes() {
  std::vector<const Scope*> all{&embeddings_scope_};
  for (const auto& block : blocks_) all.push_back(&block->scope);
  all.push_back(&head_scope_);
  return all;
}

void Gpt2::set_training(bool training) {
  dropout_.training = training;
  for (const auto& block : blocks_) block->dropout.training = training;
}

Var Gpt2::block(Tape& tape, Block& b, Var x) {
  const float attn_pdrop = training() ? static_cast<float>(config_.attn_pdrop) : 0;
  Var y = nn::causal_attention(tape, b.c_attn(tape, b.ln_1(tape, x)), static_cast<int>(config_.n_head),
                               attn_pdrop);
  y = b.dropout(tape, b.attn_proj(tape, y));
  const auto [residual, norm] = b.ln_2.add_and_norm(tape, x, y);
  y = b.dropout(tape, b.mlp_proj(tape, b.c_fc.gelu(tape, norm)));
  return nn::add(tape, residual, y);
}

Var Gpt2::hidden(Tape& tape, const Tensor& tokens) {
  if (tokens.shape().dims() != 2 || tokens.shape()[1] > config_.n_positions)
    fail(Errc::invalid_argument, "GPT-2: tokens are ", name(tokens.shape()), ", expected [batch, at most ",
         config_.n_positions, "] (n_positions)");
  Var x = tape.scope(embeddings_scope_, [&] {
    const Var table = tape.parameter(wte_.weight);
    return dropout_(tape, nn::embedding_with_positions(tape, tokens, table, tape.parameter(wpe_.weight)));
  });
  for (const auto& b : blocks_) {
    const auto body = [this, &tape, b = b.get()](Var in) { return block(tape, *b, in); };
    x = checkpoint_blocks ? tape.checkpoint(b->scope, x, body)
                          : tape.scope(b->scope, [&] { return body(x); });
  }
  return x;
}

template <class F>
Var Gpt2::head(Tape& tape, const F& use_logits, Var x) {
  return tape.scope(head_scope_, [&] {
    const Var norm = ln_f_(tape, x);
    if (lm_head_) return use_logits((*lm_head_)(tape, norm));
    return use_logits(nn::linear(tape, norm, tape.parameter(wte_.weight), Var(), ops::WeightLayout::out_in));
  });
}

Gpt2::Output Gpt2::forward(Tape& tape, const Tensor& tokens, const Tensor& targets) {
  Output output;
  const auto use_logits = [&](Var logits) {
    output.logits = logits;
    if (!targets.defined()) return logits;
    output.loss = nn::cross_entropy(tape, logits, targets);
    return output.loss.loss;
  };
  head(tape, use_logits, hidden(tape, tokens));
  return output;
}

Var Gpt2::logits_at(Tape& tape, const Tensor& tokens, std::size_t position) {
  const Var x = nn::at_position(tape, hidden(tape, tokens), position);
  return head(
      tape, [](Var logits) { return logits; }, x);
}

namespace {

/// The tokens of the k largest logits in ascending order; all tokens if k is 0. Among equal logits, lower
/// tokens win.
std::vector<std::int32_t> top_candidates(std::span<const float> logits, std::size_t k) {
  std::vector<std::int32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  if (k == 0 || k >= tokens.size()) return tokens;
  const auto larger = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  std::ranges::nth_element(tokens, tokens.begin() + static_cast<std::ptrdiff_t>(k), larger);
  tokens.resize(k);
  std::ranges::sort(tokens);
  return tokens;
}

}  // namespace

std::int32_t pick_token(std::span<const float> logits, double temperature, std::size_t top_k, double u) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  const auto best = static_cast<std::int32_t>(likeliest - logits.begin());
  if (temperature == 0) return best;
  const auto weight = [&](std::int32_t token) {
    return std::exp((double{logits[static_cast<std::size_t>(token)]} - *likeliest) / temperature);
  };
  const auto tokens = top_candidates(logits, top_k);
  double total = 0;
  for (const auto token : tokens) total += weight(token);
  double left = u * total;
  for (const auto token : tokens)
    if ((left -= weight(token)) < 0) return token;
  return best;
}

namespace {

/// x in f32 on the host.
Tensor in_f32(Tape& tape, const Tensor& x) {
  if (x.dtype() == DType::f32) return x.on_host(tape.stream());
  const Tensor wide = tape.empty(x.shape());
  ops::copy(wide, x, tape.stream());
  return wide.on_host(tape.stream());
}

/// Disables dropout during its lifetime.
class EvalMode {
 public:
  explicit EvalMode(Gpt2& model) : model_(model), before_(model.training()) { model.set_training(false); }
  ~EvalMode() { model_.set_training(before_); }
  EvalMode(const EvalMode&) = delete;

 private:
  Gpt2& model_;
  bool before_;
};

}  // namespace

std::vector<std::int32_t> generate(Gpt2& model, Tape& tape, std::span<const std::int32_t> prompt,
                                   std::size_t n, const Sampling& how) {
  require(!prompt.empty(), Errc::invalid_argument,
          "generate: the prompt is empty, expected a token at least");
  require(how.temperature >= 0, Errc::invalid_argument, "generate: temperature is ", how.temperature,
          ", expected 0 or more");
  // Pads windows behind the last token, where attention does not see, to a multiple of `grain`. Few distinct
  // sizes let the pool reuse its blocks.
  constexpr std::size_t grain = 32;
  const std::size_t max_context = model.config().n_positions;
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  const Tape::NoGrad no_grad(tape);
  const EvalMode evaluating(model);
  for (std::size_t i = 0; i < n; ++i) {
    tape.reset();
    const std::size_t used = std::min(text.size(), max_context);
    const std::size_t padded = std::min(round_up(used, grain), max_context);
    std::vector<std::int32_t> window(text.end() - static_cast<std::ptrdiff_t>(used), text.end());
    window.resize(padded);
    const Tensor tokens = tape.empty({1, padded}, DType::i32);
    tokens.assign(std::span<const std::int32_t>(window), tape.stream());
    const Tensor logits = in_f32(tape, tape.value(model.logits_at(tape, tokens, used - 1)));
    text.push_back(pick_token({logits.data<float>(), logits.count()}, how.temperature, how.top_k,
                              random_uniform(how.seed, "generate", i)));
  }
  tape.reset();
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace rz
