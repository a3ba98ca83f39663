// Texts of language models, with and without a cache.

#include "autograd_lite/models/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/gpt_neox.h"
#include "autograd_lite/models/kv_cache.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/init.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using Text = std::vector<std::int32_t>;
using Texts = std::vector<Text>;
constexpr std::size_t vocabulary = 11, positions = 12;

std::unique_ptr<LanguageModel> make(const std::string& kind) {
  if (kind == "gpt2")
    return std::make_unique<Gpt2>(Gpt2Config{
        .n_layer = 2, .n_head = 2, .n_embd = 16, .n_positions = positions, .vocab_size = vocabulary});
  if (kind == "gpt_neox")
    return std::make_unique<GptNeox>(GptNeoxConfig{.vocab_size = vocabulary,
                                                   .hidden_size = 16,
                                                   .intermediate_size = 24,
                                                   .num_hidden_layers = 2,
                                                   .num_attention_heads = 2,
                                                   .max_position_embeddings = positions});
  LlamaConfig c{.vocab_size = vocabulary,
                .hidden_size = 16,
                .intermediate_size = 24,
                .num_hidden_layers = 3,
                .num_attention_heads = 4,
                .num_key_value_heads = 2,
                .head_dim = 6,
                .max_position_embeddings = positions};
  if (kind == "window") c.sliding_window = 4, c.max_window_layers = 1;
  return std::make_unique<Llama>(c);
}

struct Ready {
  explicit Ready(const std::string& kind, float factor = 1) : model(make(kind)) {
    allocate_parameters(*model);
    init_parameters(*model, 3);
    for (Parameter* p : model->parameters())
      if (p->shape.dims() == 2)
        for (std::size_t i = 0; i < p->count(); ++i) p->value.data<float>()[i] *= factor;
  }
  Texts generate(const Texts& prompts, std::size_t n, GenerationConfig config = {}) {
    config.max_new_tokens = n;
    return rz::generate(*model, tape, prompts, config);
  }
  /// Logits of every position of a text.
  std::vector<float> logits(const Text& text, const Tensor& document_starts = {}) {
    tape.reset();
    const Tensor all = tape.value(model->forward(tape, row(text), {}, document_starts).logits);
    return {all.data<float>(), all.data<float>() + all.count()};
  }
  static Tensor row(const Text& values) {
    const Tensor t = Tensor::empty({1, values.size()}, DType::i32);
    std::ranges::copy(values, t.data<std::int32_t>());
    return t;
  }

  std::unique_ptr<LanguageModel> model;
  Tape tape;
};

/// The likeliest continuation, by whole forward passes over the last positions.
Text continue_slowly(Ready& r, Text text, std::size_t n) {
  const std::size_t prompt = text.size();
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t used = std::min(text.size(), positions);
    const auto all = r.logits({text.end() - static_cast<std::ptrdiff_t>(used), text.end()});
    const auto last = all.end() - vocabulary;
    text.push_back(static_cast<std::int32_t>(std::max_element(last, all.end()) - last));
  }
  r.tape.reset();
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}

class Generate : public testing::TestWithParam<const char*> {};

TEST_P(Generate, WithoutTemperaturePicksTheLikeliestInASlidingWindow) {
  Ready r(GetParam(), 10);  // far from uniform
  const Text prompt{1, 2, 3};
  EXPECT_EQ(r.generate({prompt}, 20, {.temperature = 0})[0], continue_slowly(r, prompt, 20));
  EXPECT_TRUE(r.model->training());
}

