// Small models of the shape of Llama and GPT-NeoX against PyTorch in float64 (tests/data/llama_tiny), in
// every strategy.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "autograd_lite/models/generate.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/io/json.h"
#include "sharding/lm/updates.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"
#include "tests/support/gpt2_tiny.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

/// `config`: a folder, or its config.json. An update is of `batch` samples.
lab::Model model_of(const std::string& config, const lab::LanguageData& data, std::int64_t batch) {
  return lab::language(
      data, [=] { return language_model_from_config(config); },
      concat(R"({"train_batch_size": )", batch, R"(, "gradient_accumulation_steps": 1, "gradient_clipping": 0,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}})"));
}

void expect_near(const lab::Trace& trace, const nlohmann::json& expected) {
  ASSERT_FALSE(trace.updates.empty());
  for (const UpdateReport& r : trace.updates) {
    EXPECT_NEAR(r.loss, expected.at("loss").at(r.step).get<double>(), 2e-5) << "update " << r.step;
    const double norm = expected.at("grad_norm").at(r.step);
    EXPECT_NEAR(r.grad_norm, norm, 1e-4 * norm) << "update " << r.step;
  }
}

/// By the formula of make_expected.py.
float weight(const std::string& name, std::size_t i) {
  const double u = NamedUniform(name)[i];
  const double norm = name.find("norm") != name.npos && name.ends_with("weight") ? 1 : 0;
  return static_cast<float>(0.08 * (2 * u - 1) * std::sqrt(3.0) + norm);
}

