// LoRA: training in every strategy, also against PEFT in float64 (../shared/fixtures/lora_tiny).

#include "autograd_lite/models/lora.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "sharding/checkpoint/open_tensors.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/io/json.h"
#include "sharding/lm/updates.h"
#include "tests/support/small_lora.h"
#include "tests/support/written_checkpoint.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using nlohmann::json;

TEST_F(Lora, EveryStrategyTrainsTheAdapterAloneWithTheSameBits) {
  json lora = all_paths;
  lora["lora_dropout"] = 0.25;
  lora["modules_to_save"] = {"ln_f"};
  for (const char* bf16 : {"", R"(, "bf16": {"enabled": true})"})
    for (const int ranks : {1, 3}) {
      lab::Run training = run(lora);
      training.ranks = ranks;
      training.keys = concat(R"("gradient_accumulation_steps": 2)", bf16);
      std::map<std::string, std::vector<float>> before;
      training.start = [&](Engine& engine, Module& m) {
        const auto values = frozen_values(engine, m);
        if (engine.world().is_main()) before = values;
        EXPECT_EQ(adapter_tensors(m).parameters.size(), 2u * 3 * 2 + 2);  // A and B of layers, ln_f
      };
      training.end = [&](Engine& engine, Module& m) {
        const auto after = frozen_values(engine, m);
        EXPECT_EQ(after.size(), 2u + 2 * 12);
        if (engine.world().is_main()) {
          EXPECT_TRUE(before == after) << "stage " << engine.config().stage;
        }
      };
      const auto updates = lab::train_in_every_strategy(training).updates;
      EXPECT_NE(updates.at(0).loss, updates.at(2).loss);
    }
}

TEST_F(Lora, OnABf16ModelFrozenWeightsHaveNeitherMastersNorState) {
  lab::Run training = run({{"target_modules", "all-linear"}, {"r", 1}});
  training.keys = R"("bf16": {"enabled": true})";
  training.updates = 1;
  training.end = [](Engine& engine, Module& m) {
    std::size_t trained = 0, all = 0;
    for (const Parameter* p : m.parameters()) all += p->count(), trained += p->requires_grad ? p->count() : 0;
    const MemoryReport held = engine.strategy().memory();
    // Two states of f32; flat buckets are padded.
    EXPECT_LT(trained * 10, all);
    EXPECT_LT(held.optimizer_state, 8 * (trained + 2048));
    EXPECT_LT(held.masters, 4 * (trained + 2048));
    EXPECT_LT(held.parameters, 2 * (all + 2048));
  };
  lab::train(training);
}

TEST_F(Lora, AnUpdateIsThatOfTheMergedWeights) {
  const auto with = model(), merged = model();
  add_lora(*with, {.target_modules = "all-linear", .r = 2, .lora_alpha = 3, .use_rslora = true});
  EXPECT_EQ(lora_layers(*with).size(), 8u);
  fill(*with);
  allocate_parameters(*merged);
  for (Parameter* p : merged->parameters()) p->value = with->find(p->name)->value;
  EXPECT_GT(
      std::abs(logits_of(*with, tokens()).data<float>()[0] - logits_of(*merged, tokens()).data<float>()[0]),
      1e-3);
  for (const auto& [name, layer] : lora_layers(*with)) {
    EXPECT_FLOAT_EQ(layer->lora->scale, 3 / std::sqrt(2.0f));
    const Tensor a = layer->lora->a.value, b = layer->lora->b.value,
                 weight = merged->find(name + ".weight")->value;
    const LowRankFactors factors{.in = layer->in_features(),
                                 .out = layer->out_features(),
                                 .r = 2,
                                 .scale = layer->lora->scale,
                                 .in_out = true,
                                 .a = {a.data<float>(), a.count()},
                                 .b = {b.data<float>(), b.count()}};
    for (std::size_t at = 0; at < weight.count(); at += 7)  // in parts
      merge_lora(factors, at, {weight.data<float>() + at, std::min<std::size_t>(7, weight.count() - at)});
    layer->lora.reset();  // the weights are the same memory
  }
  EXPECT_EQ(with->parameters().size(), merged->parameters().size());
  for (const Scope* scope : with->scopes())
    for (const Parameter* p : scope->parameters) EXPECT_EQ(p->name.find("lora"), p->name.npos) << p->name;
  const Tensor expected = logits_of(*merged, tokens());
  const auto again = model();
  add_lora(*again, {.target_modules = "all-linear", .r = 2, .lora_alpha = 3, .use_rslora = true});
  fill(*again);
  expect_near(logits_of(*again, tokens()), expected, 1e-4);
}

