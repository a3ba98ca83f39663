// Settings that config.json can spell in several ways: each spelling gives transformers' logits
// (tests/data/config_spellings), or is refused by its name.

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/llama_config.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/gpt2_tiny.h"
#include "tests/support/huggingface_folder.h"

namespace rz {
namespace {

using nlohmann::json;
using test::error_of;
using test::expect_parts;
using ConfigSpellings = test::HuggingFaceFolder;

/// By the formula of make_expected.py.
float weight(const std::string& name, std::size_t i) {
  const double u = test::NamedUniform(name)[i];
  const double norm = name.find("norm") != name.npos && name.ends_with("weight") ? 1 : 0;
  return static_cast<float>(0.08 * (2 * u - 1) * std::sqrt(3.0) + norm);
}

TEST_F(ConfigSpellings, EachSpellingHasTheLogitsOfTransformers) {
  const json expected =
      json::parse(read_text_file(RZ_SOURCE_DIR "/tests/data/config_spellings/expected.json"));
  const Tensor tokens = Tensor::empty({1, 12}, DType::i32);
  for (std::int32_t i = 0; i < 12; ++i) tokens.data<std::int32_t>()[i] = (7 * i * i + 3 * i + 1) % 61;
  for (const auto& [name, model] : expected.items()) {
    std::string first;
    for (const json& config : model["configs"]) {
      SCOPED_TRACE(config.dump());
      put("config.json", config.dump());
      const auto loaded = language_model_from_config(path());
      allocate_parameters(*loaded);
      for (Parameter* p : loaded->parameters())
        for (std::size_t i = 0; i < p->count(); ++i) p->value.data<float>()[i] = weight(p->name, i);
      Tape tape;
      const Var logits = loaded->logits_at(tape, tokens, 11);
      const std::vector<double> wanted = model["logits"];
      ASSERT_EQ(tape.value(logits).count(), wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i)
        EXPECT_NEAR(tape.value(logits).data<float>()[i], wanted[i], 5e-6) << name << " " << i;
    }
  }
}

TEST_F(ConfigSpellings, TwoThatDifferAreRefusedByBothKeys) {
  const auto refused = [&](json config, const json& more, std::initializer_list<std::string> parts) {
    config.update(more);
    put("config.json", config.dump());
    expect_parts(error_of([&] { language_model_from_config(path()); }).what(), parts);
  };
  const json gpt2{{"n_layer", 1}, {"n_head", 2}, {"n_embd", 16}, {"n_positions", 16}, {"vocab_size", 64}};
  const json llama{{"model_type", "llama"},   {"vocab_size", 64},       {"hidden_size", 32},
                   {"intermediate_size", 48}, {"num_hidden_layers", 2}, {"num_attention_heads", 8}};
  for (const auto& [key, other] : {std::pair{"n_layer", "num_hidden_layers"},
                                   {"n_head", "num_attention_heads"},
                                   {"n_embd", "hidden_size"},
                                   {"n_positions", "max_position_embeddings"}})
    refused(gpt2, {{other, 4}}, {concat("config.json: ", other, ": is 4, and "), key, "give one of them"});
  refused(gpt2, {{"layer_types", {"sliding_attention"}}}, {"layer_types: must be [\"full_attention\"]"});
  refused(llama, {{"layer_types", {"full_attention", "sliding_attention"}}}, {"layer_types: must be"});
  json mistral = llama;
  mistral["model_type"] = "mistral";
  refused(mistral, {{"layer_types", {"full_attention", "full_attention"}}},
          {"layer_types: must be [\"sliding_attention\",\"sliding_attention\"]"});
}

TEST_F(ConfigSpellings, WhatMakesAnotherModelIsRefusedInEveryFamily) {
  const json sizes{{"vocab_size", 64},
                   {"hidden_size", 32},
                   {"intermediate_size", 48},
                   {"num_hidden_layers", 1},
                   {"num_attention_heads", 4},
                   {"num_key_value_heads", 4},
                   {"max_position_embeddings", 16}};
  for (const char* const type : {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox"}) {
    json config = sizes;
    config["model_type"] = type;
    const auto refused = [&](const char* key, const json& value) {
      json wrong = config;
      wrong[key] = value;
      put("config.json", wrong.dump());
      expect_parts(error_of([&] { language_model_from_config(path()); }).what(),
                   {concat("config.json: ", key, ": ")});
    };
    refused("is_causal", false);
    refused("pruned_heads", {{"0", {1}}});
    refused("text_config", {{"hidden_size", 32}});
    refused("quantization_config", {{"bits", 4}});
    config.update({{"is_causal", true}, {"pruned_heads", json::object()}, {"text_config", nullptr}});
    put("config.json", config.dump());
    EXPECT_EQ(family_of(*language_model_from_config(path())).model_type, type);
  }
}

TEST_F(ConfigSpellings, NullIsNotAlwaysAnAbsentKey) {
  const auto heads = [&](const char* type, const char* more) {
    put("config.json",
        concat(R"({"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,)",
               R"("num_attention_heads": 64, "model_type": ")", type, '"', more, "}"));
    return read_llama_config(path()).num_key_value_heads;
  };
  for (const char* const type : {"mistral", "qwen2", "qwen3"})
    EXPECT_EQ(heads(type, R"(, "head_dim": 2, "num_key_value_heads": null)"), 64u) << type;
  expect_parts(error_of([&] { heads("qwen3", R"(, "head_dim": null)"); }).what(),
               {"config.json: head_dim: is null"});
  EXPECT_EQ(heads("mistral", R"(, "head_dim": 2)"), 8u);
  EXPECT_EQ(heads("qwen2", R"(, "head_dim": 2)"), 32u);
  EXPECT_EQ(heads("llama", R"(, "head_dim": 2)"), 64u);
}

TEST_F(ConfigSpellings, AGpt2MayHaveSeveralTokensThatEndAText) {
  const auto written = [&](const char* eos) {
    put("config.json",
        concat(R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 64, )",
               R"("eos_token_id": )", eos, "}"));
    return json::parse(to_json(read_gpt2_config(path())))["eos_token_id"].dump();
  };
  EXPECT_EQ(written("[63, 7, 64]"), "[63,7]");
  EXPECT_EQ(written("[63]"), "63");
  EXPECT_EQ(written("63"), "63");
  EXPECT_EQ(written("null"), "null");
}

}  // namespace
}  // namespace rz
