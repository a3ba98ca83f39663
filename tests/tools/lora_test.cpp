// LoRA: training in every strategy against PEFT in float64 (../shared/fixtures/lora_tiny), adapters in files,
// what is merged, and parts of a model in files.

#include "autograd_lite/models/lora.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "autograd_lite/nn/image_layers.h"
#include "autograd_lite/nn/init.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/json.h"
#include "sharding/lm/updates.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/written_checkpoint.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using nlohmann::json;

json json_file(const std::string& path) {
  return parse_json(read_text_file(path), path, JsonDialect::strict);
}

/// What a rank has of the frozen parameters, by name.
std::map<std::string, std::vector<float>> frozen_values(Engine& engine, Module& model) {
  std::map<std::string, std::vector<float>> all;
  for (const Parameter* p : model.parameters()) {
    if (p->requires_grad) continue;
    const Tensor value = engine.strategy().values().whole(*p).on_host(engine.stream());
    all[p->name].assign(value.data<float>(), value.data<float>() + value.count());
  }
  return all;
}

Tensor logits_of(LanguageModel& model, const Tensor& tokens) {
  Tape tape;
  const Tape::NoGrad no_grad(tape);
  const Tensor value = tape.value(model.forward(tape, tokens).logits);
  const Tensor own = Tensor::empty(value.shape());
  std::copy_n(value.data<float>(), value.count(), own.data<float>());
  return own;
}

void expect_near(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.shape(), b.shape());
  for (std::size_t i = 0; i < a.count(); ++i)
    ASSERT_NEAR(a.data<float>()[i], b.data<float>()[i], tolerance) << "element " << i;
}

// ---- a model of the test's own

constexpr const char* gpt2_config =
    R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 256,
        "initializer_range": 0.3, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})";

json training_config(const json& lora) {
  return {{"train_batch_size", 6},
          {"gradient_clipping", 0.5},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-2}, {"weight_decay", 0.1}}}}},
          {"zero_optimization", {{"stage3_param_persistence_threshold", 0}}},
          {"ringzero", {{"lora", lora}}}};
}

class Lora : public testing::Test {
 protected:
  Lora() { folder_.put("config.json", gpt2_config); }
  /// Three updates, of the initial values of a file or of the seed.
  lab::Run run(const json& lora, const std::string& weights = "") const {
    return {.model = lab::language(
                {8, weights}, [path = folder_ / "config.json"] { return language_model_from_config(path); },
                training_config(lora).dump()),
            .updates = 3};
  }
  /// Saves the adapter of a run without updates.
  void save_new(const json& lora, const std::string& adapter) const {
    lab::Run training = run(lora);
    training.updates = 0;
    training.end = [&](Engine& engine, Module&) { engine.save_adapter(adapter); };
    lab::train(training);
  }
  std::unique_ptr<LanguageModel> model() const { return language_model_from_config(folder_ / "config.json"); }
  /// Sets all values, those of B too, so that updates have an effect.
  static void fill(LanguageModel& model) {
    allocate_parameters(model);
    init_parameters(model, 3);
    for (const auto& [name, layer] : lora_layers(model))
      for (std::size_t i = 0; i < layer->lora->b.count(); ++i)
        layer->lora->b.value.data<float>()[i] = static_cast<float>(random_uniform(5, name, i) - 0.5);
  }
  static Tensor tokens() {
    const Tensor t = Tensor::empty({2, 8}, DType::i32);
    for (std::size_t i = 0; i < 16; ++i) t.data<std::int32_t>()[i] = static_cast<std::int32_t>(37 * i % 256);
    return t;
  }

  Folder folder_;
};

const json all_paths{
    {"target_modules", {"c_attn", "mlp.c_fc", "h.*.mlp.c_proj"}}, {"r", 3}, {"lora_alpha", 5}};

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
    if (saved.empty()) saved = now;
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

