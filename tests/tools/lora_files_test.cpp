// LoRA: adapters, checkpoints and parts of a model in files, and which of them are refused.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "autograd_lite/nn/image_layers.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/io/json.h"
#include "sharding/lm/updates.h"
#include "tests/support/error_of.h"
#include "tests/support/small_lora.h"
#include "tests/support/written_checkpoint.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using nlohmann::json;

TEST_F(Lora, WhatIsSavedIsLoadedInEveryStrategyAndMerged) {
  lab::Run training = run(all_paths);
  const std::string adapter = folder_ / "adapter", base = folder_ / "base.safetensors";
  std::vector<std::pair<int, StrategyKind>> settings{{1, StrategyKind::ddp}};
  for (const StrategyKind kind : lab::strategies) settings.emplace_back(2, kind);
  std::map<std::string, std::vector<float>> saved;
  std::string config;
  training.end = [&](Engine& engine, Module& m) {
    save_weights(base, m, engine.strategy(), engine.world().rank(), engine.stream(),
                 {.only = {"wte", "wpe", "ln_*", "c_*.weight", "c_*.bias"}, .merge_lora = false});
    engine.save_adapter(adapter);
    save(engine, dynamic_cast<LanguageModel&>(m), folder_ / "merged");
  };
  for (const auto& [ranks, kind] : settings) {
    training.ranks = ranks;
    training.strategy = kind;
    lab::train(training);
    const auto now = values_in(adapter + "/adapter_model.safetensors");
    EXPECT_EQ(now.size(), 12u);
    EXPECT_TRUE(now.contains("base_model.model.transformer.h.1.mlp.c_fc.lora_B.weight"));
    if (ranks == 2) {
      if (saved.empty()) saved = now;
      EXPECT_TRUE(now == saved) << name(kind);
    }
    if (!config.empty()) {
      EXPECT_EQ(config, read_text_file(adapter + "/adapter_config.json"));
    }
    config = read_text_file(adapter + "/adapter_config.json");
    EXPECT_EQ(json::parse(config)["base_model_name_or_path"],
              std::filesystem::path(folder_ / "config.json").parent_path().string());

    // Loaded again, alone and merged.
    const auto own = model();
    add_lora(*own, read_adapter_config(adapter));
    allocate_parameters(*own);
    load_pretrained(*own, base);
    load_adapter(*own, adapter);
    const auto merged = model();
    allocate_parameters(*merged);
    load_pretrained(*merged, folder_ / "merged");
    expect_near(logits_of(*own, tokens()), logits_of(*merged, tokens()), 1e-4);
    for (const Parameter* p : own->parameters())
      if (const auto t = now.find("base_model.model." + p->name); t != now.end()) {
        EXPECT_EQ(std::memcmp(p->value.data<float>(), t->second.data(), 4 * p->count()), 0) << p->name;
      }
  }
  training.strategy = StrategyKind::zero3;
  training.updates = 0;
  training.start = [&](Engine& engine, Module&) { engine.load_adapter(adapter); };
  training.end = [&](Engine& engine, Module&) { engine.save_adapter(folder_ / "again"); };
  lab::train(training);
  EXPECT_EQ(read_text_file(adapter + "/adapter_model.safetensors"),
            read_text_file((folder_ / "again") + "/adapter_model.safetensors"));
}

TEST_F(Lora, ACheckpointResumesWithTheSameBits) {
  json lora = all_paths;
  lora["lora_dropout"] = 0.1;
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    const bool without_base = kind == StrategyKind::zero3;
    lab::Run training = run(lora);
    training.strategy = kind;
    training.ranks = 2;
    training.updates = 4;
    lab::Trace rest = lab::train(training);
    rest.updates.erase(rest.updates.begin(), rest.updates.begin() + 2);
    training.updates = 2;
    training.end = [&](Engine& engine, Module&) {
      engine.save_checkpoint(folder_ / name(kind), {.exclude_frozen_parameters = without_base});
    };
    lab::train(training);
    const TensorSource saved = open_checkpoint(folder_ / name(kind), TensorPart::all);
    EXPECT_EQ(saved.find("model/transformer.wte.weight") == nullptr, without_base);
    EXPECT_NE(saved.find("model/transformer.h.0.attn.c_attn.lora_A.weight"), nullptr);
    EXPECT_EQ(saved.find("optimizer/exp_avg/transformer.wte.weight"), nullptr);
    training.updates = 4;
    training.end = {};
    training.start = [&](Engine& engine, Module&) {
      EXPECT_TRUE(engine.load_checkpoint(folder_ / name(kind)).has_value());
    };
    EXPECT_EQ(lab::train(training), rest) << name(kind);
  }
}