TEST_P(Generate, ACacheChangesLogitsByRoundingOnly) {
  Ready r(GetParam(), 5);
  const Texts texts{{4, 7, 1, 9, 0, 3, 3, 8, 2, 10, 5, 6}, {2, 2, 6, 1, 0, 9, 7, 4, 4, 1, 3, 8}};
  const std::size_t prompts[] = {5, 2};
  std::vector<float> expected[2];
  for (int b : {0, 1}) expected[b] = r.logits(texts[static_cast<std::size_t>(b)]);
  r.tape.reset();
  KvCache cache(2, positions);
  const auto expect_logits = [&](const Tensor& tokens, const std::vector<std::size_t>& counts) {
    const Tensor out = r.tape.value(r.model->next_logits(r.tape, tokens, counts, cache));
    ASSERT_EQ(out.shape(), (Shape{2, 1, vocabulary}));
    for (std::size_t b = 0; b < 2; ++b)
      for (std::size_t v = 0; v < vocabulary; ++v)
        EXPECT_NEAR(out.data<float>()[b * vocabulary + v],
                    expected[b][(cache.lengths()[b] - 1) * vocabulary + v], 2e-5)
            << "sequence " << b << ", length " << cache.lengths()[b];
  };
  const Tensor first = Tensor::zeros({2, 5}, DType::i32);
  for (std::size_t b = 0; b < 2; ++b)
    std::copy_n(texts[b].begin(), prompts[b], first.data<std::int32_t>() + b * 5);
  expect_logits(first, {5, 2});
  for (int i = 0; i < 7; ++i) {
    r.tape.reset();
    const Tensor next = Tensor::empty({2, 1}, DType::i32);
    for (std::size_t b = 0; b < 2; ++b) next.data<std::int32_t>()[b] = texts[b][cache.lengths()[b]];
    expect_logits(next, {1, 1});
  }
  EXPECT_EQ(cache.lengths(), (std::vector<std::size_t>{12, 9}));
  EXPECT_EQ(test::error_of([&] {
              r.model->next_logits(r.tape, first, {1, 1}, cache);
            }).code(),
            Errc::invalid_argument)
      << "a later pass has one token of each";
  const Tensor one = Tensor::zeros({2, 1}, DType::i32);
  EXPECT_EQ(test::error_of([&] {
              r.model->next_logits(r.tape, one, {1, 1}, cache);
            }).code(),
            Errc::invalid_argument)
      << "there is no room for a thirteenth token";
  // The full sequence has ended; the other goes on.
  for (std::size_t length = 10; length <= positions; ++length) {
    r.tape.reset();
    const Tensor next = Tensor::zeros({2, 1}, DType::i32);
    next.data<std::int32_t>()[1] = texts[1][cache.lengths()[1]];
    const Tensor out = r.tape.value(r.model->next_logits(r.tape, next, {0, 1}, cache));
    EXPECT_EQ(cache.lengths(), (std::vector<std::size_t>{12, length}));
    for (std::size_t v = 0; v < vocabulary; ++v)
      EXPECT_NEAR(out.data<float>()[vocabulary + v], expected[1][(length - 1) * vocabulary + v], 2e-5)
          << length;
  }
}

TEST_P(Generate, TextsOfABatchAreThoseAlone) {
  Ready r(GetParam(), 10);
  const Texts prompts{{1, 2, 3, 4, 5}, {7}, {9, 9}};
  for (const bool cached : {true, false}) {
    const Texts all = r.generate(prompts, 6, {.temperature = 0, .use_cache = cached});
    for (std::size_t b = 0; b < prompts.size(); ++b)
      EXPECT_EQ(all[b], r.generate({prompts[b]}, 6, {.temperature = 0})[0]) << b;
  }
}

TEST_P(Generate, ATextEndsWithAStopTokenAndTheOthersGoOn) {
  Ready r(GetParam(), 10);
  const Texts prompts{{1, 2, 3, 4, 5}, {7}, {9, 9}};
  const Texts whole = r.generate(prompts, 6, {.temperature = 0});
  const std::int32_t stop = whole[0][2];
  std::vector<Text> seen(3);
  GenerationConfig config{.temperature = 0, .eos_token_id = {stop}};
  config.on_token = [&](std::size_t text, std::int32_t token) { seen[text].push_back(token); };
  const Texts stopped = r.generate(prompts, 6, config);
  EXPECT_EQ(stopped, seen);
  for (std::size_t b = 0; b < 3; ++b) {
    const auto end = std::ranges::find(whole[b], stop);
    EXPECT_EQ(stopped[b], Text(whole[b].begin(), end == whole[b].end() ? end : end + 1)) << b;
  }
}

