// Language models on meshes, against one rank: losses, norms and values with all that masks, sums or divides
// them; the same bits in every stage of a mesh; checkpoints, models and adapters from each mesh to another.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/json.h"
#include "sharding/lm/updates.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using nlohmann::json;

/// Heads and groups of heads that 2, 3 and 4 ranks divide; 257 rows that none of them does.
const json gpt2 = json::parse(R"({"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 24,
    "n_positions": 16, "vocab_size": 257, "initializer_range": 0.2,
    "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
const json llama = json::parse(R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 24,
    "intermediate_size": 36, "num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 2,
    "max_position_embeddings": 16, "vocab_size": 257, "tie_word_embeddings": false,
    "initializer_range": 0.2})");
/// 37 columns are 19 and 18, 13 + 13 + 11, 3 · 10 + 7.
const json uneven = json::parse(R"({"intermediate_size": 37})");
const json few = json::parse(R"({"intermediate_size": 5})");  // the last of four ranks has none
const json gpt_neox = json::parse(R"({"model_type": "gpt_neox", "num_hidden_layers": 2, "hidden_size": 24,
    "intermediate_size": 37, "num_attention_heads": 12, "rotary_pct": 1.0, "max_position_embeddings": 16,
    "vocab_size": 257, "tie_word_embeddings": false, "hidden_act": "gelu", "initializer_range": 0.2})");

json with(json base, const json& changes) {
  base.merge_patch(changes);
  return base;
}

struct Row {
  const char* name;
  json model, config;
  double rounding =
      1e-7;  ///< of a loss, relative; ten times of a norm, a hundred times of what updates changed
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

/// Two updates of eight micro-batches of one sample, over the ranks with other data, and clipped. eps: a
/// gradient that is 0 but for rounding, such as that of a bias of keys, then moves nothing.
lab::Run run_of(const Row& row, const Folder& folder, const json& changes) {
  const json all{
      {"train_batch_size", 8},
      {"train_micro_batch_size_per_gpu", 1},
      {"gradient_clipping", 0.5},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-2}, {"eps", 1e-3}, {"weight_decay", 0.1}}}}}};
  folder.put("config.json", row.model.dump());
  return {.model = lab::language(
              {12}, [path = folder / "config.json"] { return language_model_from_config(path); },
              with(all, with(row.config, changes)).dump()),
          .updates = 2,
          // The first micro-batches decide on the expected terms.
          .options = [](EngineOptions& o) { o.decay = Decay::all, o.expected_terms.reset(); }};
}

void expect_near(const UpdateReport& a, const UpdateReport& b, double rounding) {
  EXPECT_NEAR(a.loss, b.loss, rounding * b.loss) << "update " << a.step;
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 10 * rounding * b.grad_norm) << "update " << a.step;
}

double norm_of_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum);
}

const json lora{{"target_modules", "all-linear"}, {"r", 3}, {"lora_alpha", 12}, {"lora_dropout", 0.2}};
const json no_dropout = with(lora, {{"lora_dropout", 0}});
const json all_dropouts{{"embd_pdrop", 0.1}, {"attn_pdrop", 0.1}, {"resid_pdrop", 0.1}};
const json lamb{{"type", "Lamb"}, {"params", {{"lr", 1e-2}}}};
/// Some parameters stay whole on every rank, as most do by default in models of this size.
const json some_persist{{"zero_optimization", {{"stage3_param_persistence_threshold", 200}}}};
const json invariant{{"ringzero", {{"deterministic", "world_size_invariant"}}}};
const json bf16{{"bf16", {{"enabled", true}}}, {"data_types", {{"grad_accum_dtype", "fp32"}}}};
const json by_sequence{{"ringzero", {{"sequence_parallel", true}}}};

const Row rows[] = {
    {"gpt2_dropout", with(gpt2, all_dropouts), {}},
    {"gpt2_dropout_by_sequence", with(gpt2, all_dropouts), by_sequence},
    {"gpt2_untied_lamb", with(gpt2, {{"tie_word_embeddings", false}}), {{"optimizer", lamb}}},
    {"gpt2_lora", with(gpt2, all_dropouts), with({{"ringzero", {{"lora", lora}}}}, some_persist)},
    {"llama_dropout", with(llama, {{"attention_dropout", 0.2}}), some_persist},
    {"llama_tied_lamb_by_sequence", with(llama, {{"tie_word_embeddings", true}}),
     with({{"optimizer", lamb}}, by_sequence)},
    {"llama_lora", llama, {{"ringzero", {{"lora", lora}}}}},
    {"llama_bf16", llama, bf16, 2e-3},
    {"llama_uneven_tied", with(with(llama, uneven), {{"tie_word_embeddings", true}}), {}},
    {"llama_uneven_lora", with(llama, uneven), {{"ringzero", {{"lora", lora}}}}},
    {"llama_uneven_bf16", with(llama, uneven), bf16, 2e-3},
    {"llama_few_columns_lora", with(llama, few), {{"ringzero", {{"lora", lora}}}}},
    {"llama_few_columns_lamb", with(llama, few), {{"optimizer", lamb}}},
    {"gpt_neox_uneven_lamb", gpt_neox, {{"optimizer", lamb}}},
    {"gpt_neox_uneven_by_sequence", gpt_neox, by_sequence},
};

class MeshModels : public testing::TestWithParam<Row> {};

