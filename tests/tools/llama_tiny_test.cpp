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
#include "tests/lab/world.h"
#include "tests/support/gpt2_tiny.h"
#include "tests/support/train_tiny.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

constexpr StrategyKind strategies[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                       StrategyKind::zero3};

struct Training {
  std::string model;    ///< folder
  std::string weights;  ///< file or folder
  std::string tokens;
  std::int64_t batch = 0;
  std::size_t seq_len = 0;
  bool recompute = false;
  std::string save{};  ///< folder
  DType dtype = DType::f32;
  MeshSizes mesh{};
};

/// Every rank must report the same.
Reports train(const Training& run, int ranks, StrategyKind kind, std::int64_t steps) {
  std::vector<Reports> reports(static_cast<std::size_t>(ranks));
  lab::world(ranks, [&](World& world) {
    const auto model = language_model_from_config(run.model);
    model->checkpoint_activations(run.recompute);
    const PretrainedWeights weights(run.weights, *model);
    EngineOptions e;
    e.ds_config.emplace();
    e.ds_config->optimizer =
        OptimizerConfig{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    e.ds_config->mesh = resolved(run.mesh, ranks, 0);
    e.ds_config->sizes = {run.batch, run.batch / e.ds_config->mesh.data(), 1};
    e.ds_config->gradient_clipping = 0;
    e.ds_config->strategy.precision.parameters = e.ds_config->strategy.precision.gradients = run.dtype;
    e.decay = Decay::matrices;
    e.strategy = kind;
    e.initial_values = [&](const Parameter& p, Range elements, float* out) {
      weights.read(p, elements, out);
    };
    e.expected_terms = static_cast<double>(run.batch) * static_cast<double>(run.seq_len);
    e.threads = 1;
    e.log = nullptr;
    Engine engine = initialize(world, *model, std::move(e));
    const Tokens tokens = Tokens::from_file(run.tokens);
    Loader loader = token_loader(engine, tokens, run.seq_len,
                                 batch_sampler(engine, tokens.samples(run.seq_len), false, 0));
    for (std::int64_t i = 0; i < steps; ++i)
      reports[static_cast<std::size_t>(world.rank())].push_back(
          update(engine, *model, loader, run.seq_len).value());
    if (!run.save.empty()) save(engine, *model, run.save);
  });
  for (const Reports& r : reports) expect_same_bits(reports[0], r, "ranks");
  return reports[0];
}

void expect_near(const Reports& reports, const nlohmann::json& expected) {
  for (const UpdateReport& r : reports) {
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
  Training run() const {
    return {.model = folder_ / "config.json",
            .weights = folder_ / "start.safetensors",
            .tokens = tiny_tokens(),
            .batch = all_.at("batch"),
            .seq_len = case_.at("sequence_length")};
  }

  Folder folder_;
  nlohmann::json all_, case_;
};

TEST_P(LlamaTiny, TrainsAsPyTorchDoesInFloat64InEveryStrategy) {
  for (const int ranks : {1, 3}) {
    const Reports first = train(run(), ranks, StrategyKind::ddp, 6);
    ASSERT_EQ(first.size(), case_.at("loss").size());
    expect_near(first, case_);
    if (ranks == 1) continue;
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      expect_same_bits(first, train(run(), ranks, kind, 6), name(kind));
  }
}

TEST_P(LlamaTiny, RecomputationChangesNoBit) {
  Training again = run();
  again.recompute = true;
  expect_same_bits(train(run(), 2, StrategyKind::zero3, 2), train(again, 2, StrategyKind::zero3, 2),
                   "recompute");
}

TEST_P(LlamaTiny, WhatIsLoadedIsSavedAgain) {
  write_shards(*model(), folder_ / "shards");
  Training again = run();
  again.save = folder_ / "again";
  for (const char* weights : {"start.safetensors", "shards"}) {
    again.weights = folder_ / weights;
    train(again, 2, StrategyKind::zero3, 0);
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

Training training_of(const std::string& part, const nlohmann::json& expected) {
  return {.model = fixture + part,
          .weights = fixture + part,
          .tokens = fixture + "/tokens.bin",
          .batch = 8,
          .seq_len = expected.at("sequence_length")};
}

class LlamaSharedFixture : public testing::TestWithParam<std::tuple<int, StrategyKind>> {};

TEST_P(LlamaSharedFixture, TrainsAsPyTorchDoesInFloat64) {
  if (!std::filesystem::exists(fixture))
    GTEST_SKIP() << "no ../shared/fixtures/llama_tiny beside the sources";
  const auto& [ranks, kind] = GetParam();
  const nlohmann::json all = expected_of("");
  for (const std::string part : {"", "/sharded"}) {
    const Training run = training_of(part, all);
    expect_near(train(run, ranks, kind, part.empty() ? all.at("steps").get<std::int64_t>() : 3),
                all.at("float64"));
  }
}
INSTANTIATE_TEST_SUITE_P(Settings, LlamaSharedFixture,
                         testing::Combine(testing::Values(1, 2, 4), testing::ValuesIn(strategies)),
                         [](const auto& info) {
                           return concat("ranks_", std::get<0>(info.param), "_",
                                         name(std::get<1>(info.param)));
                         });

class LlamaOnAMesh : public testing::TestWithParam<MeshSizes> {};

TEST_P(LlamaOnAMesh, EveryStageTrainsAsPyTorchDoesInFloat64) {
  if (!std::filesystem::exists(fixture))
    GTEST_SKIP() << "no ../shared/fixtures/llama_tiny beside the sources";
  const nlohmann::json all = expected_of("");
  Training run = training_of("", all);
  run.mesh = GetParam();
  const int ranks = run.mesh.ranks();
  expect_near(train(run, ranks, StrategyKind::zero3, all.at("steps").get<std::int64_t>()), all.at("float64"));
  const Reports ddp = train(run, ranks, StrategyKind::ddp, 3);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    expect_same_bits(ddp, train(run, ranks, kind, 3), name(kind));
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
  Training first = training_of("/bf16", rounded), course = training_of("", all);
  const double loss = rounded.at("first_loss");
  EXPECT_NEAR(train(first, 1, StrategyKind::ddp, 1)[0].loss, loss, 2e-5) << "in f32";
  first.dtype = course.dtype = DType::bf16;
  for (const int ranks : {1, 2}) {
    Reports firsts, courses;
    for (const StrategyKind kind : strategies) {
      const Reports once = train(first, ranks, kind, 1), often = train(course, ranks, kind, 5);
      if (firsts.empty()) firsts = once, courses = often;
      expect_same_bits(firsts, once, name(kind));
      expect_same_bits(courses, often, name(kind));
    }
    EXPECT_NEAR(firsts[0].loss, loss, Bf16Bound::first()) << ranks;
    for (const UpdateReport& r : courses)
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
