/// Weights in the format of Hugging Face: safetensors in one or several files, names, what is saved.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "autograd_lite/nn/init.h"
#include "comm/core/math.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/llama_config.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/io/json.h"
#include "sharding/strategy/strategy.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::expect_parts;
using test::values_in;

using Tensors = std::vector<SafetensorsSpec>;

using HuggingFace = test::HuggingFaceFolder;

// ---- names

/// wte, and a bias of a block.
struct Part : Module {
  Part() {
    register_parameter(wte, "transformer.wte.weight", {4, 2});
    register_parameter(bias, "transformer.h.0.attn.c_attn.bias", {6});
  }
  Parameter wte, bias;
};

std::vector<float> values(const PretrainedWeights& weights, const Parameter& p) {
  std::vector<float> all(p.count());
  weights.read(p, {0, p.count()}, all.data());
  return all;
}
std::vector<float> from(float first, std::size_t count) {
  std::vector<float> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}

TEST_F(HuggingFace, NamesMayLackThePrefixAndMasksAreIgnored) {
  put_tensors("model.safetensors", {{"h.0.attn.bias", {1, 1, 4, 4}},
                                    {"h.0.attn.c_attn.bias", {6}},
                                    {"wte.weight", {4, 2}},
                                    {"h.0.attn.masked_bias", {}}});
  Part model;
  const PretrainedWeights weights(path(), model);
  std::vector<float> slice(3);
  weights.read(model.bias, {2, 5}, slice.data());
  EXPECT_EQ(slice, (std::vector<float>{102, 103, 104}));
  weights.read(model.wte, {0, 3}, slice.data());
  EXPECT_EQ(slice, (std::vector<float>{200, 201, 202}));
  EXPECT_EQ(weights.tensors(), 2u);
}

TEST_F(HuggingFace, BiasesOfOtherLayersAreNoMasks) {
  struct Net : Module {
    Net() { register_parameter(weight, "attn.weight", {4, 2}); }
    Parameter weight;
  } net;
  for (const auto& shape : {std::vector<std::uint64_t>{4}, std::vector<std::uint64_t>{1, 1, 4, 4}}) {
    put_tensors("m.safetensors", {{"attn.weight", {4, 2}}, {"attn.bias", shape}});
    expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), net); }).what(),
                 {"not in the model: attn.bias"});
  }
  Part model;
  put_tensors("m.safetensors",
              {{"wte.weight", {4, 2}}, {"h.0.attn.c_attn.bias", {6}}, {"h.0.attn.bias", {6}}});
  expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), model); }).what(),
               {"not in the model: h.0.attn.bias"});
  // Nothing matches: not strict, either.
  put_tensors("m.safetensors", {{"other.weight", {4, 2}}});
  expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), net, {.strict = false}); }).what(),
               {"nothing of it is in the model", "'attn.weight'", "'other.weight'"});
}

TEST_F(HuggingFace, ValuesThatAreNotFiniteAreNamed) {
  struct Net : Module {
    Net() { register_parameter(weight, "fc.weight", {4, 2}); }
    Parameter weight;
  } net;
  SafetensorsWriter writer(path("m.safetensors"), Tensors{{"fc.weight", {4, 2}}});
  writer.write(std::vector<float>{1, 2, 3, 4, 5, NAN, 7, 8});
  writer.finish();
  std::vector<float> part(4);
  const PretrainedWeights weights(path("m.safetensors"), net);
  weights.read(net.weight, {0, 4}, part.data());
  EXPECT_EQ(error_of([&] {
              weights.read(net.weight, {4, 8}, part.data());
            }).what(),
            path("m.safetensors") +
                ": fc.weight[5] is nan; the file is damaged or its run diverged: give an earlier one");
  PretrainedWeights(path("m.safetensors"), net, {.nonfinite = true}).read(net.weight, {4, 8}, part.data());
  EXPECT_TRUE(std::isnan(part[1]));
}