TEST_F(Lora, OptionsAreComparedOverTheRanks) {
  struct Case {
    LoraOptions of_last;
    std::string parts;
  };
  const LoraOptions options{.target_modules = {"c_attn"}, .r = 2, .lora_alpha = 4};
  std::vector<Case> cases(7, {options, ""});
  const std::string of = " of transformer.h.0.attn.c_attn is ";
  cases[0].of_last.r = 3, cases[0].parts = "r" + of + "2 on rank 0 and 3 on rank 2";
  cases[1].of_last.lora_alpha = 5, cases[1].parts = "lora_alpha" + of + "4 on rank 0 and 5 on rank 2";
  cases[2].of_last.lora_dropout = 0.5, cases[2].parts = "lora_dropout" + of + "0 on rank 0 and 0.5 on rank 2";
  cases[3].of_last.use_rslora = true,
  cases[3].parts = "use_rslora" + of + "false on rank 0 and true on rank 2";
  cases[4].of_last.target_modules = {"c_attn", "c_fc"};
  cases[4].parts = "target_modules" + of + "c_attn on rank 0 and c_attn, c_fc on rank 2";
  cases[5].of_last.modules_to_save = {"ln_f"};
  cases[5].parts = "modules_to_save" + of + "none on rank 0 and ln_f on rank 2";
  cases[6].of_last.r = 0, cases[6].parts = "target_modules" + of + "c_attn on rank 0 and missing on rank 2";
  for (const bool of_part : {false, true})
    for (const Case& c : cases)
      lab::group(3, [&](Communicator& comm) {
        const auto m = model();
        Module& part = of_part ? *m->find_module("transformer") : *m;
        if (comm.rank() < 2)
          add_lora(part, options);
        else if (c.of_last.r > 0)
          add_lora(part, c.of_last);
        const Error e = error_of([&] { make_strategy(StrategyKind::ddp, *m, comm); });
        EXPECT_EQ(e.code(), Errc::mismatch);
        EXPECT_EQ(e.culprit(), 2);
        EXPECT_EQ(e.what(), concat("LoRA differs over the ranks: ", c.parts,
                                   "; call add_lora() with the same options on every rank"));
      });
  // What a program has changed by hand.
  lab::group(2, [&](Communicator& comm) {
    const auto m = model();
    add_lora(*m, options);
    lora_layers(*m)[1].second->lora->scale += static_cast<float>(comm.rank());
    const Error e = error_of([&] { make_strategy(StrategyKind::zero3, *m, comm); });
    EXPECT_NE(
        std::string(e.what()).find("the scale of transformer.h.1.attn.c_attn is 2 on rank 0 and 3 on rank 1"),
        std::string::npos)
        << e.what();
  });
}

TEST_F(Lora, WithoutTargetsThoseOfTheFamilyAreAdapted) {
  const auto targets_of = [&](const std::string& config) {
    folder_.put("config.json", config);
    const auto m = model();
    add_lora(*m, {});
    add_lora(*m, {.target_modules = lora_options(*m)->target_modules});  // the same options
    std::set<std::string> names;
    for (const auto& [name, layer] : lora_layers(*m)) names.insert(name.substr(name.rfind('.') + 1));
    return std::vector<std::string>(names.begin(), names.end());
  };
  EXPECT_EQ(targets_of(gpt2_config), (std::vector<std::string>{"c_attn"}));
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"})
    EXPECT_EQ(
        targets_of(concat(R"({"model_type": ")", type, R"(", "vocab_size": 64, "hidden_size": 32, )",
                          R"("intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, )",
                          R"("num_key_value_heads": 8})")),
        (std::vector<std::string>{"q_proj", "v_proj"}))
        << type;
  folder_.put("config.json", gpt2_config);
  const auto configured = model();
  EngineOptions options;
  options.config = training_config(json::object()).dump();
  prepare_model(*configured, read_configuration(1, *configured, options));
  EXPECT_EQ(lora_layers(*configured).size(), 2u);
  Module other;
  EXPECT_NE(std::string(error_of([&] { add_lora(other, {}); }).what()).find("target_modules: missing"),
            std::string::npos);
}

// ---- mistakes

struct Mistake {
  json lora;
  std::vector<std::string> parts;  ///< of the message
};

