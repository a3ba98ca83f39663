/// config.json of Hugging Face's families: read, written, refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "autograd_lite/nn/init.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/llama_config.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/io/json.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/support/error_of.h"
#include "tests/support/huggingface_folder.h"

namespace rz {
namespace {

using test::error_of;
using test::expect_parts;

using Tensors = std::vector<SafetensorsSpec>;
using HuggingFaceConfig = test::HuggingFaceFolder;

constexpr const char* small =
    R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256)";

TEST_F(HuggingFaceConfig, TheConfigurationIsReadAndWritten) {
  put("config.json", concat(small, R"(, "initializer_range": 0.25, "tie_word_embeddings": false})"));
  const Gpt2Config c = read_gpt2_config(path("config.json"));
  EXPECT_EQ(c.initializer_range, 0.25);
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_EQ(read_gpt2_config(path()).n_embd, 16u) << "of a folder";
  std::filesystem::create_directories(path("run/global_step2"));
  std::filesystem::copy_file(path("config.json"), path("run/global_step2/config.json"));
  std::ofstream(path("run/latest")) << "global_step2\n";
  EXPECT_EQ(read_gpt2_config(path("run")).n_embd, 16u) << "of a folder of checkpoints";
  std::vector<std::string> warnings;
  read_gpt2_config(path("config.json"), &warnings);
  EXPECT_EQ(warnings, std::vector{path("config.json") +
                                  ": embd_pdrop, attn_pdrop, resid_pdrop: absent, which is 0 here and 0.1 in "
                                  "Hugging Face; give the rate"});
  put("again.json", to_json(c));
  read_gpt2_config(path("again.json"), &(warnings = {}));
  EXPECT_EQ(warnings.size(), 0u);
  EXPECT_EQ(to_json(read_gpt2_config(path("again.json"))), to_json(c));
  put("wrong.json", concat(small, R"(, "initializer_range": "wide"})"));
  expect_parts(error_of([&] { read_gpt2_config(path("wrong.json")); }).what(),
               {"wrong.json", "initializer_range"});
  put("plain.json", concat(small, "}"));
  EXPECT_EQ(read_gpt2_config(path("plain.json")).initializer_range, 0.02);
}

TEST_F(HuggingFaceConfig, SpecialTokensAreOfTheVocabulary) {
  const auto tokens = [&](const std::string& more) {
    put("config.json", concat(R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, )", more, "}"));
    const auto written = nlohmann::json::parse(to_json(read_gpt2_config(path("config.json"))));
    return concat(written.at("bos_token_id").dump(), " ", written.at("eos_token_id").dump());
  };
  EXPECT_EQ(tokens(R"("vocab_size": 256)"), "null null");
  EXPECT_EQ(tokens(R"("vocab_size": 256, "bos_token_id": 50256, "eos_token_id": -1)"), "null null");
  EXPECT_EQ(tokens(R"("vocab_size": 50257)"), "50256 50256") << "GPT-2's own";
  EXPECT_EQ(tokens(R"("vocab_size": 300, "bos_token_id": 299, "eos_token_id": null)"), "299 null");
}

TEST_F(HuggingFaceConfig, ALlamaMayHaveSeveralTokensThatEndATextAndHasHuggingFacesWithoutTheKeys) {
  const auto written = [&](const std::string& more) {
    put("config.json",
        R"({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, )"
        R"("num_attention_heads": 8)" +
            more + "}");
    const auto all = nlohmann::json::parse(to_json(read_llama_config(path())));
    return concat(all.at("bos_token_id").dump(), " ", all.at("eos_token_id").dump());
  };
  EXPECT_EQ(written(R"(, "eos_token_id": [63, 7, 64])"), "1 [63,7]");
  EXPECT_EQ(written(R"(, "bos_token_id": null, "eos_token_id": [63])"), "null 63");
  EXPECT_EQ(written(R"(, "model_type": "mistral", "eos_token_id": 3)"), "1 3");
  EXPECT_EQ(written(""), "1 2");
  EXPECT_EQ(written(R"(, "model_type": "qwen2", "num_key_value_heads": 8)"), "null null");
}

/// transformers reads the file; here it is that each byte has its own character.
TEST_F(HuggingFaceConfig, TheTokenizerOfBytesHasOneCharacterForEach) {
  Tokenizer::bytes(16).save_pretrained(path());
  const auto tokenizer = nlohmann::json::parse(read_text_file(path("tokenizer.json")));
  std::set<int> bytes;
  for (const auto& [character, byte] : tokenizer["model"]["vocab"].items()) bytes.insert(byte.get<int>());
  EXPECT_EQ(bytes.size(), 256u);
  EXPECT_EQ(*bytes.rbegin(), 255);
  const auto& vocabulary = tokenizer["model"]["vocab"];
  EXPECT_EQ(vocabulary.at("A"), 65);
  EXPECT_EQ(vocabulary.at("\xC4\xA0"), 32) << "GPT-2's character of the blank";
  EXPECT_EQ(vocabulary.at("\xC3\xBF"), 255);
  EXPECT_EQ(nlohmann::json::parse(read_text_file(path("tokenizer_config.json"))).at("model_max_length"), 16);
}

// ---- config.json of Llama, Mistral and Qwen2

std::string llama_config(const std::string& more) {
  return R"({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, )"
         R"("num_attention_heads": 8)" +
         more + "}";
}

std::string neox_config(const std::string& more) {
  return R"({"model_type": "gpt_neox", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, )"
         R"("num_hidden_layers": 1, "num_attention_heads": 2)" +
         more + "}";
}

TEST_F(HuggingFaceConfig, AbsentKeysOfALlamaHaveHuggingFacesDefaults) {
  put("config.json", llama_config(R"(, "model_type": "llama")"));
  const LlamaConfig llama = read_llama_config(path());
  EXPECT_EQ(llama.num_key_value_heads, 8u);
  EXPECT_EQ(llama.head_dim, 4u);
  EXPECT_EQ(llama.max_position_embeddings, 2048u);
  EXPECT_EQ(llama.rms_norm_eps, 1e-6);
  EXPECT_EQ(llama.rope.theta, 10000);
  EXPECT_FALSE(llama.qkv_bias || llama.o_bias || llama.mlp_bias || llama.tie_word_embeddings);
  EXPECT_EQ(llama.sliding_window, 0u);

  put("config.json", llama_config(R"(, "model_type": "mistral")"));
  const LlamaConfig mistral = read_llama_config(path());
  EXPECT_EQ(mistral.num_key_value_heads, 8u);
  EXPECT_EQ(mistral.sliding_window, 4096u);
  EXPECT_EQ(mistral.max_window_layers, 0u);
  put("config.json", llama_config(R"(, "model_type": "mistral", "sliding_window": null)"));
  EXPECT_EQ(read_llama_config(path()).sliding_window, 0u);

  const std::string qwen2 = R"(, "model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 16)";
  put("config.json", llama_config(qwen2));
  EXPECT_EQ(read_llama_config(path()).sliding_window, 0u) << "use_sliding_window is absent";
  EXPECT_TRUE(read_llama_config(path()).qkv_bias);
  EXPECT_FALSE(read_llama_config(path()).o_bias);
  put("config.json", llama_config(qwen2 + R"(, "use_sliding_window": true, "max_window_layers": 1)"));
  EXPECT_EQ(read_llama_config(path()).sliding_window, 16u);
  EXPECT_EQ(read_llama_config(path()).max_window_layers, 1u);
  const std::string windows =
      qwen2 + R"(, "use_sliding_window": true, "max_window_layers": 1, "layer_types": )";
  put("config.json", llama_config(windows + R"(["full_attention", "sliding_attention"])"));
  EXPECT_EQ(read_llama_config(path()).max_window_layers, 1u);
  put("config.json", llama_config(windows + R"(["sliding_attention", "full_attention"])"));
  expect_parts(error_of([&] { read_llama_config(path()); }).what(),
               {"layer_types: must be [\"full_attention\""});
}