/// The reverse: the module lacks it.
TEST_F(HuggingFace, TheModuleMayLackThePrefix) {
  struct Base : Module {
    Base() { register_parameter(wte, "wte.weight", {4, 2}); }
    Parameter wte;
  } model;
  put_tensors("m.safetensors", {{"transformer.wte.weight", {4, 2}}});
  EXPECT_EQ(values(PretrainedWeights(path("m.safetensors"), model), model.wte), from(0, 8));
}

TEST_F(HuggingFace, NamesAreThoseFromTheModule) {
  struct Pair : Module {
    Gpt2 teacher{
        *this, "teacher", {.n_layer = 1, .n_head = 1, .n_embd = 4, .n_positions = 4, .vocab_size = 8}};
    Parameter other;
  } pair;
  Tensors tensors;
  for (const auto& [name, p] : pair.teacher.named_parameters()) {
    tensors.push_back({name, {}});
    for (int i = 0; i < p->shape.dims(); ++i) tensors.back().shape.push_back(p->shape[i]);
  }
  EXPECT_EQ(tensors[0].name, "transformer.wte.weight");
  put_tensors("m.safetensors", tensors);
  const PretrainedWeights weights(path("m.safetensors"), pair.teacher);
  EXPECT_EQ(weights.tensors(), tensors.size());
  EXPECT_EQ(values(weights, *pair.teacher.find("transformer.wpe.weight")), from(100, 16));
  EXPECT_EQ(error_of([&] { values(weights, pair.other); }).code(), Errc::invalid_argument);
}

TEST_F(HuggingFace, NamesOfTheFileAreFitForATerminal) {
  put_tensors("m.safetensors", {{"h.0.attn.c_attn.bias", {6}}, {"wte.weight", {4, 2}}, {"\x1b[2Jmore", {1}}});
  Part model;
  const std::string what = error_of([&] { PretrainedWeights(path("m.safetensors"), model); }).what();
  expect_parts(what, {"not in the model: \\x1b[2Jmore; LoadOptions::strict = false leaves them out"});
  EXPECT_EQ(what.find('\x1b'), std::string::npos);
}

TEST_F(HuggingFace, EverythingThatDoesNotFitIsListed) {
  Part model;
  Parameter norm;
  model.register_parameter(norm, "transformer.ln_f.weight", {2});
  const auto message = [&](const Tensors& tensors) {
    put_tensors("m.safetensors", tensors);
    return std::string(error_of([&] { PretrainedWeights(path("m.safetensors"), model); }).what());
  };
  expect_parts(message({{"wte.weight", {2, 4}}, {"ln_f.weight", {2}}, {"surplus", {1}}, {"more", {1}}}),
               {path("m.safetensors"), "missing: transformer.h.0.attn.c_attn.bias",
                "wte.weight is [2, 4] where the model has [4, 2]", "not in the model: surplus, more"});
  expect_parts(message({{"wte.weight", {4, 2}},
                        {"transformer.wte.weight", {4, 2}},
                        {"ln_f.weight", {2}},
                        {"h.0.attn.c_attn.bias", {6}}}),
               {"not in the model: transformer.wte.weight"});
  expect_parts(
      message({{"wte.weight", {4, 2}},
               {"ln_f.weight", {2}},
               {"h.0.attn.c_attn.bias", {6}},
               {"h.0.attn.c_attn.lora_A.weight", {2, 2}}}),
      {"not in the model: h.0.attn.c_attn.lora_A.weight; updates of LoRA are read into the linear layers"});
  // One rule for all names.
  expect_parts(
      message({{"wte.weight", {4, 2}}, {"transformer.ln_f.weight", {2}}, {"h.0.attn.c_attn.bias", {6}}}),
      {"missing: transformer.ln_f.weight", "not in the model: transformer.ln_f.weight"});
  // Many are counted, and layouts of other programs are named.
  Tensors many;
  for (int i = 10; i < 30; ++i) many.push_back({concat("layer.", i), {1}});
  expect_parts(message(many), {"not in the model: layer.10, ", "layer.17 and 12 more"});
  expect_parts(message({{"wte.weight", {2, 4}}, {"ln_f.weight", {2}}, {"h.0.attn.c_attn.bias", {6}}}),
               {"these are transposed"});
}

