// LoRA: which layers its options name, in a program, a configuration and arguments; and mistakes in them.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "sharding/engine/read_configuration.h"
#include "sharding/huggingface/adapter.h"
#include "tests/support/error_of.h"
#include "tests/support/small_lora.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using nlohmann::json;

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

}  // namespace
}  // namespace rz::lm