TEST_F(HuggingFaceConfig, BothSpellingsOfRotaryScalingAreOne) {
  const std::string llama3 = R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, )"
                             R"("high_freq_factor": 4.0, "original_max_position_embeddings": 512)";
  put("old.json",
      llama_config(R"(, "model_type": "llama", "rope_theta": 500000, "rope_scaling": )" + llama3 + "}"));
  put("new.json", llama_config(R"(, "model_type": "llama", "rope_parameters": )" + llama3 +
                               R"(, "rope_theta": 500000})"));
  const LlamaConfig old = read_llama_config(path("old.json"));
  EXPECT_EQ(old.rope.scaling, ops::RotaryOptions::Scaling::llama3);
  EXPECT_EQ(old.rope.theta, 500000);
  EXPECT_EQ(old.rope.original_max_position_embeddings, 512u);
  EXPECT_EQ(to_json(old), to_json(read_llama_config(path("new.json"))));
  put("again.json", to_json(old));
  EXPECT_EQ(to_json(read_llama_config(path("again.json"))), to_json(old));
}

TEST_F(HuggingFaceConfig, RopeScalingAndRopeParametersAreNamesOfOneObject) {
  const auto written = [&](const std::string& more) {
    put("config.json", llama_config(R"(, "model_type": "llama")" + more));
    return to_json(read_llama_config(path()));
  };
  const std::string theta = R"(, "rope_theta": 500000)", plain = R"({"rope_type": "default", )",
                    linear = R"({"rope_type": "linear", "factor": 4)";
  const std::string of_theta = written(theta),
                    scaled = written(theta + R"(, "rope_scaling": )" + linear + "}");
  EXPECT_NE(of_theta, scaled);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const std::string key = concat(R"(, ")", name, R"(": )");
    EXPECT_EQ(written(key + plain + R"("rope_theta": 500000})"), of_theta) << name;
    EXPECT_EQ(written(key + R"({"rope_theta": 500000})" + theta), of_theta) << name;
    EXPECT_EQ(written(key + linear + R"(, "rope_theta": 500000})"), scaled) << name;
    EXPECT_EQ(written(key + R"({"type": "linear", "factor": 4, "rope_theta": 500000})"), scaled) << name;
    EXPECT_EQ(written(key + "{}" + theta), of_theta) << name;
    EXPECT_EQ(written(key + "null" + theta), of_theta) << name;
  }
  const std::string beside = R"(, "rope_parameters": )" + plain + R"("rope_theta": 500000})";
  EXPECT_EQ(written(beside + theta + R"(, "rope_scaling": )" + linear + "}"), scaled)
      << "by hand, beside what transformers 5 writes";
  EXPECT_EQ(written(beside + R"(, "rope_scaling": )" + linear + R"(, "rope_theta": 500000})"), scaled);
  EXPECT_EQ(written(beside + R"(, "rope_scaling": {})"), of_theta);
}