/// Of DistributedDataParallel, torch.compile() and FullyShardedDataParallel, and of the module that holds the
/// model in a program of training.
TEST_F(HuggingFace, PrefixesOfAllNamesAreLeftOut) {
  const std::vector<std::pair<std::string, std::string>> left_out{{"module.", "module."},
                                                                  {"_orig_mod.", ""},
                                                                  {"_orig_mod.module.", "module."},
                                                                  {"model.net.transformer.", "model.net."}};
  for (const auto& [prefix, named] : left_out) {
    put_tensors("m.safetensors", {{prefix + "h.0.attn.c_attn.bias", {6}},
                                  {prefix + "h.0.attn.bias", {1, 1, 4, 4}},
                                  {prefix + "wte.weight", {4, 2}}});
    Part model;
    const PretrainedWeights weights(path("m.safetensors"), model);
    EXPECT_EQ(values(weights, model.wte), from(200, 8)) << prefix;
    EXPECT_EQ(weights.describe(), named.empty() ? "" : "without the prefix '" + named + "'");
  }
  put_tensors("m.safetensors",
              {{"h._fsdp_wrapped_module.0._orig_mod.attn.c_attn.bias", {6}}, {"wte.weight", {4, 2}}});
  Part wrapped;
  EXPECT_EQ(values(PretrainedWeights(path("m.safetensors"), wrapped), wrapped.wte), from(100, 8));
  // A prefix of some names is not left out, and named.
  put_tensors("m.safetensors", {{"ema.decay", {1}},
                                {"model.transformer.h.0.attn.c_attn.bias", {6}},
                                {"model.transformer.wte.weight", {4, 2}}});
  Part model;
  for (const bool strict : {true, false})
    expect_parts(
        error_of([&] { PretrainedWeights(path("m.safetensors"), model, {.strict = strict}); }).what(),
        {"the names behind 'model.' fit: give LoadOptions::prefix"});
  const PretrainedWeights weights(path("m.safetensors"), model, {.prefix = "model."});
  EXPECT_EQ(values(weights, model.wte), from(200, 8));
  EXPECT_EQ(weights.unexpected_keys().size(), 0u);
  expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), model, {.prefix = "a."}); }).what(),
               {"no tensor has the prefix 'a.'"});
}

TEST_F(HuggingFace, WithoutStrictWhatIsMissingIsInitialisedAndListed) {
  Part model;
  Parameter head;
  model.register_parameter(head, "score.weight", {3, 5}, {Initial::normal, 0.5f});
  put_tensors("m.safetensors", {{"wte.weight", {4, 2}}, {"h.0.attn.c_attn.bias", {6}}, {"old.head", {1}}});
  const PretrainedWeights weights(path("m.safetensors"), model, {.strict = false, .seed = 7});
  EXPECT_EQ(weights.missing_keys(), std::vector<std::string>{"score.weight"});
  EXPECT_EQ(weights.unexpected_keys(), std::vector<std::string>{"old.head"});
  EXPECT_EQ(values(weights, model.wte), from(0, 8));
  std::vector<float> initial(15);
  init_slice(head, initial, 0, 7);
  EXPECT_EQ(values(weights, head), initial);
  put_tensors("m.safetensors", {{"wte.weight", {2, 4}}});
  expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), model, {.strict = false}); }).what(),
               {"wte.weight is [2, 4]"});
}

TEST_F(HuggingFace, ATiedHeadMustEqualTheEmbedding) {
  const Tensors tensors{{"wte.weight", {4, 2}}, {"lm_head.weight", {4, 2}}, {"h.0.attn.c_attn.bias", {6}}};
  put_tensors("m.safetensors", tensors);
  Part model;
  expect_parts(error_of([&] { PretrainedWeights(path("m.safetensors"), model); }).what(),
               {"lm_head.weight differs", "tie_word_embeddings"});
  SafetensorsWriter writer(path("m.safetensors"), tensors);
  writer.write(std::vector<float>(16, 1.5f));
  writer.write(std::vector<float>(6));
  writer.finish();
  EXPECT_EQ(PretrainedWeights(path("m.safetensors"), model).tensors(), 2u);
}

