#include "autograd_lite/models/language_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/shape_ops.h"
#include "comm/core/integer_math.h"

namespace rz {

Var LanguageModel::checked_hidden(Tape& tape, const Tensor& tokens) {
  const ModelFacts f = facts();
  if (tokens.shape().dims() != 2 || tokens.shape()[1] > f.positions)
    fail(Errc::invalid_argument, f.name, ": tokens are ", rz::name(tokens.shape()), ", expected [batch, at most ",
         f.positions, "], the positions of the model");
  return hidden(tape, tokens);
}

LanguageModel::Output LanguageModel::forward(Tape& tape, const Tensor& tokens, const Tensor& targets) {
  Output output;
  const Var x = checked_hidden(tape, tokens);
  tape.scope(head_scope(), [&] {
    output.logits = head(tape, x);
    if (!targets.defined()) return output.logits;
    output.loss = nn::cross_entropy(tape, output.logits, targets);
    return output.loss.sum;
  });
  return output;
}

Var LanguageModel::logits_at(Tape& tape, const Tensor& tokens, std::size_t position) {
  const Var x = nn::narrow(tape, checked_hidden(tape, tokens), 1, position, 1);
  return tape.scope(head_scope(), [&] { return head(tape, x); });
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

}  // namespace

std::vector<std::int32_t> generate(LanguageModel& model, Tape& tape, std::span<const std::int32_t> prompt,
                                   std::size_t n, const Sampling& how) {
  require(!prompt.empty(), Errc::invalid_argument,
          "generate: the prompt is empty, expected a token at least");
  require(how.temperature >= 0, Errc::invalid_argument, "generate: temperature is ", how.temperature,
          ", expected 0 or more");
  // Pads windows behind the last token, where attention does not see, to a multiple of `grain`. Few distinct
  // sizes let the pool reuse its blocks.
  constexpr std::size_t grain = 32;
  const std::size_t max_context = model.facts().positions;
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