TEST_F(HuggingFaceConfig, ContradictionsOfRotaryEmbeddingAreRefusedByBothKeys) {
  const auto refused = [&](const std::string& more, std::initializer_list<std::string> parts) {
    put("wrong.json", more);
    expect_parts(error_of([&] { language_model_from_config(path("wrong.json")); }).what(), parts);
  };
  const auto llama = [](const std::string& more) {
    return llama_config(R"(, "model_type": "llama")" + more);
  };
  refused(llama(R"(, "rope_theta": 20000, "rope_scaling": {"rope_theta": 30000})"),
          {"wrong.json: rope_theta: is 20000", "rope_scaling.rope_theta is 30000"});
  refused(llama(R"(, "rope_parameters": {"rope_theta": 20000}, "rope_scaling": {"rope_theta": 30000})"),
          {"rope_parameters.rope_theta: is 20000", "rope_scaling.rope_theta is 30000"});
  refused(
      llama(R"(, "rope_parameters": {"rope_theta": 20000}, "rope_scaling": {"type": "linear", "factor": 2})"),
      {"rope_parameters.rope_theta: is 20000", "without rope_scaling.rope_theta it is 10000"});
  refused(llama(R"(, "rope_parameters": {"type": "linear", "factor": 3}, )"
                R"("rope_scaling": {"type": "linear", "factor": 2})"),
          {"rope_scaling: is ", "rope_parameters {"});
  refused(llama(R"(, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2})"),
          {"rope_scaling.type: is \"linear\"", "rope_scaling.rope_type \"dynamic\""});
  refused(llama(R"(, "rope_parameters": {"full_attention": {"rope_theta": 20000}})"),
          {"rope_parameters.full_attention: ", "all layers"});
  refused(neox_config(R"(, "rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25})"),
          {"rotary_pct: is 0.5", "rope_parameters.partial_rotary_factor is 0.25"});
  refused(neox_config(R"(, "rotary_emb_base": 500, "rope_theta": 400)"),
          {"rope_theta: is 400", "rotary_emb_base is 500"});
}