/// In the order of a run whose bits do not depend on the number of ranks, masks are those of the samples.
TEST_P(MeshModels, TrainAsOnOneRankWithTheSameBitsInEveryStage) {
  const Row& row = GetParam();
  const Folder folder;
  lab::Run run = run_of(row, folder, invariant);
  const lab::Trace one = lab::train(run);
  run.updates = 0;
  const double change = norm_of_difference(one.values, lab::train(run).values);
  EXPECT_GT(change, 0);
  run.updates = 2;
  for (const MeshSizes& mesh :
       {MeshSizes{1, 1, 2}, MeshSizes{1, 1, 3}, MeshSizes{1, 1, 4}, MeshSizes{1, 2, 2}, MeshSizes{2, 2, 1},
        MeshSizes{2, 1, 2}, MeshSizes{2, 2, 2}}) {
    SCOPED_TRACE(describe(mesh));
    run.mesh = mesh;
    run.ranks = mesh.ranks();
    const lab::Trace on_mesh = lab::train_in_every_strategy(run);
    for (std::size_t i = 0; i < 2; ++i) expect_near(on_mesh.updates.at(i), one.updates.at(i), row.rounding);
    EXPECT_LT(norm_of_difference(on_mesh.values, one.values), 100 * row.rounding * change);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, MeshModels, testing::ValuesIn(rows),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- files

/// All tensors of a source, by name.
std::map<std::string, std::vector<std::byte>> contents(const TensorSource& source) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const TensorInfo& t : source.tensors()) {
    std::vector<std::byte>& bytes = all[t.name];
    bytes.resize(t.bytes);
    source.read_bytes(t, 0, bytes);
  }
  return all;
}

void expect_same_contents(const TensorSource& a, const TensorSource& b) {
  const auto of_a = contents(a), of_b = contents(b);
  EXPECT_TRUE(
      std::ranges::any_of(of_a, [](const auto& t) { return t.first.find("exp_avg") != std::string::npos; }));
  EXPECT_EQ(of_a.size(), of_b.size());
  for (const auto& [name, bytes] : of_a) {
    EXPECT_GT(bytes.size(), 0u) << name;
    ASSERT_TRUE(of_b.contains(name)) << name;
    EXPECT_TRUE(of_b.at(name) == bytes) << name << " has other bits";
  }
}

class MeshFiles : public testing::TestWithParam<Row> {};

/// Each mesh reads what the one before has written. Values and optimizer states are in f32.
TEST_P(MeshFiles, KeepTheirBitsFromEachMeshToTheNext) {
  const Row& row = GetParam();
  const std::pair<MeshSizes, StrategyKind> meshes[] = {
      {{1, 2, 2}, StrategyKind::zero3}, {{1, 3, 1}, StrategyKind::zero2}, {{1, 1, 4}, StrategyKind::zero1},
      {{2, 2, 2}, StrategyKind::zero3}, {{1, 1, 3}, StrategyKind::zero3}, {{1, 1, 1}, StrategyKind::ddp}};
  const Folder folder;
  const auto path = [&](const char* what, std::size_t i) { return folder / concat(what, i).c_str(); };
  std::vector<UpdateReport> next;
  for (std::size_t i = 0; i < std::size(meshes); ++i) {
    const MeshSizes& mesh = meshes[i].first;
    SCOPED_TRACE(concat("mesh ", i, ", ", describe(mesh)));
    lab::Run run = run_of(row, folder, {{"train_batch_size", 12}});
    run.strategy = meshes[i].second;
    run.ranks = mesh.ranks();
    run.mesh = mesh;
    run.start = [&](Engine& engine, Module&) {
      EXPECT_EQ(engine.load_checkpoint(path("checkpoint", i == 0 ? 0 : i - 1)).has_value(), i > 0);
    };
    run.end = [&](Engine& engine, Module& model) {
      engine.save_checkpoint(path("checkpoint", i));
      save(engine, dynamic_cast<LanguageModel&>(model), path("model", i));
      if (lora_options(model)) engine.save_adapter(path("adapter", i));
    };
    lab::train(run);
    run.updates = 3;
    run.start = [&](Engine& engine, Module&) { EXPECT_TRUE(engine.load_checkpoint(path("checkpoint", i))); };
    run.end = {};
    next.push_back(lab::train(run).updates.at(0));
    EXPECT_EQ(next[i].step, 2u);
    expect_near(next[i], next[0], row.rounding);
    if (i == 0) continue;
    expect_same_contents(open_checkpoint(path("checkpoint", i), TensorPart::all),
                         open_checkpoint(path("checkpoint", 0), TensorPart::all));
    for (const char* file : {"model.safetensors", "config.json"})
      EXPECT_TRUE(read_text_file(concat(path("model", i), "/", file)) ==
                  read_text_file(concat(path("model", 0), "/", file)))
          << file;
    if (!row.config.contains("ringzero")) continue;
    EXPECT_TRUE(read_text_file(path("adapter", i) + "/adapter_model.safetensors") ==
                read_text_file(path("adapter", 0) + "/adapter_model.safetensors"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rows, MeshFiles,
    testing::Values(Row{"gpt2", gpt2, {}}, Row{"llama_bf16", llama, bf16, 2e-3},
                    Row{"llama_lora", llama, {{"ringzero", {{"lora", no_dropout}}}}},
                    Row{"llama_uneven_lora", with(llama, uneven), {{"ringzero", {{"lora", no_dropout}}}}},
                    Row{"llama_few_columns", with(llama, few), {}}, Row{"gpt_neox_uneven", gpt_neox, {}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace rz::lm