// ---- the shared fixture

json json_file(const std::string& path) {
  return parse_json(read_text_file(path), path, JsonDialect::strict);
}

/// Model, ranks with other data, ranks that share layers.
class LoraFixture : public testing::TestWithParam<std::tuple<const char*, int, int>> {
 protected:
  LoraFixture() : fixtures_(std::string(RZ_SOURCE_DIR) + "/../shared/fixtures/") {}
  std::string fixtures_;
  Folder folder_;
};

TEST_P(LoraFixture, TrainsAsPeftDoesInFloat64) {
  const auto& [model, data, tp] = GetParam();
  const std::string adapter = fixtures_ + "lora_tiny/" + model;
  if (!std::filesystem::exists(adapter)) GTEST_SKIP() << "no ../shared/fixtures/lora_tiny beside the sources";
  const json expected = json_file(adapter + "/expected.json");
  const std::string base = fixtures_ + expected.at("base").get<std::string>();
  const LoraOptions options = read_adapter_config(adapter);
  json config = json_file(adapter + "/ds_config.json");
  config["ringzero"]["lora"] = {
      {"r", options.r}, {"lora_alpha", options.lora_alpha}, {"target_modules", options.target_modules.names}};
  lab::Run training{.model = lab::language(
                        {expected.at("sequence_length"), base, base + "/tokens.bin"},
                        [=] { return language_model_from_config(base); }, config.dump()),
                    .ranks = data * tp,
                    .mesh = {1, data, tp},
                    .updates = expected.at("steps")};
  training.start = [&](Engine& engine, Module&) { engine.load_adapter(adapter); };
  const auto base_values = values_in(base);
  training.end = [&](Engine& engine, Module& m) {
    const auto frozen = frozen_values(engine, m);
    EXPECT_EQ(frozen.size(), base_values.size());
    for (const auto& [name, values] : frozen) EXPECT_EQ(values, base_values.at(name)) << name;
    engine.save_adapter(folder_ / "after");
    save(engine, dynamic_cast<LanguageModel&>(m), folder_ / "merged");
  };
  for (const UpdateReport& r : lab::train_in_every_strategy(training).updates) {
    EXPECT_NEAR(r.loss, expected.at("float64").at("loss").at(r.step).get<double>(), 2e-5)
        << "update " << r.step;
    const double norm = expected.at("float64").at("grad_norm").at(r.step);
    EXPECT_NEAR(r.grad_norm, norm, 1e-4 * norm) << "update " << r.step;
  }
  const auto own = values_in((folder_ / "after") + "/adapter_model.safetensors"),
             after = values_in(adapter + "/after/adapter_model.safetensors");
  ASSERT_EQ(own.size(), after.size());
  for (const auto& [name, values] : after)
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(own.at(name)[i], values[i], 1e-4) << name << i;

  const TensorSource logits = open_tensors(adapter + "/merged_logits.safetensors");
  const TensorInfo &ids = *logits.find("input_ids"), &of = *logits.find("logits");
  std::vector<std::int64_t> words(ids.count);
  logits.read_bytes(ids, 0, std::as_writable_bytes(std::span(words)));
  const Tensor tokens = Tensor::empty({ids.shape[0], ids.shape[1]}, DType::i32),
               wanted = Tensor::empty({of.shape[0], of.shape[1], of.shape[2]});
  std::ranges::copy(words, tokens.data<std::int32_t>());
  logits.read_f32(of, 0, {wanted.data<float>(), wanted.count()});
  const auto merged = language_model_from_config(folder_ / "merged");
  allocate_parameters(*merged);
  load_pretrained(*merged, folder_ / "merged");
  expect_near(logits_of(*merged, tokens), wanted, 1e-3);
}
INSTANTIATE_TEST_SUITE_P(Settings, LoraFixture,
                         testing::Combine(testing::Values("llama", "gpt2"), testing::Values(1, 2, 4),
                                          testing::Values(1, 2)),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param), "_", std::get<1>(info.param), "_tp",
                                         std::get<2>(info.param));
                         });

}  // namespace
}  // namespace rz::lm