TEST_P(Generate, DrawsDependOnTheSeedAndFollowTheDistribution) {
  Ready r(GetParam());
  const Texts prompt{{4}};
  const auto first = r.generate(prompt, 40, {.seed = 1});
  EXPECT_EQ(first, r.generate(prompt, 40, {.seed = 1}));
  EXPECT_NE(first, r.generate(prompt, 40, {.seed = 2}));
  const Texts twice = r.generate({{4}, {4}}, 8, {.seed = 1});
  EXPECT_NE(twice[0], twice[1]) << "texts of one prompt differ";
  // Nearly uniform logits: every token comes up.
  std::vector<int> seen(vocabulary);
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Texts made = r.generate(prompt, 50, {.seed = seed});
    for (const auto t : made[0]) ++seen.at(static_cast<std::size_t>(t));
  }
  for (const int n : seen) EXPECT_GT(n, 0);
}

TEST_P(Generate, TopOneIsTheLikeliestAtAnyTemperature) {
  Ready r(GetParam());
  const Texts prompt{{1, 2, 3}};
  EXPECT_EQ(r.generate(prompt, 20, {.temperature = 3, .top_k = 1, .seed = 5}),
            r.generate(prompt, 20, {.temperature = 0}));
}

INSTANTIATE_TEST_SUITE_P(Models, Generate, testing::Values("gpt2", "llama", "window"),
                         [](const auto& info) { return std::string(info.param); });

// ---- several documents in one text

/// Of the documents of a text, each of which ends with token 0.
Tensor starts_of(const Text& text) {
  Text starts(text.size());
  ops::find_document_starts(starts, text, 0);
  return Ready::row(starts);
}

TEST(DocumentStarts, BeginAfterTheEndOfAnother) {
  Text starts(8);
  ops::find_document_starts(starts, Text{0, 4, 5, 0, 0, 7, 0, 8}, 0);
  EXPECT_EQ(starts, (Text{0, 1, 1, 1, 4, 5, 5, 7}));
  EXPECT_THROW(ops::find_document_starts(starts, Text{1, 2}, 0), Error);
}

class Documents : public testing::TestWithParam<const char*> {};