void write_tensors(const std::vector<Parameter*>& parameters, const std::string& path) {
  std::vector<SafetensorsSpec> tensors;
  for (const Parameter* p : parameters) {
    tensors.push_back({p->name, {}, DType::f32});
    for (int i = 0; i < p->shape.dims(); ++i) tensors.back().shape.push_back(p->shape[i]);
  }
  SafetensorsWriter writer(path, tensors);
  for (const Parameter* p : parameters) {
    std::vector<float> values(p->count());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = weight(p->name, i);
    writer.write(std::span<const float>(values));
  }
  writer.finish();
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

/// Two files and their index.
void write_shards(LanguageModel& model, const std::string& folder) {
  std::filesystem::create_directory(folder);
  std::vector<Parameter*> shards[2];
  nlohmann::json files;
  for (Parameter* p : model.parameters()) {
    const int shard = files.size() % 3 == 0;
    shards[shard].push_back(p);
    files[p->name] = concat(shard, ".safetensors");
  }
  for (const int shard : {0, 1}) write_tensors(shards[shard], concat(folder, "/", shard, ".safetensors"));
  write_file(folder + "/model.safetensors.index.json", nlohmann::json{{"weight_map", files}}.dump());
}

const std::string expected_file = RZ_SOURCE_DIR "/tests/data/llama_tiny/expected.json";

class LlamaTiny : public testing::TestWithParam<const char*> {
 protected:
  LlamaTiny()
      : all_(parse_json(read_text_file(expected_file), expected_file, JsonDialect::strict)),
        case_(all_.at("cases").at(GetParam())) {
    write_file(folder_ / "config.json", case_.at("config").dump());
    write_tensors(model()->parameters(), folder_ / "start.safetensors");
  }
  std::unique_ptr<LanguageModel> model() const { return language_model_from_config(folder_ / "config.json"); }
  lab::Model trained(const std::string& weights = "start.safetensors") const {
    return model_of(folder_ / "config.json", {case_.at("sequence_length"), folder_ / weights},
                    all_.at("batch"));
  }

  Folder folder_;
  nlohmann::json all_, case_;
};

TEST_P(LlamaTiny, TrainsAsPyTorchDoesInFloat64InEveryStrategy) {
  for (const lab::Trace& trace :
       {lab::train({.model = trained(), .updates = 6}),
        lab::train_in_every_strategy({.model = trained(), .ranks = 3, .updates = 6})}) {
    ASSERT_EQ(trace.updates.size(), case_.at("loss").size());
    expect_near(trace, case_);
  }
}

TEST_P(LlamaTiny, RecomputationChangesNoBit) {
  lab::Run run{.model = trained(), .strategy = StrategyKind::zero3, .ranks = 2, .updates = 2};
  const lab::Trace kept = lab::train(run);
  run.keys = R"("activation_checkpointing": {"partition_activations": true})";
  EXPECT_EQ(lab::train(run), kept);
}

TEST_P(LlamaTiny, WhatIsLoadedIsSavedAgain) {
  write_shards(*model(), folder_ / "shards");
  for (const char* weights : {"start.safetensors", "shards"}) {
    lab::train({.model = trained(weights),
                .strategy = StrategyKind::zero3,
                .ranks = 2,
                .updates = 0,
                .end = [&](Engine& engine, Module& m) {
                  save(engine, dynamic_cast<LanguageModel&>(m), folder_ / "again");
                }});
    EXPECT_EQ(read_text_file((folder_ / "again") + "/model.safetensors"),
              read_text_file(folder_ / "start.safetensors"));
  }
  EXPECT_EQ(config_json(*language_model_from_config(folder_ / "again")), config_json(*model()));
}

TEST_P(LlamaTiny, ContinuesTextsAsInFloat64WithACacheAndWithout) {
  const auto loaded = model();
  allocate_parameters(*loaded);
  load_pretrained(*loaded, folder_ / "start.safetensors");
  Tape tape;
  const std::vector<std::vector<std::int32_t>> prompts = all_.at("prompts"), expected = case_.at("greedy");
  for (const bool use_cache : {false, true})
    EXPECT_EQ(
        generate(*loaded, tape, prompts, {.max_new_tokens = 15, .temperature = 0, .use_cache = use_cache}),
        expected);
}

INSTANTIATE_TEST_SUITE_P(Cases, LlamaTiny,
                         testing::Values("llama", "llama_without_groups", "llama_linear", "llama_dynamic",
                                         "llama_llama3", "mistral", "qwen2", "qwen3", "gpt_neox",
                                         "gpt_neox_sequential"),
                         [](const auto& info) { return std::string(info.param); });

// ---- the shared fixture

const std::string fixture = std::string(RZ_SOURCE_DIR) + "/../shared/fixtures/llama_tiny";

/// Of a part of the fixture.
nlohmann::json expected_of(const std::string& part) {
  const std::string file = fixture + part + "/expected.json";
  return parse_json(read_text_file(file), file, JsonDialect::strict);
}

lab::Model model_of(const std::string& part, const nlohmann::json& expected) {
  return model_of(fixture + part, {expected.at("sequence_length"), fixture + part, fixture + "/tokens.bin"},
                  8);
}

class LlamaSharedFixture : public testing::TestWithParam<std::tuple<int, StrategyKind>> {};

TEST_P(LlamaSharedFixture, TrainsAsPyTorchDoesInFloat64) {
  if (!std::filesystem::exists(fixture))
    GTEST_SKIP() << "no ../shared/fixtures/llama_tiny beside the sources";
  const auto& [ranks, kind] = GetParam();
  const nlohmann::json all = expected_of("");
  for (const std::string part : {"", "/sharded"}) {
    lab::Run run{.model = model_of(part, all), .strategy = kind, .ranks = ranks, .updates = 3};
    if (part.empty()) run.updates = all.at("steps");
    expect_near(lab::train(run), all.at("float64"));
  }
}
INSTANTIATE_TEST_SUITE_P(Settings, LlamaSharedFixture,
                         testing::Combine(testing::Values(1, 2, 4), testing::ValuesIn(lab::strategies)),
                         [](const auto& info) {
                           return concat("ranks_", std::get<0>(info.param), "_",
                                         name(std::get<1>(info.param)));
                         });

class LlamaOnAMesh : public testing::TestWithParam<MeshSizes> {};

TEST_P(LlamaOnAMesh, EveryStageTrainsAsPyTorchDoesInFloat64) {
  if (!std::filesystem::exists(fixture))
    GTEST_SKIP() << "no ../shared/fixtures/llama_tiny beside the sources";
  const nlohmann::json all = expected_of("");
  lab::Run run{.model = model_of("", all),
               .strategy = StrategyKind::zero3,
               .ranks = GetParam().ranks(),
               .mesh = GetParam(),
               .updates = all.at("steps")};
  expect_near(lab::train(run), all.at("float64"));
  run.updates = 3;
  lab::train_in_every_strategy(run);
}
INSTANTIATE_TEST_SUITE_P(Sizes, LlamaOnAMesh,  // two key heads
                         testing::Values(MeshSizes{2, 2, 1}, MeshSizes{1, 1, 2}, MeshSizes{1, 2, 2},
                                         MeshSizes{2, 1, 2}),
                         [](const auto& info) {
                           const MeshSizes& s = info.param;
                           return concat("replicate", s.replicate, "_shard", s.shard, "_tp", s.tp);
                         });

/// Losses in bf16, whose roundings are off by a factor of 1 + ε, |ε| ≤ u = 2^-8. To the nearest value, they
/// are independent with mean 0 and a standard deviation of at most u/√3.
///
/// The first loss. On the way to a logit a value is stored in each layer 13 times (a norm, the value,
/// rotation, attention, its projection, the sum; a norm, gate, up, silu, product, down, the sum), then in the
/// last norm and as the logit: S = 13 · 3 + 2 times. Where a step passes a relative error on with a factor of
/// at most 1, the last row, of RMS 1, is off by √S u/√3 in each channel, and a logit by that times σ, the RMS
/// of the head's weights, 0.06, times √64: σ = 0.48. The loss of a token is off by √2 of it at most, since |p
/// - y| ≤ √2 for probabilities p and the target y, and the mean over N = 8 · 64 tokens by 1/√N of it. Four
/// times this standard deviation: 1.8e-3. A bias, e.g. of truncation, is outside: by u/2 each time it scales
/// logits by 8%.
///
/// Later ones. Parameters are masters in f32, rounded: the loss is off by Σ g w ε, which is 4 u/√3 · |g ∘ w|
/// = 1.7e-3, with |g ∘ w| = 0.19 by the fixture's gradients and weights. An update of AdamW moves each of n
/// elements by lr in the direction of its gradient, which is wrong where the gradient is less than its error,
/// ρ = √(2S) u/√3 of the RMS: in a share ρ of the elements, whose effect on the loss is 2 lr ρ |g|/√n at
/// most: 2 lr √n |g| ρ² = 7e-4 per update.
struct Bf16Bound {
  static constexpr double u = 0x1p-8, S = 13 * 3 + 2, lr = 1e-3, elements = 177088, norm = 2, products = 0.19;
  static double first() { return 4 * std::sqrt(2 * S / 3 / (8 * 64)) * u * 0.48; }
  static double after(std::uint64_t updates) {
    const double wrong = 2 * S * u * u / 3;
    return first() + 4 * u / std::sqrt(3.0) * products +
           static_cast<double>(updates) * 2 * lr * std::sqrt(elements) * norm * wrong;
  }
};

TEST(LlamaInBf16, LossesAreThoseOfFloat64WithinRounding) {
  if (!std::filesystem::exists(fixture))
    GTEST_SKIP() << "no ../shared/fixtures/llama_tiny beside the sources";
  const nlohmann::json rounded = expected_of("/bf16"), all = expected_of("");
  lab::Run first{.model = model_of("/bf16", rounded), .updates = 1},
      course{.model = model_of("", all), .updates = 5};
  const double loss = rounded.at("first_loss");
  EXPECT_NEAR(lab::train(first).updates.at(0).loss, loss, 2e-5) << "in f32";
  first.keys = course.keys = R"("bf16": {"enabled": true})";
  for (const int ranks : {1, 2}) {
    first.ranks = course.ranks = ranks;
    EXPECT_NEAR(lab::train_in_every_strategy(first).updates.at(0).loss, loss, Bf16Bound::first()) << ranks;
    for (const UpdateReport& r : lab::train_in_every_strategy(course).updates)
      EXPECT_NEAR(r.loss, all.at("float64").at("loss").at(r.step).get<double>(), Bf16Bound::after(r.step))
          << ranks << " ranks, update " << r.step;
  }
}

/// Greedy texts of transformers. A step whose two best logits are closer than rounding may differ: `margin`
/// is the smallest distance.
class GenerationFixture : public testing::TestWithParam<const char*> {};

TEST_P(GenerationFixture, IsThatOfTransformers) {
  const std::string fixtures = std::string(RZ_SOURCE_DIR) + "/../shared/fixtures/",
                    file = fixtures + "generation/" + GetParam() + ".json", base = fixtures + GetParam();
  if (!std::filesystem::exists(file)) GTEST_SKIP() << "no ../shared/fixtures/generation beside the sources";
  const nlohmann::json all = parse_json(read_text_file(file), file, JsonDialect::strict);
  const auto model = language_model_from_config(base);
  allocate_parameters(*model);
  load_pretrained(*model, base);
  Tape tape;
  std::vector<std::vector<std::int32_t>> prompts, expected;
  for (const nlohmann::json& c : all.at("cases")) {
    prompts.push_back(c.at("prompt"));
    expected.push_back(c.at("tokens"));
    ASSERT_GT(c.at("margin").get<double>(), 2e-5);
  }
  const std::size_t n = expected.at(0).size();
  for (const bool cached : {true, false}) {
    GenerationConfig config{.max_new_tokens = n, .temperature = 0, .use_cache = cached};
    EXPECT_EQ(generate(*model, tape, prompts, config), expected);
    for (std::size_t i = 0; i < prompts.size(); ++i)
      EXPECT_EQ(generate(*model, tape, std::span(&prompts[i], 1), config)[0], expected[i]) << i;
  }
}
INSTANTIATE_TEST_SUITE_P(Models, GenerationFixture, testing::Values("llama_tiny", "gpt2_tiny"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace rz::lm