TEST_F(HuggingFace, APartIsReadFromItsTensor) {
  struct Columns : Module {
    Columns() {
      register_parameter(part, "w", {4, 6});
      part.set_part({{4, 6}, {1, 2}, {2, 3}});
    }
    Parameter part;
  } model;
  put_tensors("m.safetensors", {{"w", {4, 6}}});
  const PretrainedWeights weights(path("m.safetensors"), model);
  EXPECT_EQ(values(weights, model.part), (std::vector<float>{8, 9, 10, 14, 15, 16}));
  std::vector<float> two(2);
  weights.read(model.part, {2, 4}, two.data());
  EXPECT_EQ(two, (std::vector<float>{10, 14}));
  struct Heads : Module {
    Heads() {
      register_parameter(part, "w", {3, 4, 5});
      part.set_part({{3, 4, 5}, {0, 1, 0}, {3, 2, 5}});
    }
    Parameter part;
  } heads;
  put_tensors("m.safetensors", {{"w", {3, 4, 5}}});
  std::vector<float> expected;
  for (float matrix : {0.0f, 20.0f, 40.0f})
    for (float i = 5; i < 15; ++i) expected.push_back(matrix + i);
  EXPECT_EQ(values(PretrainedWeights(path("m.safetensors"), heads), heads.part), expected);
}

// ---- several files

constexpr const char* index_name = "model.safetensors.index.json";

TEST_F(HuggingFace, AnIndexJoinsFiles) {
  put_tensors("model-00001-of-00002.safetensors", {{"transformer.wte.weight", {4, 2}}});
  put_tensors("model-00002-of-00002.safetensors", {{"transformer.h.0.attn.c_attn.bias", {6}}}, 5);
  put(index_name, R"({"metadata": {"total_size": 56}, "weight_map": {
      "transformer.wte.weight": "model-00001-of-00002.safetensors",
      "transformer.h.0.attn.c_attn.bias": "model-00002-of-00002.safetensors"}})");
  Part model;
  for (const std::string& where : {path(), path(index_name)}) {
    const PretrainedWeights weights(where, model);
    EXPECT_EQ(values(weights, model.wte), from(0, 8));
    EXPECT_EQ(values(weights, model.bias), from(500, 6));
  }
}

TEST_F(HuggingFace, AnIndexThatDiffersFromItsFilesIsRefused) {
  put_tensors("a.safetensors", {{"x", {1}}, {"y", {1}}});
  put_tensors("b.safetensors", {{"z", {1}}});
  const auto message = [&](const std::string& map) {
    put(index_name, R"({"weight_map": {)" + map + "}}");
    return std::string(error_of([&] { open_tensors(path()); }).what());
  };
  EXPECT_EQ(message(R"("x": "a.safetensors")"),
            concat(path("a.safetensors"), ": tensor 'y' is not in weight_map of ", path(index_name)));
  const std::string both = R"("x": "a.safetensors", "y": "a.safetensors")";
  EXPECT_EQ(message(both + R"(, "z": "a.safetensors")"),
            concat(path(index_name), ": weight_map: tensor 'z' is not in a.safetensors"));
  EXPECT_EQ(message(both + R"(, "z": "b.safetensors", "w": "b.safetensors")"),
            concat(path(index_name), ": weight_map: tensor 'w' is not in b.safetensors"));
  expect_parts(message(R"("x": "../a.safetensors")"), {index_name, "weight_map.x", "in the same folder"});
  expect_parts(message(R"("x": 3)"), {index_name, "weight_map.x"});
  expect_parts(message(R"("x": "none.safetensors")"), {"none.safetensors", "cannot be opened"});
  put_tensors("b.safetensors", {{"z", {1}}, {"x", {1}}});
  EXPECT_EQ(message(both + R"(, "z": "b.safetensors")"),
            concat(path("b.safetensors"), ": tensor 'x' is also in ", path("a.safetensors")));
  put(index_name, "{}");
  expect_parts(error_of([&] { open_tensors(path()); }).what(), {index_name, "weight_map"});
}