TEST_F(HuggingFaceConfig, VariantsOfALlamaAreRefusedByTheirKey) {
  const auto refused = [&](const std::string& more, std::initializer_list<std::string> parts) {
    put("wrong.json", llama_config(R"(, "model_type": "llama")" + more));
    expect_parts(error_of([&] { language_model_from_config(path("wrong.json")); }).what(), parts);
  };
  refused(R"(, "hidden_act": "gelu")", {"wrong.json: hidden_act: ", "silu"});
  refused(R"(, "rope_scaling": {"rope_type": "yarn", "factor": 2})", {"rope_scaling.rope_type: ", "yarn"});
  refused(R"(, "rope_scaling": {"rope_type": "linear"})", {"rope_scaling.factor: missing"});
  refused(R"(, "rope_scaling": {"rope_type": "llama3", "factor": 2})",
          {"rope_scaling.low_freq_factor: missing"});
  refused(R"(, "original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "llama3", "factor": 2, )"
          R"("low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32})",
          {"original_max_position_embeddings: is 8", "32; give one value"});
  refused(R"(, "quantization_config": {"bits": 4})", {"quantization_config: "});
  refused(R"(, "num_key_value_heads": 3)", {"num_attention_heads is 8", "num_key_value_heads 3"});
  refused(R"(, "head_dim": 5)", {"head_dim is 5", "even"});
  refused(R"(, "partial_rotary_factor": 0.5)", {"partial_rotary_factor: "});
  refused(R"(, "rope_parameters": {"partial_rotary_factor": 0.5})",
          {"rope_parameters.partial_rotary_factor: "});
  put("other.json", R"({"model_type": "bert"})");
  expect_parts(error_of([&] { language_model_from_config(path("other.json")); }).what(),
               {"other.json: model_type: ", "\"gpt2\"", "\"qwen2\"", "bert"});
}

TEST_F(HuggingFaceConfig, BothSpellingsOfAGptNeoxAreOneAndAbsentKeysHaveHuggingFacesDefaults) {
  const auto written = [&](const std::string& more) {
    put("config.json", neox_config(more));
    return config_json(*language_model_from_config(path()));
  };
  const std::string old = written(
      R"(, "rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": {"type": "linear", "factor": 2})");
  EXPECT_EQ(written(R"(, "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 500, )"
                    R"("partial_rotary_factor": 0.5})"),
            old);
  EXPECT_NE(written(""), old);
  EXPECT_EQ(written(R"(, "max_position_embeddings": 2048, "hidden_act": "gelu", "layer_norm_eps": 1e-5, )"
                    R"("rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": true, )"
                    R"("attention_bias": true, "tie_word_embeddings": false, "hidden_dropout": 0, )"
                    R"("bos_token_id": 0, "eos_token_id": 2)"),
            written(""));
}