TEST_F(Lora, AMistakeInTheConfigurationIsNamed) {
  const json targets{"c_attn"};
  for (const auto& [lora, parts] : std::vector<Mistake>{
           {{{"target_modules", {"c_atn"}}},
            {"ringzero.lora.target_modules: 'c_atn' matches no module; did you mean 'c_attn'?",
             "Linear layers are c_attn, c_proj, c_fc"}},
           {{{"target_modules", {"attn"}}}, {"transformer.h.0.attn is no Linear layer"}},
           {{{"target_modules", ".*(c_attn"}}, {"'.*(c_attn' is no regular expression"}},
           {{{"target_modules", "c_attn"}},  // a name is a list, as in PEFT
            {"'c_attn' is a regular expression of whole names, and matches none; give the list "
             "[\"c_attn\"]"}},
           {{{"target_modules", json::array()}}, {"ringzero.lora.target_modules: empty"}},
           {{{"target_modules", 3}}, {"target_modules: expected a list of names, found 3"}},
           {{{"target_modules", targets}, {"modules_to_save", {"wte"}}},
            {"modules_to_save: transformer.wte", "is tied"}},
           {{{"target_modules", targets}, {"modules_to_save", {"ln_ff"}}},
            {"'ln_ff'", "did you mean 'ln_f'?"}},
           {{{"target_modules", targets}, {"rank", 4}}, {"ringzero.lora.rank: unknown key"}},
           {{{"target_modules", targets}, {"lora_alfa", 4}}, {"did you mean 'lora_alpha'?"}},
           {{{"target_modules", targets}, {"r", 0}}, {"ringzero.lora.r"}},
           {{{"target_modules", targets}, {"lora_dropout", 1}}, {"ringzero.lora.lora_dropout"}},
           {{{"target_modules", targets}, {"use_dora", true}}, {"ringzero.lora.use_dora: not supported"}},
           {{{"target_modules", targets}, {"bias", "all"}}, {"ringzero.lora.bias: not supported"}},
           {{{"target_modules", targets}, {"rank_pattern", {{"c_attn", 4}}}},
            {"ringzero.lora.rank_pattern"}}}) {
    const auto m = model();
    const Error e = error_of([&] {
      EngineOptions options;
      options.config = training_config(lora).dump();
      prepare_model(*m, read_configuration(1, *m, options));
    });
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    EXPECT_TRUE(lora_layers(*m).empty());
  }
}

TEST_F(Lora, ArgumentsAskForIt) {
  EngineOptions options;
  options.config = R"({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1}}})";
  options.arguments = {.lora_target_modules = "c_attn,mlp.c_proj", .lora_r = 2, .lora_alpha = 6};
  const auto m = model();
  const DsConfig config = read_configuration(1, *m, options);
  EXPECT_EQ(config.lora, (LoraOptions{.target_modules = {"c_attn", "mlp.c_proj"}, .r = 2, .lora_alpha = 6}));
  EXPECT_EQ(parse_ds_config(resolved_json(config), "again").lora, config.lora);
  options.arguments.lora_target_modules = "all-linear";
  EXPECT_EQ(read_configuration(1, *m, options).lora->target_modules, TargetModules("all-linear"));
  options.arguments.lora_target_modules.reset();
  EXPECT_EQ(error_of([&] { read_configuration(1, *m, options); }).code(), Errc::config);  // lora_r alone
}

TEST_F(Lora, TheHeadIsTrainedWholeOrNotAtAll) {
  folder_.put("config.json", std::string(gpt2_config).insert(1, "\"tie_word_embeddings\": false, "));
  const auto m = model();
  const Error e = error_of([&] { add_lora(*m, {.target_modules = {"lm_head"}}); });
  EXPECT_NE(std::string(e.what()).find("add it to modules_to_save"), std::string::npos) << e.what();
  add_lora(*m, {.target_modules = "all-linear", .modules_to_save = {"lm_head"}});
  EXPECT_EQ(lora_layers(*m).size(), 8u);
  EXPECT_TRUE(m->find("lm_head.weight")->requires_grad);
  EXPECT_FALSE(m->find("transformer.wte.weight")->requires_grad);
  EXPECT_EQ(adapter_tensors(*m).parameters.back().first, "lm_head.weight");
  add_lora(*m, {.target_modules = "all-linear", .modules_to_save = {"lm_head"}});  // again
  EXPECT_EQ(error_of([&] { add_lora(*m, {.target_modules = {"c_fc"}}); }).code(), Errc::invalid_argument);
}

TEST_F(Lora, OfAGptNeoxTheHeadHasAnotherName) {
  folder_.put("config.json",
              R"({"model_type": "gpt_neox", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
                 "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8})");
  const auto m = model(), all = model();
  const Error e = error_of([&] { add_lora(*m, {.target_modules = {"embed_out"}}); });
  EXPECT_NE(std::string(e.what()).find("embed_out is the head"), std::string::npos) << e.what();
  add_lora(*all, {.target_modules = "all-linear"});
  EXPECT_EQ(lora_layers(*all).size(), 2u * 4);
  lab::Run training = run({{"target_modules", {"query_key_value"}}, {"r", 2}});
  training.ranks = 2;
  training.updates = 20;
  const auto updates = lab::train_in_every_strategy(training).updates;
  EXPECT_LT(updates.at(19).loss, updates.at(0).loss - 0.05);
}