TEST_F(Lora, ACheckpointWithoutFrozenWeightsNamesThoseThatItWasTrainedWith) {
  const std::string checkpoint = folder_ / "checkpoint";
  std::filesystem::create_directories(folder_ / "base");
  for (const std::string name : {"base/model.safetensors", "other.safetensors"}) {
    const auto m = model();
    allocate_parameters(*m);
    init_parameters(*m, name.size());
    lab::group(1, [&](Communicator& comm) {
      const auto strategy = make_strategy(StrategyKind::ddp, *m, comm);
      save_weights(folder_ / name.c_str(), *m, *strategy, comm.rank(), {});
    });
  }
  const json lora{{"target_modules", {"c_attn"}}, {"r", 2}};
  lab::Run training = run(lora, folder_ / "base");
  training.strategy = StrategyKind::zero3;
  training.ranks = 2;
  training.updates = 1;
  training.end = [&](Engine& engine, Module&) {
    engine.save_checkpoint(checkpoint, {.exclude_frozen_parameters = true});
  };
  lab::train(training);
  training.updates = 0;
  training.end = {};
  const auto load = [&](const std::string& weights, const std::string& named, bool strict = true) {
    training.model = run(lora, weights).model;
    training.start = [&](Engine& engine, Module&) {
      const LoadCheckpointOptions options{.load_module_strict = strict};
      if (named.empty()) {
        EXPECT_TRUE(engine.load_checkpoint(checkpoint, options).has_value());
        return;
      }
      const Error e = error_of([&] { engine.load_checkpoint(checkpoint, options); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_EQ(e.what(), concat(checkpoint,
                                 "/global_step1: has no frozen weights and was trained with those of "
                                 "'base'; the model has weights ",
                                 named,
                                 ": load 'base' before, with load_model(), or for a run that is resumed with "
                                 "load_pretrained() or EngineOptions::initial_values, --init of train_lm; "
                                 "LoadCheckpointOptions::load_module_strict = false takes others"));
    };
    lab::train(training);
  };
  load(folder_ / "base", "");
  load(folder_ / "base/model.safetensors", "");
  load(folder_ / "other.safetensors", "of 'other.safetensors'");
  load("", "that were loaded from no file");
  load(folder_ / "other.safetensors", "", /*strict=*/false);
}

TEST_F(Lora, AnAdapterExistsOnReturnOrIsAnErrorOnEveryRank) {
  const std::string good = folder_ / "good", bad = folder_ / "bad";
  std::filesystem::create_directories(bad + "/adapter_config.json/folder");
  lab::Run training = run({{"target_modules", {"c_attn"}}, {"r", 2}});
  training.strategy = StrategyKind::zero3;
  training.ranks = 3;
  training.updates = 0;
  training.end = [&](Engine& engine, Module&) {
    const Error e = error_of([&] { engine.save_adapter(bad); });
    EXPECT_EQ(e.code(), Errc::io);
    EXPECT_NE(std::string(e.what()).find(bad + "/adapter_config.json"), std::string::npos) << e.what();
    engine.save_adapter(good);
    EXPECT_TRUE(std::filesystem::exists(good + "/adapter_config.json"));
  };
  lab::train(training);
}

TEST_F(Lora, AWrongAdapterIsNamedInOneLine) {
  const std::string folder = folder_ / "adapter", config = folder + "/adapter_config.json";
  save_new({{"target_modules", {"c_attn"}}, {"r", 2}}, folder);
  const auto load = [&](const LoraOptions& options) {
    const auto m = model();
    add_lora(*m, options);
    allocate_parameters(*m);
    const Error e = error_of([&] { load_adapter(*m, folder); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return std::string(e.what());
  };
  const auto expect = [](const std::string& what, const std::string& part) {
    EXPECT_NE(what.find(part), std::string::npos) << what;
  };
  expect(load({.target_modules = {"c_attn"}, .r = 3}), "r is 2, and of the model 3");
  expect(load({.target_modules = {"c_attn"}, .r = 2, .lora_alpha = 9}),
         "lora_alpha is 8, and of the model 9");
  expect(load({.target_modules = {"c_fc"}, .r = 2}), "missing: transformer.h.0.mlp.c_fc.lora_A.weight");
  expect(load({.target_modules = {"c_fc"}, .r = 2}),
         "not in the model: base_model.model.transformer.h.0.attn.c_attn.lora_A.weight");
  const std::string text = read_text_file(config);
  const auto refused = [&](const char* key, const json& value) {
    json changed = json::parse(text);
    changed[key] = value;
    folder_.put("adapter/adapter_config.json", changed.dump());
    const Error e = error_of([&] { read_adapter_config(folder); });
    expect(e.what(), config + ": " + key + ": ");
  };
  refused("use_dora", true);
  refused("alpha_pattern", {{"c_attn", 2}});
  refused("layers_to_transform", {1});
  refused("bias", "lora_only");
  refused("peft_type", "IA3");
  refused("init_lora_weights", "pissa");
  refused("r", "two");
  refused("target_modules", json());
  std::filesystem::remove(config);
  expect(error_of([&] { read_adapter_config(folder); }).what(), config);
  // What the file has beyond A and B is not left out.
  const std::string more = folder_ / "more";
  save_new({{"target_modules", {"c_attn"}}, {"r", 2}, {"modules_to_save", {"ln_f"}}}, more);
  const auto m = model();
  add_lora(*m, {.target_modules = {"c_attn"}, .r = 2});
  allocate_parameters(*m);
  load_adapter(*m, more);
  EXPECT_EQ(lora_options(*m)->tensors_to_save,
            (std::vector<std::string>{"transformer.ln_f.weight", "transformer.ln_f.bias"}));
}

TEST_F(Lora, TheBaseIsNamedAsItWasGiven) {
  const std::filesystem::path before = std::filesystem::current_path();
  folder_.put("base/config.json", gpt2_config);
  std::filesystem::current_path(std::filesystem::path(folder_ / "base").parent_path());
  for (const char* given : {"base", "base/config.json"}) {
    const auto m = language_model_from_config(given);
    add_lora(*m, {.target_modules = {"c_attn"}});
    EXPECT_EQ(json::parse(adapter_config_json(*m))["base_model_name_or_path"], "base");
  }
  std::filesystem::current_path(before);
}

struct NormedNet : Module {
  nn::Linear fc{*this, "fc", 6, 6};
  nn::BatchNorm1d norm{*this, "norm", 6};
};

TEST_F(Lora, ModulesToSaveHaveTheirBuffers) {
  const std::string adapter = folder_ / "adapter";
  const LoraOptions options{.target_modules = {"fc"}, .r = 2, .modules_to_save = {"norm"}};
  const auto make = [&](NormedNet& net) {
    add_lora(net, options);
    allocate_parameters(net);
    init_parameters(net, 1);
  };
  lab::group(2, [&](Communicator& comm) {
    NormedNet net;
    make(net);
    const auto strategy = make_strategy(StrategyKind::ddp, net, comm);
    for (const auto& [name, b] : persistent_buffers(net))
      for (std::size_t i = 0; i < b->shape.count(); ++i)
        if (b->dtype == DType::f32)
          b->value.data<float>()[i] = static_cast<float>(3 * i + name.size());
        else
          b->value.data<std::int64_t>()[i] = 41;
    save_adapter(adapter, net, *strategy, comm.rank(), {});
    if (comm.rank() > 0) return;
    NormedNet again;
    make(again);
    load_adapter(again, adapter);
    const auto expected = persistent_buffers(net), found = persistent_buffers(again);
    EXPECT_EQ(expected.size(), 3u);  // running_mean, running_var, num_batches_tracked
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(std::memcmp(expected[i].second->value.raw(), found[i].second->value.raw(),
                            expected[i].second->value.bytes()),
                0)
          << expected[i].first;
  });
  const TensorSource file = open_tensors(adapter + "/adapter_model.safetensors");
  ASSERT_NE(file.find("base_model.model.norm.num_batches_tracked"), nullptr);
  EXPECT_EQ(file.find("base_model.model.norm.num_batches_tracked")->dtype, "I64");
  EXPECT_EQ(file.tensors().size(), 2u + 2 + 3);
}

/// Rewrites the tensors of an adapter.
void edit_adapter(const std::string& folder,
                  const std::function<void(std::map<std::string, Tensor>&)>& edit) {
  const std::string path = folder + "/adapter_model.safetensors";
  std::map<std::string, Tensor> all;
  {
    const TensorSource before = open_tensors(path);
    for (const TensorInfo& t : before.tensors()) {
      const Tensor value = Tensor::empty(Shape(std::vector<std::size_t>(t.shape.begin(), t.shape.end())));
      before.read_f32(t, 0, {value.data<float>(), value.count()});
      all[t.name] = value;
    }
  }
  edit(all);
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, t] : all) specs.push_back({name, extents(t.shape())});
  SafetensorsWriter file(path, specs);
  for (const auto& [name, t] : all) file.write(std::span<const float>(t.data<float>(), t.count()));
  file.finish();
}

TEST_F(Lora, WhatElseAnAdaptersFileHasIsLoadedAndSavedOrRefused) {
  const std::string folder = folder_ / "adapter", table = "base_model.model.transformer.wte.weight";
  const json lora{{"target_modules", {"c_attn"}}, {"r", 2}};
  save_new(lora, folder);
  edit_adapter(folder, [&](auto& tensors) {
    tensors[table] = Tensor::empty({256, 16});
    for (std::size_t i = 0; i < 256 * 16; ++i)
      tensors[table].template data<float>()[i] = static_cast<float>(i % 37) / 10;
  });
  const auto given = values_in(folder + "/adapter_model.safetensors");
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    lab::Run training = run(lora);
    training.strategy = kind;
    training.ranks = 2;
    training.updates = 2;
    training.start = [&](Engine& engine, Module&) { engine.load_adapter(folder); };
    training.end = [&](Engine& engine, Module& m) {
      EXPECT_FALSE(m.find("transformer.wte.weight")->requires_grad);
      EXPECT_EQ(frozen_values(engine, m).at("transformer.wte.weight"), given.at(table)) << name(kind);
      engine.save_adapter(folder_ / "again");
    };
    lab::train(training);
    const auto again = values_in((folder_ / "again") + "/adapter_model.safetensors");
    EXPECT_EQ(again.size(), given.size());
    EXPECT_EQ(again.at(table), given.at(table)) << name(kind);
  }
  const auto refused = [&](const std::string& part) {
    const auto m = model();
    add_lora(*m, read_adapter_config(folder));
    allocate_parameters(*m);
    const Error e = error_of([&] { load_adapter(*m, folder); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    EXPECT_TRUE(lora_options(*m)->tensors_to_save.empty());
  };
  edit_adapter(folder, [&](auto& tensors) { tensors[table] = Tensor::zeros({257, 16}); });
  refused(table + " is [257, 16] where the model has [256, 16]");
  edit_adapter(folder, [&](auto& tensors) {
    tensors.erase(table);
    tensors["base_model.model.score.weight"] = Tensor::zeros({2, 16});
  });
  refused("not in the model: base_model.model.score.weight");
}

TEST_F(Lora, PartsOfAModelAreSavedAndLoadedByPattern) {
  const std::string file = folder_ / "part.safetensors", whole = folder_ / "whole.safetensors";
  lab::Run training = run({});
  training.keys = R"("ringzero": null)";
  training.strategy = StrategyKind::zero3;
  training.ranks = 2;
  training.updates = 1;
  training.end = [&](Engine& engine, Module& m) {
    save_weights(file, m, engine.strategy(), engine.world().rank(), engine.stream(),
                 {.only = {"h.1", "ln_f"}});
    engine.save_model(whole);
    const Error e = error_of([&] {
      save_weights(file, m, engine.strategy(), engine.world().rank(), engine.stream(), {.only = {"ln_ff"}});
    });
    EXPECT_NE(std::string(e.what()).find("only: 'ln_ff' matches no parameter; did you mean 'ln_f'?"),
              std::string::npos)
        << e.what();
  };
  lab::train(training);
  const auto trained = values_in(whole), part = values_in(file);
  EXPECT_EQ(part.size(), 12u + 2);
  EXPECT_EQ(part.at("transformer.ln_f.bias"), trained.at("transformer.ln_f.bias"));
  training.updates = 0;
  for (const bool from_whole : {false, true})
    for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
      training.strategy = kind;
      training.end = [&](Engine& engine, Module& m) {
        m.requires_grad_(false);  // names all
        const auto initial = frozen_values(engine, m);
        const PretrainedWeights read =
            engine.load_model(from_whole ? whole : file, {.only = {"h.1", "ln_f.weight"}});
        EXPECT_EQ(read.tensors(), 13u);
        const auto now = frozen_values(engine, m);
        for (const auto& [name, values] : now) {
          const bool in_part = name.find("h.1.") != name.npos || name == "transformer.ln_f.weight";
          EXPECT_EQ(values, in_part ? trained.at(name) : initial.at(name)) << name;
        }
        const Error e = error_of([&] { engine.load_model(file, {.only = {"h.0"}}); });
        EXPECT_NE(std::string(e.what()).find("missing: transformer.h.0.ln_1.weight"), std::string::npos)
            << e.what();
        m.requires_grad_(true);
      };
      lab::train(training);
    }
}

}  // namespace
}  // namespace rz::lm