TEST_F(HuggingFaceConfig, VariantsOfAGptNeoxAreRefusedByTheirKey) {
  const auto refused = [&](const std::string& more, std::initializer_list<std::string> parts) {
    put("wrong.json", neox_config(more));
    expect_parts(error_of([&] { language_model_from_config(path("wrong.json")); }).what(), parts);
  };
  refused(R"(, "hidden_act": "gelu_10")", {"wrong.json: hidden_act is \"gelu_10\"", "gelu_new"});
  refused(R"(, "rotary_pct": 0.2)", {"rotary_pct is 0.2, which is 3 of the 16 channels", "even"});
  refused(R"(, "rope_scaling": {"rope_type": "yarn", "factor": 2})", {"rope_scaling.rope_type: ", "yarn"});
  refused(R"(, "quantization_config": {"bits": 4})", {"quantization_config: "});
  refused(R"(, "attention_dropout": 1)", {"attention_dropout is 1", "expected 0 <= attention_dropout < 1"});
}

TEST_F(HuggingFaceConfig, MasksAndFrequenciesInOldFilesOfAGptNeoxAreNoWeights) {
  put("config.json", neox_config(""));
  const auto model = language_model_from_config(path());
  Tensors tensors;
  for (const Parameter* p : model->parameters()) tensors.push_back({p->name, extents(p->shape), DType::f32});
  const std::string attention = "gpt_neox.layers.0.attention.";
  tensors.push_back({attention + "bias", {1, 1, 4, 4}, DType::f32});
  tensors.push_back({attention + "masked_bias", {}, DType::f32});
  tensors.push_back({attention + "rotary_emb.inv_freq", {2}, DType::f32});
  put_tensors("model.safetensors", tensors);
  EXPECT_EQ(PretrainedWeights(path(), *model).tensors(), model->parameters().size());
  tensors.back().name = attention + "query_key.bias";
  put_tensors("model.safetensors", tensors);
  EXPECT_THROW(PretrainedWeights(path(), *model), Error);
}

/// tests/data/llama_tiny/open_with_transformers.py has opened such files without a warning.
TEST_F(HuggingFaceConfig, FilesAreThoseThatTransformersOpened) {
  const std::string file = RZ_SOURCE_DIR "/tests/data/llama_tiny/opened.json";
  const nlohmann::json all = parse_json(read_text_file(file), file, JsonDialect::strict);
  EXPECT_GE(all.size(), 12u);
  for (const auto& [name, opened] : all.items()) {
    put("config.json", opened.at("config").dump());
    const auto model = language_model_from_config(path());
    EXPECT_EQ(nlohmann::json::parse(config_json(*model)), opened.at("config")) << name;
    nlohmann::json tensors;
    for (const Parameter* p : model->parameters()) tensors[p->name] = extents(p->shape);
    EXPECT_EQ(tensors, opened.at("tensors")) << name;
  }
}

TEST_F(HuggingFaceConfig, FrequenciesInOldFilesOfALlamaAreNoWeights) {
  put("config.json", llama_config(R"(, "model_type": "llama", "tie_word_embeddings": true)"));
  const auto model = language_model_from_config(path());
  Tensors tensors;
  for (const Parameter* p : model->parameters()) tensors.push_back({p->name, extents(p->shape), DType::f32});
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {2}, DType::f32});
  put_tensors("model.safetensors", tensors);
  EXPECT_EQ(PretrainedWeights(path(), *model).tensors(), model->parameters().size());
  tensors.back().name = "model.layers.0.self_attn.other";
  put_tensors("model.safetensors", tensors);
  EXPECT_THROW(PretrainedWeights(path(), *model), Error);
}

}  // namespace
}  // namespace rz