TEST_F(HuggingFace, AFolderWithoutWeightsIsRefused) {
  EXPECT_STREQ(error_of([&] { open_tensors(path()); }).what(),
               concat(path(), ": holds no weights, which are one of model.safetensors, ", index_name,
                      ", pytorch_model.bin, pytorch_model.bin.index.json, or a checkpoint of DeepSpeed or of "
                      "this library")
                   .c_str());
}

// ---- models

constexpr Gpt2Config tiny{.n_layer = 2, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 40};

std::string bytes_of(const std::string& path) { return read_text_file(path); }

/// Writes the initial model of a seed with one rank.
void save_initial(const std::string& folder, const Gpt2Config& config, std::uint64_t seed) {
  lab::group(1, [&](Communicator& comm) {
    Gpt2 model(config);
    const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
    strategy->values().fill([&](const Parameter& p, Range elements, float* out) {
      init_slice(p, {out, elements.count()}, elements.begin, seed);
    });
    save_pretrained(folder, model, *strategy, comm.rank(), Stream());
  });
}

TEST_F(HuggingFace, WhatIsSavedIsLoadedByEveryStrategyAndSavedAgain) {
  for (const bool tied : {true, false}) {
    Gpt2Config config = tiny;
    config.tie_word_embeddings = tied;
    save_initial(path("first"), config, 3);
    for (const StrategyKind kind :
         {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      lab::group(3, [&](Communicator& comm) {
        Gpt2 model(read_gpt2_config(path("first")));
        const auto strategy = make_strategy(kind, model, comm);
        EXPECT_EQ(load_pretrained(*strategy, model, path("first")).missing_keys().size(), 0u);
        save_pretrained(path("again"), model, *strategy, comm.rank(), Stream());
        comm.barrier().wait();
      });
      for (const char* file : {"model.safetensors", "config.json"})
        EXPECT_EQ(bytes_of(path("again/") + file), bytes_of(path("first/") + file)) << name(kind) << tied;
    }
    const auto file = open_safetensors(path("first/model.safetensors"));
    EXPECT_EQ(file.find("lm_head.weight") == nullptr, tied) << "a tied head is written once";
    EXPECT_NE(bytes_of(path("first/model.safetensors")).find(R"("__metadata__":{"format":"pt"})"),
              std::string::npos)
        << "without which from_pretrained() fails";
  }
}

/// A backbone into a model with another head, in every strategy.
TEST_F(HuggingFace, APartOfAModelIsLoaded) {
  struct Backbone : Module {
    explicit Backbone(Module& parent) : Module(parent, "backbone") {
      register_parameter(weight, "fc.weight", {5, 2}, {Initial::normal, 1});
    }
    Parameter weight;
  };
  struct Net : Module {
    Net() { register_parameter(head, "head.weight", {3, 5}, {Initial::normal, 1}); }
    Backbone backbone{*this};
    Parameter head;
  };
  put_tensors("backbone.safetensors", {{"fc.weight", {5, 2}}, {"classifier", {1}}});
  put_tensors("model.safetensors", {{"backbone.fc.weight", {5, 2}}, {"old_head", {1}}});
  std::vector<float> initial(15);
  for (const auto kind : {StrategyKind::ddp, StrategyKind::zero2, StrategyKind::zero3})
    for (const bool filled : {true, false})
      lab::group(2, [&](Communicator& comm) {
        Net net;
        const auto strategy = make_strategy(kind, net, comm);
        if (filled)
          strategy->values().fill(
              [](const Parameter&, Range elements, float* out) { std::fill_n(out, elements.count(), 7.f); });
        const auto loaded = load_pretrained(*strategy, net.backbone, path("backbone.safetensors"),
                                            {.strict = false, .seed = 3});
        EXPECT_EQ(loaded.unexpected_keys(), std::vector<std::string>{"classifier"});
        EXPECT_EQ(loaded.missing_keys().size(), 0u);
        strategy->values().compare();
        const auto expect_values = [&](const Parameter& p, const std::vector<float>& expected) {
          const Tensor whole = strategy->values().whole(p);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), whole.data<float>()))
              << name(kind) << p.name;
        };
        std::vector<float> head(15, 7.f);
        if (!filled) init_slice(net.head, head, 0, 3);
        expect_values(net.backbone.weight, from(0, 10));
        expect_values(net.head, head);
        const auto whole = load_pretrained(*strategy, net, path("model.safetensors"), {.strict = false});
        EXPECT_EQ(whole.missing_keys(), std::vector<std::string>{"head.weight"});
        EXPECT_EQ(whole.describe(), "not in the file: head.weight; not in the model: old_head");
        expect_values(net.head, head);
      });
}