TEST_P(Documents, AreReadAlone) {
  const std::string kind = GetParam();
  Ready r(kind, 10);
  const Text text{3, 1, 4, 1, 0, 5, 9, 2, 6, 0, 7, 8}, document(text.begin() + 5, text.begin() + 10);
  Text other = text;
  other[1] = 9;
  const auto of = [&](const Text& t, const Tensor& starts) {
    const auto all = r.logits(t, starts);
    return std::vector<float>(all.begin() + 5 * vocabulary, all.begin() + 10 * vocabulary);
  };
  const auto packed = of(text, starts_of(text));
  EXPECT_EQ(of(other, starts_of(text)), packed);
  EXPECT_NE(of(other, {}), of(text, {}));
  if (kind == "gpt2") return;  // its positions are learned
  const auto alone = r.logits(document);
  for (std::size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(packed[i], alone[i], 2e-4) << i;
}

TEST_P(Documents, StayApartWhenABlockRunsAgain) {
  std::vector<std::vector<float>> gradients;
  for (const bool again : {false, true}) {
    Ready r(GetParam());
    r.model->checkpoint_activations(again);
    const Text text{3, 1, 0, 1, 5, 9, 2, 0, 6, 0, 7, 8};
    const auto out = r.model->forward(r.tape, Ready::row(text), Ready::row(text), starts_of(text));
    r.tape.backward(out.loss.sum);
    std::vector<float>& all = gradients.emplace_back();
    for (const Parameter* p : r.model->parameters())
      all.insert(all.end(), p->grad.data<float>(), p->grad.data<float>() + p->count());
  }
  EXPECT_EQ(gradients[0], gradients[1]);
}

INSTANTIATE_TEST_SUITE_P(Families, Documents, testing::Values("gpt2", "llama", "window", "gpt_neox"));

TEST(Generation, WrongArgumentsAreNamed) {
  Ready r("gpt2");
  const auto refused = [&](const Texts& prompts, const GenerationConfig& config) {
    return std::string(test::error_of([&] { r.generate(prompts, 1, config); }).what());
  };
  EXPECT_NE(refused({{1}, {}}, {}).find("prompt 1 is empty"), std::string::npos);
  EXPECT_NE(refused({{1}}, {.temperature = -0.5}).find("temperature is -0.5"), std::string::npos);
  EXPECT_NE(refused({{1}}, {.top_p = 0}).find("top_p is 0"), std::string::npos);
  EXPECT_NE(refused({{1}}, {.min_p = 2}).find("min_p is 2"), std::string::npos);
  EXPECT_NE(refused({{1}}, {.repetition_penalty = 0}).find("repetition_penalty is 0"), std::string::npos);
  EXPECT_TRUE(r.generate({}, 3).empty());
}

/// Tokens that 1000 equally spaced draws pick, and how often.
std::map<std::int32_t, int> draws(std::span<const float> logits, const GenerationConfig& config,
                                  const Text& text = {}) {
  std::map<std::int32_t, int> seen;
  for (int i = 0; i < 1000; ++i) ++seen[pick_token(logits, config, text, (i + 0.5) / 1000)];
  return seen;
}
using Draws = std::map<std::int32_t, int>;

TEST(PickToken, FollowsTheDistributionAtATemperature) {
  // Probabilities 1/4, 1/2, 1/4 at temperature 1; 1/6, 4/6, 1/6 at temperature 1/2.
  const std::vector<float> logits{std::log(1.0f), std::log(2.0f), std::log(1.0f)};
  EXPECT_EQ(draws(logits, {}), (Draws{{0, 250}, {1, 500}, {2, 250}}));
  EXPECT_EQ(draws(logits, {.temperature = 0.5}), (Draws{{0, 167}, {1, 666}, {2, 167}}));
  EXPECT_EQ(draws(logits, {.temperature = 0}), (Draws{{1, 1000}}));
}

TEST(PickToken, DrawsOnlyTheLargestLogits) {
  const std::vector<float> logits{0, 3, 1, 3, 2};
  EXPECT_EQ(draws(logits, {.top_k = 2}), (Draws{{1, 500}, {3, 500}}));
  EXPECT_EQ(draws(logits, {.top_k = 1}), (Draws{{1, 1000}})) << "of equal ones the first";
  EXPECT_EQ(draws(logits, {.top_k = 3}).size(), 3u);
  EXPECT_EQ(draws(logits, {.top_k = 3}).count(4), 1u);
  EXPECT_EQ(draws(logits, {.top_k = 5}), draws(logits, {}));
  EXPECT_EQ(draws(logits, {.top_k = 99}), draws(logits, {})) << "there are not so many";
}

TEST(PickToken, DrawsTheFewestTokensWhoseProbabilitiesReachTopP) {
  // Probabilities 1/8, 1/2, 1/8, 1/4.
  const std::vector<float> logits{0, std::log(4.0f), 0, std::log(2.0f)};
  EXPECT_EQ(draws(logits, {.top_p = 0.3}), (Draws{{1, 1000}}));
  EXPECT_EQ(draws(logits, {.top_p = 0.6}), (Draws{{1, 667}, {3, 333}}));
  EXPECT_EQ(draws(logits, {.top_p = 0.8}), (Draws{{0, 143}, {1, 571}, {3, 286}}))
      << "of equal ones the first";
  EXPECT_EQ(draws(logits, {.top_p = 0.9}), draws(logits, {}));
  EXPECT_EQ(draws(std::vector<float>{0, 0}, {.top_p = 0.5}), (Draws{{0, 1000}})) << "one reaches it exactly";
}

TEST(PickToken, DrawsTokensOfAShareOfTheLargestProbability) {
  const std::vector<float> logits{0, std::log(4.0f), 0, std::log(2.0f)};
  EXPECT_EQ(draws(logits, {.min_p = 0.4}), (Draws{{1, 667}, {3, 333}}));
  EXPECT_EQ(draws(logits, {.min_p = 0.6}), (Draws{{1, 1000}}));
  EXPECT_EQ(draws(logits, {.min_p = 0.2}), draws(logits, {}));
}

TEST(PickToken, PenalizesTokensOfTheTextOnce) {
  const std::vector<float> logits{2, -2, 1, 1.5};
  EXPECT_EQ(draws(logits, {.repetition_penalty = 2, .temperature = 0}), (Draws{{0, 1000}}));
  EXPECT_EQ(draws(logits, {.repetition_penalty = 2, .temperature = 0}, {0, 0}), (Draws{{3, 1000}}));
  // Logits 1, -4, 1, 1.5 after the penalty.
  const std::vector<float> after{1, -4, 1, 1.5};
  EXPECT_EQ(draws(logits, {.repetition_penalty = 2}, {1, 0, 1}), draws(after, {}));
}

}  // namespace
}  // namespace rz