TEST_F(Lora, ARegularExpressionMatchesWholeNames) {
  const auto m = model();
  add_lora(*m, {.target_modules = R"(.*h\.1\.(attn|mlp)\.c_proj)"});
  ASSERT_EQ(lora_layers(*m).size(), 2u);
  EXPECT_EQ(lora_layers(*m)[0].first, "transformer.h.1.attn.c_proj");
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

/// The names of what an adapter has.
std::set<std::string> names_of(const AdapterTensors& all) {
  std::set<std::string> names;
  for (const auto& [name, p] : all.parameters) names.insert(name);
  for (const auto& [name, b] : all.buffers) names.insert(name);
  return names;
}

TEST_F(Lora, AnyEndingOfANameIsAModuleToSaveAsInPeft) {
  folder_.put("config.json",
              R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
                 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})");
  const auto m = model();
  add_lora(*m, {.target_modules = {"q_proj"}, .r = 2, .modules_to_save = {"norm"}});
  std::set<std::string> names{"model.norm.weight"};
  for (const char* layer : {"model.layers.0.", "model.layers.1."})
    for (const char* norm : {"input_layernorm", "post_attention_layernorm"})
      names.insert(concat(layer, norm, ".weight"));
  for (const std::string& name : names) EXPECT_TRUE(m->find(name)->requires_grad) << name;
  for (const char* layer : {"model.layers.0.", "model.layers.1."})
    for (const char* factor : {"A", "B"})
      names.insert(concat(layer, "self_attn.q_proj.lora_", factor, ".weight"));
  EXPECT_EQ(names_of(adapter_tensors(*m)), names);
  EXPECT_EQ(json::parse(adapter_config_json(*m))["modules_to_save"], json{"norm"});
  // PEFT has no patterns.
  const auto by_pattern = model();
  add_lora(*by_pattern, {.target_modules = {"{q,k}_proj"}, .modules_to_save = {"layers.*.input_layernorm"}});
  const json config = json::parse(adapter_config_json(*by_pattern));
  EXPECT_EQ(config["modules_to_save"],
            (json{"model.layers.0.input_layernorm", "model.layers.1.input_layernorm"}));
  EXPECT_EQ(config["target_modules"].size(), 4u);
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

TEST_F(Lora, ARegularExpressionOfPythonIsNamed) {
  for (const auto& [expression, part] :
       {std::pair{".*(?<!x)c_attn", "has '(?<!'"}, std::pair{"(?i).*c_attn", "has '(?i'"},
        std::pair{".*(?P<layer>c_attn)", "has '(?P'"}}) {
    const auto m = model();
    const Error e = error_of([&] { add_lora(*m, {.target_modules = expression}); });
    EXPECT_NE(std::string(e.what()).find(concat(part, ", which regular expressions of Python have")),
              std::string::npos)
        << e.what();
  }
  const auto m = model();
  add_lora(*m, {.target_modules = ".*(?=c_attn)(?:c_attn)"});
  EXPECT_EQ(lora_layers(*m).size(), 2u);
}

TEST_F(Lora, PartsWithOtherOptionsAreNoOneAdapter) {
  const auto m = model();
  add_lora(*m->find_module("transformer.h.0"), {.target_modules = {"c_attn"}, .r = 2});
  EXPECT_NO_THROW(adapter_config_json(*m));
  add_lora(*m->find_module("transformer.h.1"), {.target_modules = {"c_attn"}, .r = 3});
  const Error e = error_of([&] { adapter_config_json(*m); });
  EXPECT_EQ(e.code(), Errc::unsupported);
  EXPECT_NE(std::string(e.what()).find("parts of the model have LoRA with other options"), std::string::npos)
      << e.what();
  EXPECT_NO_THROW(adapter_config_json(*m->find_module("transformer.h.1")));
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

// ---- parts of a model

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

// ---- the shared fixture

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
  config["zero_optimization"]["stage3_param_persistence_threshold"] = 0;
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
