#include "autograd_lite/models/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "autograd_lite/models/kv_cache.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/integer_math.h"

namespace rz {
namespace {

void check(const GenerationConfig& c, std::span<const std::vector<std::int32_t>> prompts) {
  const auto require_range = [](const char* name, double x, bool in_range, const char* expected) {
    require(in_range, Errc::invalid_argument, "generate: ", name, " is ", x, ", expected ", expected);
  };
  for (std::size_t i = 0; i < prompts.size(); ++i)
    require(!prompts[i].empty(), Errc::invalid_argument, "generate: prompt ", i,
            " is empty, expected a token at least");
  require_range("temperature", c.temperature, c.temperature >= 0 && std::isfinite(c.temperature),
                "0 or more");
  require_range("top_p", c.top_p, c.top_p > 0 && c.top_p <= 1, "0 < top_p <= 1");
  require_range("min_p", c.min_p, c.min_p >= 0 && c.min_p <= 1, "0 to 1");
  require_range("repetition_penalty", c.repetition_penalty,
                c.repetition_penalty > 0 && std::isfinite(c.repetition_penalty), "more than 0");
}

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

std::vector<float> penalized(std::span<const float> logits, double penalty,
                             std::span<const std::int32_t> text) {
  std::vector<float> out(logits.begin(), logits.end());
  if (penalty == 1) return out;
  const auto by = static_cast<float>(penalty);
  for (const std::int32_t token : text) {
    if (token < 0 || static_cast<std::size_t>(token) >= logits.size()) continue;
    const auto at = static_cast<std::size_t>(token);
    out[at] = logits[at] > 0 ? logits[at] / by : logits[at] * by;
  }
  return out;
}

void forbid(std::vector<float>& logits, std::int32_t token) {
  if (token >= 0 && static_cast<std::size_t>(token) < logits.size())
    logits[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
}

/// The tokens behind which the last size - 1 tokens of the text stand once more.
void forbid_repeated(std::vector<float>& logits, std::size_t size, std::span<const std::int32_t> text) {
  if (size == 0 || text.size() + 1 < size) return;
  const auto tail = text.last(size - 1);
  for (std::size_t i = 0; i + size <= text.size(); ++i)
    if (std::ranges::equal(text.subspan(i, size - 1), tail)) forbid(logits, text[i + size - 1]);
}

/// Hugging Face leaves out what ends a text, and sequences that are longer than the text.
void forbid_words(std::vector<float>& logits, const GenerationConfig& c, std::span<const std::int32_t> text) {
  for (const auto& word : c.bad_words_ids) {
    const bool is_end =
        word.size() == 1 && std::ranges::find(c.eos_token_id, word[0]) != c.eos_token_id.end();
    if (word.empty() || is_end || (word.size() > 1 && word.size() > text.size())) continue;
    const std::span<const std::int32_t> before = std::span(word).first(word.size() - 1);
    if (std::ranges::equal(text.last(before.size()), before)) forbid(logits, word.back());
  }
}

/// Logits after the processors that change them; empty if none does.
std::vector<float> processed(std::span<const float> logits, const GenerationConfig& c,
                             std::span<const std::int32_t> text) {
  if (c.repetition_penalty == 1 && c.no_repeat_ngram_size == 0 && c.bad_words_ids.empty() &&
      c.suppress_tokens.empty())
    return {};
  std::vector<float> out = penalized(logits, c.repetition_penalty, text);
  forbid_repeated(out, c.no_repeat_ngram_size, text);
  forbid_words(out, c, text);
  for (const std::int32_t token : c.suppress_tokens) forbid(out, token);
  return out;
}

/// The smallest set of the likeliest candidates whose weights are top_p of all; in token order.
template <class F>
void keep_top_p(std::vector<std::int32_t>& tokens, double top_p, const F& weight) {
  double total = 0, sum = 0;
  for (const auto token : tokens) total += weight(token);
  std::ranges::stable_sort(tokens, std::greater(), weight);
  std::size_t kept = 0;
  while (kept < tokens.size() && (kept == 0 || sum < top_p * total)) sum += weight(tokens[kept++]);
  tokens.resize(kept);
  std::ranges::sort(tokens);
}

}  // namespace

std::int32_t pick_token(std::span<const float> given, const GenerationConfig& c,
                        std::span<const std::int32_t> text, double u) {
  const std::vector<float> changed = processed(given, c, text);
  const std::span<const float> logits = changed.empty() ? given : std::span<const float>(changed);
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  const auto best = static_cast<std::int32_t>(likeliest - logits.begin());
  if (c.temperature == 0) return best;
  const auto weight = [&](std::int32_t token) {
    return std::exp((double{logits[static_cast<std::size_t>(token)]} - *likeliest) / c.temperature);
  };
  auto tokens = top_candidates(logits, c.top_k);
  if (c.top_p < 1) keep_top_p(tokens, c.top_p, weight);
  if (c.min_p > 0) std::erase_if(tokens, [&](std::int32_t token) { return weight(token) < c.min_p; });
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

Tensor as_tensor(Tape& tape, const Shape& shape, const std::vector<std::int32_t>& tokens) {
  const Tensor t = tape.empty(shape, DType::i32);
  t.assign(std::span<const std::int32_t>(tokens), tape.stream());
  return t;
}

/// Logits [B, vocabulary] after the texts, through a cache while they fit into it.
class NextLogits {
 public:
  NextLogits(LanguageModel& model, Tape& tape, std::size_t texts, std::size_t max_length, bool use_cache)
      : model_(model), tape_(tape), facts_(model.facts()) {
    const std::size_t room = std::min(max_length, facts_.positions);
    // The keys of a shorter text are others.
    const bool length_matters = facts_.length_matters_from && room > facts_.length_matters_from;
    if (use_cache && !length_matters) cache_.emplace(texts, room);
  }

  /// `active[b]`: the text is continued. Of others the logits are undefined.
  Tensor after(const std::vector<std::vector<std::int32_t>>& texts, const std::vector<bool>& active) {
    tape_.reset();
    std::size_t longest = 0;
    for (std::size_t b = 0; b < texts.size(); ++b)
      if (active[b]) longest = std::max(longest, texts[b].size());
    if (cache_ && longest > cache_->positions()) cache_.reset();
    return cache_ ? with_cache(texts, active) : without(texts, active);
  }

 private:
  Tensor with_cache(const std::vector<std::vector<std::int32_t>>& texts, const std::vector<bool>& active) {
    std::vector<std::size_t> counts;
    std::size_t width = 1;
    for (std::size_t b = 0; b < texts.size(); ++b) {
      counts.push_back(active[b] ? texts[b].size() - cache_->lengths()[b] : 0);
      width = std::max(width, counts[b]);
    }
    std::vector<std::int32_t> tokens;
    for (std::size_t b = 0; b < texts.size(); ++b) {
      const auto end = texts[b].end();
      tokens.insert(tokens.end(), end - static_cast<std::ptrdiff_t>(counts[b]), end);
      tokens.resize((b + 1) * width);
    }
    const Tensor in = as_tensor(tape_, {texts.size(), width}, tokens);
    return in_f32(tape_, tape_.value(model_.next_logits(tape_, in, counts, *cache_)));
  }

  /// Few distinct sizes let the pool reuse its blocks.
  std::size_t padded(std::size_t used) const {
    const std::size_t wide = std::min(round_up(used, 32), facts_.positions),
                      from = facts_.length_matters_from;
    return from == 0 ? wide : std::max(used, std::min(wide, from));
  }

  Tensor without(const std::vector<std::vector<std::int32_t>>& texts, const std::vector<bool>& active) {
    // Windows are padded behind the last token, where attention does not see.
    const std::size_t vocabulary = facts_.vocabulary;
    const Tensor all = Tensor::zeros({texts.size(), vocabulary});
    for (std::size_t b = 0; b < texts.size(); ++b) {
      if (!active[b]) continue;
      tape_.reset();
      const std::size_t used = std::min(texts[b].size(), facts_.positions), width = padded(used);
      std::vector<std::int32_t> window(texts[b].end() - static_cast<std::ptrdiff_t>(used), texts[b].end());
      window.resize(width);
      const Tensor tokens = as_tensor(tape_, {1, width}, window);
      const Tensor logits = in_f32(tape_, tape_.value(model_.logits_at(tape_, tokens, used - 1)));
      std::copy_n(logits.data<float>(), vocabulary, all.data<float>() + b * vocabulary);
    }
    return all;
  }

  LanguageModel& model_;
  Tape& tape_;
  ModelFacts facts_;
  std::optional<KvCache> cache_;
};

}  // namespace

std::vector<std::vector<std::int32_t>> generate(LanguageModel& model, Tape& tape,
                                                std::span<const std::vector<std::int32_t>> prompts,
                                                const GenerationConfig& config) {
  check(config, prompts);
  std::vector<std::vector<std::int32_t>> texts(prompts.begin(), prompts.end()), made(prompts.size());
  if (prompts.empty()) return made;
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  const Tape::NoGrad no_grad(tape);
  const EvalMode evaluating(model);
  NextLogits next(model, tape, texts.size(), longest + config.max_new_tokens, config.use_cache);
  std::vector<bool> active(texts.size(), true);
  const auto has_room = [&](std::size_t b) {
    return config.max_length == 0 || texts[b].size() < config.max_length;
  };
  for (std::size_t b = 0; b < texts.size(); ++b) active[b] = has_room(b);
  // Ends of a text that come too early are tokens that it does not get.
  GenerationConfig at_first = config;
  at_first.eos_token_id.clear();
  at_first.suppress_tokens.insert(at_first.suppress_tokens.end(), config.eos_token_id.begin(),
                                  config.eos_token_id.end());
  for (std::size_t i = 0; i < config.max_new_tokens && std::ranges::find(active, true) != active.end(); ++i) {
    const Tensor logits = next.after(texts, active);
    const std::size_t vocabulary = logits.count() / texts.size();
    for (std::size_t b = 0; b < texts.size(); ++b) {
      if (!active[b]) continue;
      const double u = random_uniform(config.seed, b ? concat("generate ", b) : "generate", i);
      const std::int32_t token = pick_token({logits.data<float>() + b * vocabulary, vocabulary},
                                            i < config.min_new_tokens ? at_first : config, texts[b], u);
      texts[b].push_back(token), made[b].push_back(token);
      if (config.on_token) config.on_token(b, token);
      active[b] = has_room(b) && std::ranges::find(config.eos_token_id, token) == config.eos_token_id.end();
      if (config.stopping_criteria && config.stopping_criteria(b, token)) active[b] = false;
    }
  }
  tape.reset();
  return made;
}

}  // namespace rz
