// Adapters of PEFT merged into files, and the adapters of checkpoints: by the library and by the programs.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/json.h"
#include "tests/support/program.h"
#include "tests/support/torch_writer.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Shape64 = std::vector<std::uint64_t>;
using Values = std::map<std::string, std::vector<float>>;

constexpr std::uint64_t rows = 6, width = 4, r = 2;

struct Outcome {
  int status;
  std::string out, err;
};

Outcome run_program(std::vector<std::string> words) {
  words[0] = test::built(words[0]);
  test::Program p(words);
  const int status = p.wait();
  return {status, p.out(), p.err()};
}

/// A base of two layers, and an adapter of one update in each, with lora_alpha 3.
class AdapterFiles : public testing::Test {
 protected:
  AdapterFiles() {
    for (const int l : {0, 1}) {
      const std::string layer = concat("model.layers.", l, ".");
      base_[layer + "self_attn.q_proj.weight"] = {width, width};
      base_[layer + "input_layernorm.weight"] = {width};
      adapter_[concat(prefix_, layer, "self_attn.q_proj.lora_A.weight")] = {r, width};
      adapter_[concat(prefix_, layer, "self_attn.q_proj.lora_B.weight")] = {width, r};
    }
    base_["model.embed_tokens.weight"] = {rows, width};
    base_["model.norm.weight"] = {width};
    base_["lm_head.weight"] = {rows, width};
    model_config_ = {{"model_type", "llama"}, {"tie_word_embeddings", false}};
    adapter_config_ = {{"peft_type", "LORA"}, {"r", r}, {"lora_alpha", 3}, {"target_modules", {"q_proj"}}};
  }

  void tie() {
    base_.erase("lm_head.weight");
    model_config_["tie_word_embeddings"] = true;
  }
  /// Names a tensor of the adapter that is one of the model.
  void add_whole(const std::string& name, const Shape64& shape) { adapter_[concat(prefix_, name)] = shape; }
  void save_module(const std::string& name) { adapter_config_["modules_to_save"].push_back(name); }

  /// Elements of a tensor by its name, so that two are never equal, unless `equal_` has a name for both.
  std::vector<float> values(const std::string& name, const Shape64& shape) const {
    const auto found = equal_.find(name);
    const std::string& of = found == equal_.end() ? name : found->second;
    std::uint64_t count = 1;
    for (const std::uint64_t n : shape) count *= n;
    std::vector<float> all(count);
    for (std::size_t i = 0; i < count; ++i)
      all[i] = static_cast<float>((std::hash<std::string>{}(of) / 7 + 31 * i * i) % 997) / 100 - 5;
    if (name == nan_) all[3] = std::nanf("");
    return all;
  }
  void write(const std::string& path, const std::map<std::string, Shape64>& tensors) const {
    std::vector<SafetensorsSpec> specs;
    for (const auto& [name, shape] : tensors) specs.push_back({name, shape});
    SafetensorsWriter file(path, specs);
    for (const auto& [name, shape] : tensors) file.write(std::span<const float>(values(name, shape)));
    file.finish();
  }
  void put(const std::string& path, const std::string& text) const { std::ofstream(path) << text; }
  void write_all() const {
    for (const char* folder : {"base", "adapter"}) {
      fs::remove_all(folder_ / folder);
      fs::create_directories(folder_ / folder);
    }
    write(folder_ / "base/model.safetensors", base_);
    write(folder_ / "adapter/adapter_model.safetensors", adapter_);
    if (!model_config_.is_null()) put(folder_ / "base/config.json", model_config_.dump());
    put(folder_ / "adapter/adapter_config.json", adapter_config_.dump());
  }