TEST_F(HuggingFace, AModuleIsLoadedIntoItsOwnMemory) {
  save_initial(path("model"), tiny, 5);
  Gpt2 loaded(tiny), initial(tiny);
  EXPECT_EQ(error_of([&] { load_pretrained(loaded, path("model")); }).code(), Errc::invalid_argument);
  allocate_parameters(loaded);
  allocate_parameters(initial);
  init_parameters(initial, 5);
  load_pretrained(loaded, path("model"));
  for (const auto& [name, p] : loaded.named_parameters())
    EXPECT_EQ(std::memcmp(p->value.raw(), initial.find(name)->value.raw(), p->value.bytes()), 0) << name;
}

/// Bytes that read() requested in this process so far.
std::uint64_t bytes_read() {
  std::ifstream in("/proc/self/io");
  std::string key;
  std::uint64_t value = 0;
  in >> key >> value;
  EXPECT_EQ(key, "rchar:");
  return value;
}

TEST_F(HuggingFace, RanksOfZero3TogetherReadTheModelOnce) {
  Gpt2Config config = tiny;
  config.n_embd = 128;
  save_initial(path("model"), config, 3);
  const std::uint64_t size = fs::file_size(path("model/model.safetensors"));
  const auto read_by = [&](StrategyKind kind) {
    std::uint64_t total = 0;
    lab::group(4, [&](Communicator& comm) {
      Gpt2 model(config);
      const auto strategy = make_strategy(kind, model, comm);
      comm.barrier().wait();
      const std::uint64_t before = bytes_read();
      comm.barrier().wait();
      load_pretrained(*strategy, model, path("model"));
      comm.barrier().wait();
      if (comm.rank() == 0) total = bytes_read() - before;
    });
    return total;
  };
  // Each rank also reads the header and the first elements of each parameter.
  EXPECT_LT(read_by(StrategyKind::zero3), size + size / 4);
  EXPECT_GE(read_by(StrategyKind::ddp), 4 * size);
}

TEST_F(HuggingFace, NonfiniteWeightsAreSavedOnRequestOnly) {
  save_initial(path("model"), tiny, 5);
  const std::string before = bytes_of(path("model/model.safetensors"));
  lab::group(2, [&](Communicator& comm) {
    Gpt2 model(tiny);
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm);
    strategy->values().fill([&](const Parameter& p, Range elements, float* out) {
      for (std::size_t i = elements.begin; i < elements.end; ++i)
        *out++ = p.name == "transformer.ln_f.bias" && i == 11 ? NAN : 0.5f;
    });
    try {
      save_pretrained(path("model"), model, *strategy, comm.rank(), Stream());
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::diverged);
      expect_parts(e.what(),
                   {"model.safetensors: not written: transformer.ln_f.bias[11] is nan", "nonfinite"});
    }
    comm.barrier().wait();
    EXPECT_EQ(bytes_of(path("model/model.safetensors")), before);
    comm.barrier().wait();
    save_pretrained(path("model"), model, *strategy, comm.rank(), Stream(), {.nonfinite = true});
    comm.barrier().wait();
    EXPECT_NE(bytes_of(path("model/model.safetensors")), before);
  });
}

// ---- what save_pretrained() writes beside f32 weights