  /// What `checkpoint merge base merged --adapter adapter` writes.
  Values merged() const {
    write_all();
    fs::remove_all(folder_ / "merged");
    const Outcome o = run_program(
        {"checkpoint", "merge", folder_ / "base", folder_ / "merged", "--adapter", folder_ / "adapter"});
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? test::values_in(folder_ / "merged") : Values();
  }
  bool is_tied() const {
    const std::string path = folder_ / "merged/config.json";
    return parse_json(read_text_file(path), path, JsonDialect::strict).at("tie_word_embeddings");
  }
  void expect_refused(const std::string& words) const {
    write_all();
    test::expect_refusal(
        "checkpoint", {"merge", folder_ / "base", folder_ / "out", "--adapter", folder_ / "adapter"}, words);
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
  std::vector<float> of_base(const std::string& name) const { return values(name, base_.at(name)); }
  std::vector<float> of_adapter(const std::string& name) const {
    return values(prefix_ + name, adapter_.at(prefix_ + name));
  }
  /// W + 3/r · B · A in double; `in_out`: of a W that is [in, out].
  void expect_merged(const Values& found, const std::string& layer, bool in_out = false) const {
    const auto w = of_base(layer + ".weight"), a = of_adapter(layer + ".lora_A.weight"),
               b = of_adapter(layer + ".lora_B.weight");
    for (std::size_t i = 0; i < width; ++i)
      for (std::size_t j = 0; j < width; ++j) {
        const std::size_t at = in_out ? j * width + i : i * width + j;
        double sum = w[at];
        for (std::size_t k = 0; k < r; ++k) sum += 3.0 / r * double{b[i * r + k]} * double{a[k * width + j]};
        EXPECT_FLOAT_EQ(found.at(layer + ".weight")[at], static_cast<float>(sum)) << layer << i << j;
      }
  }

  const std::string prefix_ = "base_model.model.";
  test::Folder folder_;
  std::map<std::string, Shape64> base_, adapter_;
  std::map<std::string, std::string> equal_;
  std::string nan_;  // a tensor with a value that is not finite
  json model_config_, adapter_config_;
};

TEST_F(AdapterFiles, UpdatesAndWholeTensorsAreMerged) {
  save_module("norm");  // any ending of a name, as in PEFT
  add_whole("model.norm.weight", {width});
  add_whole("model.layers.0.input_layernorm.weight", {width});
  expect_refused("missing: model.layers.1.input_layernorm.weight of");
  add_whole("model.layers.1.input_layernorm.weight", {width});
  const Values found = merged();
  ASSERT_EQ(found.size(), base_.size());
  for (const int l : {0, 1}) expect_merged(found, concat("model.layers.", l, ".self_attn.q_proj"));
  EXPECT_EQ(found.at("model.norm.weight"), of_adapter("model.norm.weight"));
  EXPECT_EQ(found.at("model.layers.1.input_layernorm.weight"),
            of_adapter("model.layers.1.input_layernorm.weight"));
  EXPECT_EQ(found.at("model.embed_tokens.weight"), of_base("model.embed_tokens.weight"));
  EXPECT_EQ(found.at("lm_head.weight"), of_base("lm_head.weight"));
  EXPECT_FALSE(is_tied());
}

TEST_F(AdapterFiles, AnAdapterOfAnotherModelIsRefusedByName) {
  add_whole("model.embed_tokens.weight", {rows + 2, width});
  expect_refused("model.embed_tokens.weight is [8, 4], and model.embed_tokens.weight of");
  adapter_.erase(prefix_ + "model.embed_tokens.weight");
  add_whole("model.embed_positions.weight", {rows, width});
  expect_refused("has no tensor model.embed_positions.weight");
  adapter_.erase(prefix_ + "model.embed_positions.weight");
  add_whole("model.embed_tokens.lora_embedding_A", {r, rows});
  expect_refused("model.embed_tokens.lora_embedding_A: not supported in this build yet");
}

TEST_F(AdapterFiles, AWeightIsChangedByOneLayer) {
  base_.clear(), adapter_.clear();
  base_["layers.0.q_proj.weight"] = {width, width};
  for (const char* tower : {"vision.", "language."}) {
    add_whole(concat(tower, "layers.0.q_proj.lora_A.weight"), {r, width});
    add_whole(concat(tower, "layers.0.q_proj.lora_B.weight"), {width, r});
  }
  expect_refused("both change layers.0.q_proj.weight");
}

TEST_F(AdapterFiles, EachUpdateHasAAndB) {
  const std::string layer = prefix_ + "model.layers.1.self_attn.q_proj";
  adapter_.erase(layer + ".lora_B.weight");
  expect_refused("missing: " + layer + ".lora_B.weight");
  adapter_[layer + ".lora_B.weight"] = {width, r};
  adapter_.erase(layer + ".lora_A.weight");
  expect_refused("missing: " + layer + ".lora_A.weight");
}

TEST_F(AdapterFiles, ALayerThatTheAdapterLacksIsNamed) {
  for (const char* factor : {"A", "B"})
    adapter_.erase(concat(prefix_, "model.layers.1.self_attn.q_proj.lora_", factor, ".weight"));
  for (const json& targets : {json{"q_proj"}, json("all-linear"), json(R"(.*\.q_proj)")}) {
    adapter_config_["target_modules"] = targets;
    expect_refused("missing: A and B of model.layers.1.self_attn.q_proj");
  }
  // Python's own, of which the tensors alone decide; and one that leaves the layer out.
  for (const char* expression : {R"((?i).*\.q_proj)", R"(.*\.0\..*q_proj)"}) {
    adapter_config_["target_modules"] = expression;
    expect_merged(merged(), "model.layers.0.self_attn.q_proj");
  }
  // The base's names lack a part that those of target_modules have.
  std::map<std::string, Shape64> shorter;
  for (const auto& [name, shape] : base_) shorter[name.starts_with("model.") ? name.substr(6) : name] = shape;
  base_ = shorter;
  adapter_config_["target_modules"] = R"(model\.layers\..*q_proj)";
  expect_refused("missing: A and B of layers.1.self_attn.q_proj");
}

TEST_F(AdapterFiles, ALayerThatTargetModulesDoesNotNameIsRefused) {  // PEFT leaves it out
  for (const json& targets : {json{"k_proj"}, json(R"(.*\.0\..*q_proj)")}) {
    adapter_config_["target_modules"] = targets;
    expect_refused("is of a layer that target_modules of adapter_config.json does not name");
  }
}

TEST_F(AdapterFiles, ValuesThatAreNotFiniteAreRefused) {
  const std::string b = prefix_ + "model.layers.1.self_attn.q_proj.lora_B.weight";
  nan_ = b;
  expect_refused(concat(b, "[3] is nan; give an adapter from before its run diverged"));
  save_module("norm");
  for (const char* name : {"model.norm.weight", "model.layers.0.input_layernorm.weight",
                           "model.layers.1.input_layernorm.weight"})
    add_whole(name, {width});
  nan_ = prefix_ + "model.norm.weight";
  expect_refused("model.norm.weight[3] is nan");
}

TEST_F(AdapterFiles, AHeadWithAnUpdateIsRefusedByName) {
  adapter_config_["target_modules"] = {"q_proj", "lm_head"};
  add_whole("lm_head.base_layer.weight", {rows, width});
  add_whole("lm_head.lora_A.weight", {r, width});
  add_whole("lm_head.lora_B.weight", {rows, r});
  expect_refused(
      "lm_head.base_layer.weight: not supported in this build yet: the weight of a layer that has an "
      "update");
}

TEST_F(AdapterFiles, NamesThatPeftDoesNotReadAreRefused) {
  const std::string layer = "model.layers.0.self_attn.q_proj";
  add_whole(concat(layer, ".weight"), {rows, width});
  expect_refused(concat(layer, ".weight is of a layer that has an update"));
  adapter_.erase(concat(prefix_, layer, ".weight"));
  add_whole(concat(layer, ".lora_A.other.weight"), {r, width});
  expect_refused(concat(layer, ".lora_A.other.weight: no name of PEFT's files"));
}

/// By the kind of the layers, as PEFT corrects fan_in_fan_out: Conv1D has [in, out] and always a bias.
TEST_F(AdapterFiles, ASquareWeightIsTurnedAsTheLayersBesideIt) {
  adapter_config_["fan_in_fan_out"] = true;
  expect_merged(merged(), "model.layers.0.self_attn.q_proj");  // no bias: Linear
  for (const int l : {0, 1}) {
    const std::string layer = concat("model.layers.", l, ".");
    base_[layer + "self_attn.q_proj.bias"] = {width};
    base_[layer + "mlp.weight"] = {2 * width, width};
    base_[layer + "mlp.bias"] = {2 * width};
  }
  expect_merged(merged(), "model.layers.1.self_attn.q_proj");
  adapter_config_["fan_in_fan_out"] = false;
  for (const int l : {0, 1}) base_[concat("model.layers.", l, ".mlp.weight")] = {width, 2 * width};
  expect_merged(merged(), "model.layers.1.self_attn.q_proj", true);
  for (const int l : {0, 1}) base_.erase(concat("model.layers.", l, ".mlp.bias"));
  expect_merged(merged(), "model.layers.0.self_attn.q_proj");  // none tells: as the adapter says
}

TEST_F(AdapterFiles, AnAdapterBesideTheWeightsIsNamedAndNotCopied) {
  write_all();
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"})
    fs::copy(folder_ / (std::string("adapter/") + file), folder_ / (std::string("base/") + file));
  const Outcome plain = run_program({"checkpoint", "merge", folder_ / "base", folder_ / "plain"});
  EXPECT_EQ(plain.status, 0) << plain.err;
  EXPECT_NE(plain.err.find("has an adapter beside its weights (adapter_config.json), which is not applied"),
            std::string::npos)
      << plain.err;
  EXPECT_EQ(test::values_in(folder_ / "plain").at("lm_head.weight"), of_base("lm_head.weight"));
  const Outcome both =
      run_program({"checkpoint", "merge", folder_ / "base", folder_ / "both", "--adapter", folder_ / "base"});
  EXPECT_EQ(both.status, 0) << both.err;
  EXPECT_EQ(both.err.find("warning"), std::string::npos) << both.err;
  for (const char* out : {"plain/adapter_config.json", "both/adapter_config.json"})
    EXPECT_FALSE(fs::exists(folder_ / out)) << out;
}

/// As DeepSpeed saves the module of PEFT: without the options of its adapter.
TEST_F(AdapterFiles, AModelOfPeftIsRefused) {
  base_.clear();
  for (const char* name : {"base_layer", "lora_A.default", "lora_B.default"})
    base_[concat("base_model.model.model.layers.0.self_attn.q_proj.", name, ".weight")] = {width, width};
  write_all();
  for (const char* command : {"merge", "adapter"})
    test::expect_refusal("checkpoint", {command, folder_ / "base", folder_ / "out"},
                         "is of a model with an adapter of PEFT, whose options are not in the file");
}

// ---- the table of embeddings and the head

TEST_F(AdapterFiles, AHeadThatWasTheTableGetsItsOwn) {
  tie();
  save_module("embed_tokens");
  add_whole("model.embed_tokens.weight", {rows, width});
  const Values found = merged();
  EXPECT_EQ(found.at("model.embed_tokens.weight"), of_adapter("model.embed_tokens.weight"));
  EXPECT_EQ(found.at("lm_head.weight"), of_base("model.embed_tokens.weight"));
  EXPECT_FALSE(is_tied());
  // Nothing says that a head which is not beside the table is another one.
  model_config_ = json();
  expect_refused("tie_word_embeddings false), and there is none: give --config FILE");
}

TEST_F(AdapterFiles, AHeadOfTheAdapterIsTheModels) {
  tie();
  save_module("lm_head");
  add_whole("lm_head.weight", {rows, width});
  Values found = merged();
  EXPECT_EQ(found.at("model.embed_tokens.weight"), of_base("model.embed_tokens.weight"));
  EXPECT_EQ(found.at("lm_head.weight"), of_adapter("lm_head.weight"));
  EXPECT_FALSE(is_tied());
  save_module("embed_tokens");
  add_whole("model.embed_tokens.weight", {rows, width});
  found = merged();
  EXPECT_EQ(found.at("model.embed_tokens.weight"), of_adapter("model.embed_tokens.weight"));
  EXPECT_EQ(found.at("lm_head.weight"), of_adapter("lm_head.weight"));
  add_whole("lm_head.weight", {rows + 1, width});
  expect_refused("lm_head.weight is [7, 4], and model.embed_tokens.weight of");
}

/// As PEFT's save_embedding_layers writes them, which loads them into the tensor that both are.
TEST_F(AdapterFiles, ATableThatIsNoCopyStaysTied) {
  tie();
  add_whole("model.embed_tokens.weight", {rows, width});
  add_whole("lm_head.weight", {rows, width});
  expect_refused("lm_head.weight is not the adapter's model.embed_tokens.weight");
  equal_[prefix_ + "lm_head.weight"] = prefix_ + "model.embed_tokens.weight";
  const Values found = merged();
  EXPECT_EQ(found.at("model.embed_tokens.weight"), of_adapter("model.embed_tokens.weight"));
  EXPECT_FALSE(found.contains("lm_head.weight"));
  EXPECT_TRUE(is_tied());
}

TEST_F(AdapterFiles, TwoTensorsOfOneInTheBaseAreTwo) {  // the base's file has both, and its model ties them
  model_config_["tie_word_embeddings"] = true;
  save_module("lm_head");
  add_whole("lm_head.weight", {rows, width});
  EXPECT_EQ(merged().at("lm_head.weight"), of_adapter("lm_head.weight"));
  EXPECT_FALSE(is_tied());
}

TEST_F(AdapterFiles, AFileOfTorchIsReadToo) {
  write_all();
  test::TorchWriter w;
  test::pickle::Pairs pairs;
  for (const auto& [name, shape] : adapter_)
    pairs.push_back({test::pickle::text(name), w.tensor(values(name, shape), shape)});
  w.write(folder_ / "adapter/adapter_model.bin", test::pickle::dict(pairs));
  fs::remove(folder_ / "adapter/adapter_model.safetensors");
  const Outcome o = run_program(
      {"checkpoint", "merge", folder_ / "base", folder_ / "out", "--adapter", folder_ / "adapter"});
  EXPECT_EQ(o.status, 0) << o.err;
  expect_merged(test::values_in(folder_ / "out"), "model.layers.1.self_attn.q_proj");
  fs::remove(folder_ / "adapter/adapter_model.bin");
  test::expect_refusal("checkpoint",
                       {"merge", folder_ / "base", folder_ / "none", "--adapter", folder_ / "adapter"},
                       "holds neither adapter_model.safetensors nor adapter_model.bin");
}

// ---- checkpoints

/// What train_lm has trained with LoRA.
class AdapterOfARun : public testing::Test {
 protected:
  AdapterOfARun() {
    put("model.json", R"({"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256, )"
                      R"("initializer_range": 0.3, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
    put("ds.json", R"({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
                       "ringzero": {"lora": {"target_modules": "all-linear", "r": 2, "lora_alpha": 5,
                                             "modules_to_save": ["ln_f"]}}})");
    put("text.txt",
        "some text to train on, again and again. some text to train on, again and again. "
        "some text to train on, again and again. some text to train on, again and again. ");
  }
  void put(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  void train(std::vector<std::string> more, const char* steps = "3") const {
    std::vector<std::string> words{"train_lm",
                                   "--model",
                                   folder_ / "model.json",
                                   "--config",
                                   folder_ / "ds.json",
                                   "--data",
                                   folder_ / "text.txt",
                                   "--steps",
                                   steps,
                                   "--seq-len",
                                   "8",
                                   "--save-steps",
                                   "3",
                                   "--output-dir",
                                   folder_ / "run",
                                   "--threads",
                                   "1"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome o = run_program(words);
    ASSERT_EQ(o.status, 0) << o.out << o.err;
  }
  Outcome checkpoint(const char* command, const char* out) const {
    return run_program({"checkpoint", command, folder_ / "run", folder_ / out});
  }
  std::string text_of(const std::string& model, std::vector<std::string> more = {}) const {
    std::vector<std::string> words{"generate", "--model",       model, "--prompt",
                                   "some ",    "--temperature", "0",   "--max-new-tokens",
                                   "10",       "--threads",     "1"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome o = run_program(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.out;
  }
  std::string text_file(const std::string& name) const { return read_text_file(folder_ / name); }

  test::Folder folder_;
};

TEST_F(AdapterOfARun, MergeAndAdapterWriteWhatTheRunSaves) {
  train({"--save", folder_ / "saved", "--save-adapter", folder_ / "adapter"});
  const Outcome merge = checkpoint("merge", "merged"), adapter = checkpoint("adapter", "taken");
  EXPECT_EQ(merge.status, 0) << merge.err;
  EXPECT_EQ(adapter.status, 0) << adapter.err;
  const Values saved = test::values_in(folder_ / "saved");
  EXPECT_EQ(test::values_in(folder_ / "merged"), saved);
  EXPECT_EQ(test::values_in(folder_ / "taken/adapter_model.safetensors"),
            test::values_in(folder_ / "adapter/adapter_model.safetensors"));
  EXPECT_EQ(json::parse(text_file("taken/adapter_config.json")),
            json::parse(text_file("adapter/adapter_config.json")));
  EXPECT_FALSE(fs::exists(folder_ / "merged/adapter_config.json"));
  const Outcome split =
      run_program({"checkpoint", "split", folder_ / "run", folder_ / "parts", "--max-shard-size", "8KB"});
  EXPECT_EQ(split.status, 0) << split.err;
  EXPECT_EQ(test::values_in(folder_ / "parts"), saved);
}

TEST_F(AdapterOfARun, GenerateAndInitReadTheMergedModel) {
  train({"--save", folder_ / "saved"});
  const std::string text = text_of(folder_ / "saved");
  EXPECT_EQ(text_of(folder_ / "run"), text);
  EXPECT_EQ(checkpoint("adapter", "taken").status, 0);
  // Another adapter is not added to the run's own.
  test::expect_refusal("generate",
                       {"--model", folder_ / "run", "--prompt", "some", "--adapter", folder_ / "taken"},
                       "has an adapter of its own");
  test::expect_refusal("checkpoint",
                       {"merge", folder_ / "run", folder_ / "out", "--adapter", folder_ / "taken"},
                       "has an adapter of its own");
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  const auto sampled = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"train_lm",
                                   "--model",
                                   folder_ / "model.json",
                                   "--init",
                                   folder_ / "run",
                                   "--sample",
                                   "some",
                                   "--save",
                                   folder_ / "again",
                                   "--threads",
                                   "1"};
    words.insert(words.end(), more.begin(), more.end());
    return run_program(words);
  };
  const Outcome plain = sampled({});
  EXPECT_EQ(plain.status, 0) << plain.err;
  EXPECT_EQ(test::values_in(folder_ / "again"), test::values_in(folder_ / "saved"));
  const Outcome two = sampled({"--adapter", folder_ / "taken"});
  EXPECT_EQ(two.status, 2);
  EXPECT_NE(two.err.find("has an adapter of its own"), std::string::npos) << two.err;
  const Outcome other =
      sampled({"--lora-target-modules", "all-linear", "--lora-r", "2", "--lora-alpha", "6"});
  EXPECT_EQ(other.status, 2);
  EXPECT_NE(other.err.find("lora_alpha is 5, and of the model 6"), std::string::npos) << other.err;
}

TEST_F(AdapterOfARun, ASavedModelHasItsFolderForItself) {
  const auto sampled = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"--model",
                                   folder_ / "model.json",
                                   "--data",
                                   folder_ / "text.txt",
                                   "--steps",
                                   "1",
                                   "--seq-len",
                                   "8",
                                   "--per-device-train-batch-size",
                                   "1",
                                   "--learning-rate",
                                   "1e-3",
                                   "--threads",
                                   "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::vector<std::string> lora{"--lora-target-modules", "all-linear", "--lora-r", "2"};
  std::vector<std::string> both =
      sampled({"--save", folder_ / "model", "--save-adapter", folder_ / "./model"});
  both.insert(both.end(), lora.begin(), lora.end());
  test::expect_refusal("train_lm", both, "is the folder of --save, too");
  EXPECT_FALSE(fs::exists(folder_ / "model"));
  fs::create_directories(folder_ / "model");
  put("model/adapter_config.json", "{}");
  test::expect_refusal("train_lm", sampled({"--save", folder_ / "model"}),
                       "holds an adapter (adapter_config.json)");
  fs::remove(folder_ / "model/adapter_config.json");
  // What an earlier model had and this one has not is no part of it.
  for (const char* file :
       {"generation_config.json", "special_tokens_map.json", "chat_template.jinja", "notes.json"})
    put(concat("model/", file), "{}");
  std::vector<std::string> words = sampled({"--save", folder_ / "model"});
  words.insert(words.begin(), "train_lm");
  const Outcome saved = run_program(words);
  EXPECT_EQ(saved.status, 0) << saved.err;
  for (const char* file : {"generation_config.json", "special_tokens_map.json", "chat_template.jinja"})
    EXPECT_FALSE(fs::exists(folder_ / (std::string("model/") + file))) << file;
  EXPECT_TRUE(fs::exists(folder_ / "model/notes.json"));
  EXPECT_TRUE(fs::exists(folder_ / "model/tokenizer.json"));
  // Those of --init are not lost.
  put("model/generation_config.json", "{}");
  test::expect_refusal("train_lm", sampled({"--init", folder_ / "model", "--save", folder_ / "model"}),
                       "is the folder of --init");
  // An adapter beside weights is named where it is not applied.
  put("model/adapter_config.json", R"({"peft_type": "LORA", "r": 2, "target_modules": "c_attn"})");
  words = sampled({"--init", folder_ / "model"});
  words.insert(words.begin(), "train_lm");
  const Outcome beside = run_program(words);
  EXPECT_NE(beside.err.find("has an adapter beside its weights"), std::string::npos) << beside.err;
  test::expect_refusal("train_lm", sampled({"--init", folder_ / "model", "--adapter", folder_ / "model"}),
                       "target_modules: 'c_attn' is a regular expression of whole names");
}

TEST_F(AdapterOfARun, WithoutFrozenWeightsTheAdapterIsWhatItHas) {
  json config = json::parse(text_file("ds.json"));
  config["ringzero"]["checkpoint"] = {{"exclude_frozen_parameters", true}};
  put("ds.json", config.dump());
  train({"--save-adapter", folder_ / "adapter"});
  const Outcome merge = checkpoint("merge", "merged");
  EXPECT_EQ(merge.status, 2);
  EXPECT_NE(merge.err.find("has no frozen weights; write its adapter with `checkpoint adapter "),
            std::string::npos)
      << merge.err;
  EXPECT_FALSE(fs::exists(folder_ / "merged"));
  EXPECT_EQ(checkpoint("adapter", "taken").status, 0);
  EXPECT_EQ(test::values_in(folder_ / "taken/adapter_model.safetensors"),
            test::values_in(folder_ / "adapter/adapter_model.safetensors"));
}

/// PEFT's save_embedding_layers: what is not trained belongs to the adapter all the same, also of a run that
/// is resumed.
TEST_F(AdapterOfARun, WhatAnAdapterHasWholeStaysWithIt) {
  json config = json::parse(text_file("ds.json"));
  config["ringzero"]["checkpoint"] = {{"exclude_frozen_parameters", true}};
  put("ds.json", config.dump());
  train({"--save-adapter", folder_ / "first", "--save", folder_ / "base"});
  fs::remove_all(folder_ / "run");
  const std::string file = folder_ / "first/adapter_model.safetensors", table = "transformer.wte.weight";
  const TensorSource before = open_tensors(file);
  std::vector<SafetensorsSpec> specs;
  for (const TensorInfo& t : before.tensors()) specs.push_back({t.name, t.shape});
  specs.push_back({"base_model.model." + table, {256, 16}});
  Values values = test::values_in(file);
  for (std::size_t i = 0; i < 256 * 16; ++i)
    values["base_model.model." + table].push_back(static_cast<float>(i % 101) / 100);
  {
    fs::create_directories(folder_ / "more");
    SafetensorsWriter writer(folder_ / "more/adapter_model.safetensors", specs);
    for (const SafetensorsSpec& s : specs) writer.write(std::span<const float>(values.at(s.name)));
    writer.finish();
    fs::copy(folder_ / "first/adapter_config.json", folder_ / "more/adapter_config.json");
  }
  const std::vector<std::string> start{"--init",         folder_ / "base",   "--adapter", folder_ / "more",
                                       "--save-adapter", folder_ / "second", "--save",    folder_ / "saved"};
  const auto expect_table = [&](const std::string& adapter) {
    EXPECT_EQ(test::values_in(adapter).at("base_model.model." + table), values["base_model.model." + table]);
  };
  train(start);
  expect_table(folder_ / "second/adapter_model.safetensors");
  EXPECT_EQ(test::values_in(folder_ / "saved").at(table), values["base_model.model." + table]);
  std::vector<std::string> on = start;
  on.insert(on.end(), {"--resume", "true"});
  fs::remove_all(folder_ / "second");
  train(on, "6");
  expect_table(folder_ / "second/adapter_model.safetensors");
  EXPECT_EQ(checkpoint("adapter", "taken").status, 0);
  expect_table(folder_ / "taken/adapter_model.safetensors");
  // By every way in, the same model.
  const Outcome merge = run_program(
      {"checkpoint", "merge", folder_ / "base", folder_ / "merged", "--adapter", folder_ / "second"});
  EXPECT_EQ(merge.status, 0) << merge.err;
  EXPECT_EQ(test::values_in(folder_ / "merged"), test::values_in(folder_ / "saved"));
  EXPECT_EQ(text_of(folder_ / "base", {"--adapter", folder_ / "second"}), text_of(folder_ / "saved"));
}

TEST_F(AdapterOfARun, ACheckpointWithoutItsOptionsIsOneLine) {  // as earlier versions have saved them
  test::write_checkpoint(folder_ / "run/global_step3",
                         {{"model/fc.weight", {6, 5}, test::equal_ranges(30, 1)},
                          {"model/fc.lora_A.weight", {2, 5}, test::equal_ranges(10, 1)},
                          {"model/fc.lora_B.weight", {6, 2}, test::equal_ranges(12, 1)}},
                         1, R"({"steps":3})");
  put("run/latest", "global_step3");
  for (const char* command : {"merge", "adapter"})
    test::expect_refusal("checkpoint", {command, folder_ / "run", folder_ / "out"},
                         "has updates of LoRA and not their options, as earlier versions have saved it");
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  test::write_checkpoint(folder_ / "run/global_step3",
                         {{"model/fc.weight", {6, 5}, test::equal_ranges(30, 1)}}, 1, R"({"steps":3})");
  test::expect_refusal("checkpoint", {"adapter", folder_ / "run", folder_ / "out"}, "has no adapter");
}

}  // namespace
}  // namespace rz