/// Of one rank or several, from the weights of a folder.
void save_again(const std::string& from, const std::string& to, const SaveOptions& options = {},
                int ranks = 1) {
  lab::group(ranks, [&](Communicator& comm) {
    const auto model = language_model_from_config(from);
    const auto strategy = make_strategy(StrategyKind::zero3, *model, comm);
    load_pretrained(*strategy, *model, from);
    save_pretrained(to, *model, *strategy, comm.rank(), Stream(), options);
    EXPECT_TRUE(fs::exists(fs::path(to) / "config.json")) << "on every rank, without a barrier";
  });
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

TEST_F(HuggingFace, TheTokenizerAndPaddingOfTheSourceAreSavedAgain) {
  Gpt2Config config = tiny;
  config.pad_token_id = 7;
  save_initial(path("source"), config, 3);
  const std::set<std::string> copied{
      "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
      "merges.txt",     "tokenizer.model",       "chat_template.jinja",     "generation_config.json"};
  for (const std::string& name : copied) put("source/" + name, concat("{\"", name, "\": \0\n}"));
  put("source/README.md", "not copied");
  save_again(path("source"), path("saved"), {}, 2);
  std::set<std::string> expected = copied;
  expected.insert({"config.json", "model.safetensors"});
  EXPECT_EQ(names_in(path("saved")), expected);
  for (const std::string& name : copied)
    EXPECT_EQ(bytes_of(path("saved/" + name)), bytes_of(path("source/" + name)));
  const auto json = nlohmann::json::parse(bytes_of(path("saved/config.json")));
  EXPECT_EQ(json.at("pad_token_id"), 7);
  EXPECT_EQ(json.at("tokenizer_class"), "PreTrainedTokenizerFast") << "as in the source";
  // Over itself.
  const std::string before = bytes_of(path("source/config.json"));
  save_again(path("source"), path("source"));
  expected.insert("README.md");
  EXPECT_EQ(names_in(path("source")), expected);
  for (const std::string& name : copied)
    EXPECT_EQ(bytes_of(path("saved/" + name)), bytes_of(path("source/" + name)));
  EXPECT_EQ(bytes_of(path("source/config.json")), before);
  // A source that names no class has that of its model_type.
  auto without = nlohmann::json::parse(before);
  without.erase("tokenizer_class");
  put("source/config.json", without.dump());
  save_again(path("source"), path("saved"));
  EXPECT_FALSE(nlohmann::json::parse(bytes_of(path("saved/config.json"))).contains("tokenizer_class"));

  put("config.json",
      R"({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, )"
      R"("num_attention_heads": 8, "pad_token_id": 5, "eos_token_id": 3})");
  EXPECT_EQ(nlohmann::json::parse(to_json(read_llama_config(path("config.json")))).at("pad_token_id"), 5);
}

TEST_F(HuggingFace, WeightsAreSavedIn16BitsAndInShardsOnRequest) {
  save_initial(path("f32"), tiny, 3);
  const auto wide = values_in(path("f32"));
  for (const DType dtype : {DType::bf16, DType::f16}) {
    save_again(path("f32"), path("narrow"), {.dtype = dtype}, 2);
    const auto json = nlohmann::json::parse(bytes_of(path("narrow/config.json")));
    EXPECT_EQ(json.at("dtype"), dtype == DType::bf16 ? "bfloat16" : "float16");
    EXPECT_EQ(json.at("torch_dtype"), json.at("dtype"));
    const auto file = open_safetensors(path("narrow/model.safetensors"));
    const auto narrow = values_in(path("narrow"));
    ASSERT_EQ(narrow.size(), wide.size());
    for (const auto& [name, values] : wide) {
      EXPECT_EQ(file.find(name)->dtype, safetensors_name(dtype));
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(narrow.at(name)[i], dtype == DType::bf16 ? to_f32(from_f32<bf16>(values[i]))
                                                           : to_f32(from_f32<f16>(values[i])));
    }
  }
  EXPECT_FALSE(nlohmann::json::parse(bytes_of(path("f32/config.json"))).contains("dtype"));

  save_again(path("f32"), path("shards"), {.max_shard_size = 4000}, 2);
  const auto index = nlohmann::json::parse(bytes_of(path("shards/model.safetensors.index.json")));
  std::set<std::string> files;
  std::uint64_t bytes = 0;
  for (const auto& [name, values] : wide) {
    files.insert(index.at("weight_map").at(name).get<std::string>());
    bytes += 4 * values.size();
  }
  EXPECT_EQ(index.at("metadata").at("total_size"), bytes);
  EXPECT_GT(files.size(), 3u);
  for (const std::string& name : files) {
    const TensorSource file = open_safetensors(path("shards/" + name));
    std::uint64_t in_file = 0;
    for (const TensorInfo& t : file.tensors()) in_file += t.bytes;
    EXPECT_TRUE(in_file <= 4000 || file.tensors().size() == 1) << name;
  }
  EXPECT_EQ(*files.begin(), concat("model-00001-of-0000", files.size(), ".safetensors"));
  EXPECT_EQ(values_in(path("shards")), wide);
  files.insert({"config.json", "model.safetensors.index.json"});
  EXPECT_EQ(names_in(path("shards")), files);
  // Weights of before do not stay.
  save_again(path("shards"), path("shards"));
  EXPECT_EQ(names_in(path("shards")), (std::set<std::string>{"config.json", "model.safetensors"}));
  EXPECT_EQ(values_in(path("shards")), wide);
  save_again(path("shards"), path("shards"), {.max_shard_size = 4000});
  EXPECT_EQ(names_in(path("shards")), files);
}

TEST_F(HuggingFace, AValueThatOverflowsIsNamedOnEveryRank) {
  lab::group(2, [&](Communicator& comm) {
    Gpt2 model(tiny);
    const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
    strategy->values().fill([&](const Parameter& p, Range elements, float* out) {
      for (std::size_t i = elements.begin; i < elements.end; ++i)
        *out++ = p.name == "transformer.ln_f.bias" && i == 3 ? 1e6f : 0.5f;
    });
    const Error e = error_of([&] {
      save_pretrained(path("model"), model, *strategy, comm.rank(), Stream(), {.dtype = DType::f16});
    });
    EXPECT_EQ(e.code(), Errc::diverged);
    expect_parts(e.what(), {"transformer.ln_f.bias[3] is 1e+06, which overflows f16; choose bf16 or f32"});
    save_pretrained(path("model"), model, *strategy, comm.rank(), Stream(),
                    {.nonfinite = true, .dtype = DType::f16});
    EXPECT_TRUE(std::isinf(values_in(path("model")).at("transformer.ln_f.bias")[3]));
  });
}

/// The other ranks neither wait for the rank that writes, nor return.
TEST_F(HuggingFace, WhatTheFirstRankCannotWriteIsAnErrorOnEveryRank) {
  put("file", "is no folder");
  fs::create_directories(path("model/config.json/folder"));          // found after the weights
  fs::create_directories(path("weights/model.safetensors/folder"));  // when they are complete
  lab::group(3, [&](Communicator& comm) {
    Gpt2 model(tiny);
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm);
    strategy->values().fill(
        [](const Parameter&, Range elements, float* out) { std::fill_n(out, elements.count(), 1); });
    const auto start = std::chrono::steady_clock::now();
    for (const auto& [folder, named] : {std::pair{"file", "file"},
                                        {"model", "config.json"},
                                        {"weights", "model.safetensors"},
                                        {"file/below", "file"}}) {
      const Error e =
          error_of([&] { save_pretrained(path(folder), model, *strategy, comm.rank(), Stream()); });
      EXPECT_EQ(e.code(), Errc::io) << folder;
      expect_parts(e.what(), {path(named == std::string("file") ? "file" : concat(folder, '/', named))});
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    save_pretrained(path("good"), model, *strategy, comm.rank(), Stream());  // the ranks are in step
    EXPECT_TRUE(fs::exists(path("good/config.json")));
  });
}

}  // namespace
}  // namespace rz
