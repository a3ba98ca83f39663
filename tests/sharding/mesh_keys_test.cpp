/// Sizes of a mesh from configurations and arguments: own keys, those of others, and what contradicts.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "comm/core/error.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/parse_arguments.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

DsConfig read(const std::string& text, int ranks, int ranks_per_node = 0, const TrainingArguments& a = {}) {
  return parse_ds_config(text, "ds.json", a, {.ranks = ranks, .ranks_per_node = ranks_per_node});
}

/// Of words of a command line.
TrainingArguments arguments(std::vector<const char*> words) {
  words.insert(words.begin(), "program");
  return parse_arguments(static_cast<int>(words.size()), words.data()).arguments;
}

void expect_refused(const std::string& text, int ranks, const std::string& message,
                    const TrainingArguments& a = {}, int ranks_per_node = 0) {
  const Error e = test::error_of([&] { read(text, ranks, ranks_per_node, a); });
  EXPECT_EQ(e.code(), Errc::config) << e.what();
  EXPECT_EQ(std::string(e.what()), message);
}

std::string mesh(const std::string& keys) { return R"({"ringzero": {"mesh": {)" + keys + "}}}"; }
std::string zero(const std::string& keys) { return R"({"zero_optimization": {)" + keys + "}}"; }
std::string tensor_parallel(const std::string& keys) { return R"({"tensor_parallel": {)" + keys + "}}"; }

TEST(MeshKeys, WithoutAKeyAllRanksShard) {
  EXPECT_EQ(read("{}", 8).mesh, MeshSizes{});
  EXPECT_EQ(read(mesh(R"("shard": "auto")"), 8).mesh, MeshSizes{});
  EXPECT_EQ(resolved_table(read("{}", 8)).find("mesh"), std::string::npos);
}

TEST(MeshKeys, OwnKeysAreNumbersOrAuto) {
  EXPECT_EQ(read(mesh(R"("replicate": 2)"), 8).mesh, (MeshSizes{2, 4, 1}));
  EXPECT_EQ(read(mesh(R"("replicate": "auto", "shard": 2, "tp": 2)"), 8).mesh, (MeshSizes{2, 2, 2}));
  EXPECT_EQ(read(mesh(R"("tp": "auto", "shard": "auto")"), 16, 8).mesh, (MeshSizes{1, 2, 8}));
  EXPECT_EQ(read(mesh(R"("replicate": "auto")"), 16, 4).mesh, (MeshSizes{4, 4, 1}));
}

TEST(MeshKeys, KeysOfDeepSpeedHaveTheirMeaning) {
  EXPECT_EQ(read(zero(R"("stage": 3, "mics_shard_size": 2)"), 8).mesh, (MeshSizes{4, 2, 1}));
  EXPECT_EQ(read(zero(R"("mics_shard_size": -1)"), 8).mesh, MeshSizes{});
  EXPECT_EQ(read(tensor_parallel(R"("autotp_size": 2)"), 8).mesh, (MeshSizes{1, 4, 2}));
  EXPECT_EQ(read(tensor_parallel(R"("tp_size": 4)"), 8).mesh, (MeshSizes{1, 2, 4}));
  EXPECT_EQ(read(tensor_parallel(R"("tp": {"tp_size": 4})"), 8).mesh, (MeshSizes{1, 2, 4}));
  EXPECT_EQ(read(tensor_parallel(R"("tensor_parallel": {"tp_size": 8})"), 8).mesh, (MeshSizes{1, 1, 8}));
  EXPECT_EQ(read(tensor_parallel(R"("autotp_size": 0, "tp": {"tp_size": 1})"), 8).mesh, MeshSizes{});
  EXPECT_EQ(read(R"({"data_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}})", 8).mesh,
            (MeshSizes{1, 4, 2}));
}

TEST(MeshKeys, FlagsOfAcceleratesAndOneOfItsOwn) {
  EXPECT_EQ(read("{}", 8, 0, arguments({"--mesh", "replicate=2,shard=auto,tp=2"})).mesh,
            (MeshSizes{2, 2, 2}));
  EXPECT_EQ(read("{}", 16, 8, arguments({"--mesh=tp=auto"})).mesh, (MeshSizes{1, 2, 8}));
  EXPECT_EQ(read("{}", 8, 0,
                 arguments({"--parallelism_config_dp_replicate_size", "2",
                            "--parallelism_config_dp_shard_size=4", "--parallelism-config-tp-size", "1"}))
                .mesh,
            (MeshSizes{2, 4, 1}));
  EXPECT_EQ(read(mesh(R"("tp": "auto")"), 8, 0, arguments({"--mesh", "tp=2"})).mesh, (MeshSizes{1, 4, 2}))
      << "auto stands for the argument";
}

TEST(MeshKeys, WrongFlagsAreErrorsOfThem) {
  const auto refused = [](std::vector<const char*> words) {
    return std::string(test::error_of([&] { arguments(std::move(words)); }).what());
  };
  EXPECT_EQ(refused({"--mesh", "replicate=2,pp=2"}),
            "--mesh replicate=2,pp=2: 'pp=2' is no dimension with a size; write replicate=2,shard=auto,tp=2");
  EXPECT_EQ(refused({"--mesh", "tp=0"}), "--mesh 0: expected a number of ranks from 1 to 1048576, or auto");
  EXPECT_EQ(refused({"--mesh", "tp=2", "--parallelism_config_tp_size", "4"}),
            "--parallelism_config_tp_size: tp is 4, but was given before as 2; remove one of them");
  EXPECT_NE(refused({"--tensor_parallel_size", "2"}).find("--mesh tp=N does it"), std::string::npos);
  EXPECT_NE(refused({"--fsdp_reshard_after_forward", "2"}).find("zero_hpz_partition_size"),
            std::string::npos);
}

TEST(MeshKeys, ContradictionsShowBothNumbers) {
  expect_refused(R"({"ringzero": {"mesh": {"tp": 4}}, "tensor_parallel": {"autotp_size": 2}})", 8,
                 "ds.json: tensor_parallel.autotp_size: is 2, but ringzero.mesh.tp is 4; remove one of them");
  expect_refused(tensor_parallel(R"("autotp_size": 2)"), 8,
                 "ds.json: tensor_parallel.autotp_size: is 2, but --mesh (command line) is 4; remove one of "
                 "them",
                 arguments({"--mesh", "tp=4"}));
  expect_refused(R"({"ringzero": {"mesh": {"shard": 4}}, "zero_optimization": {"mics_shard_size": 2}})", 8,
                 "ds.json: zero_optimization.mics_shard_size: is 2, but ringzero.mesh.shard is 4; remove one "
                 "of them");
  expect_refused(mesh(R"("tp": 4)"), 8,
                 "ds.json: ringzero.mesh.tp: is 4, but --mesh (command line) is 2; remove one of them, or "
                 "write \"auto\" here",
                 arguments({"--mesh", "tp=2"}));
  expect_refused(R"({"data_parallel_size": 8, "tensor_parallel": {"autotp_size": 2}})", 8,
                 "ds.json: data_parallel_size: is 8, but the mesh shard 4 x tp 2 has 4 ranks with data of "
                 "their own; remove it, or change ringzero.mesh");
}

TEST(MeshKeys, SizesThatDoNotFitNameTheKeyAndWhatWould) {
  expect_refused(
      tensor_parallel(R"("autotp_size": 3)"), 8,
      "ds.json: tensor_parallel.autotp_size: mesh shard auto x tp 3 on 8 ranks: the product of the "
      "sizes is 3, which does not divide the ranks; what would fit: tp 1, 2, 4 or 8");
  expect_refused(zero(R"("mics_shard_size": 3)"), 8,
                 "ds.json: zero_optimization.mics_shard_size: mesh replicate auto x shard 3 on 8 ranks: the "
                 "product of the sizes is 3, which does not divide the ranks; what would fit: shard 1, 2, 4 "
                 "or 8");
  expect_refused("{}", 6,
                 "ds.json: --mesh (command line): mesh replicate 2 x shard 2 on 6 ranks: the product of the "
                 "sizes is 4; what would fit: replicate 3, or shard 3",
                 arguments({"--mesh", "replicate=2,shard=2"}));
}

TEST(MeshKeys, ABatchIsSharedByRanksWithOtherData) {
  const auto sizes = [](const std::string& batch) {
    return read("{" + batch + R"(, "ringzero": {"mesh": {"replicate": 2, "tp": 2}}})", 8).sizes;
  };
  EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2)"),
            (BatchSizes{24, 3, 2}));
  EXPECT_EQ(sizes(R"("train_batch_size": 12)"), (BatchSizes{12, 3, 1}));
  expect_refused(
      R"({"train_batch_size": 6, "ringzero": {"mesh": {"tp": 2}}})", 8,
      "ds.json: train_batch_size: 6 cannot be shared out evenly over 4 ranks with data of their own "
      "(8 ranks / tp 2); use 4 or 8, or another number of ranks");
}

/// The schedule is read after the mesh, wherever the file has it.
TEST(MeshKeys, SchedulesCountUpdatesOfTheMesh) {
  const std::string text = R"({"train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1}},
    "ringzero": {"mesh": {"tp": 4}}})";
  const DsConfig c =
      parse_ds_config(text, "ds.json", {},
                      {.ranks = 8, .updates = [](const BatchSizes& sizes) { return 400 / sizes.train; }});
  EXPECT_EQ(std::get<WarmupDecayLr>(c.schedule).total_num_steps, 100);
}

TEST(MeshKeys, TheResolvedConfigurationHasNumbersAndReadsAsTheSame) {
  const DsConfig c = read(zero(R"("stage": 3, "mics_shard_size": 2)"), 8);
  const std::string json = resolved_json(c), table = resolved_table(c);
  for (const char* part : {"ringzero.mesh.replicate", "from the other sizes", "mics_shard_size"})
    EXPECT_NE(table.find(part), std::string::npos) << table;
  EXPECT_EQ(read(json, 8).mesh, c.mesh) << json;
}

TEST(MeshKeys, WorldSizeInvarianceCountsRanksWithOtherData) {
  const std::string text = R"({"ringzero": {"deterministic": "world_size_invariant", "mesh": {"tp": 3}}})";
  EXPECT_TRUE(read(text, 6).world_size_invariant);
  expect_refused(
      text, 9,
      "ds.json: ringzero.deterministic: world_size_invariant needs 1, 2, 4, 8, … ranks with data of "
      "their own, found 3; start as many, or remove the key");
}

TEST(MeshKeys, HpzDividesAGroupOfShards) {
  EXPECT_EQ(read(zero(R"("stage": 3, "zero_hpz_partition_size": 2)"), 8).strategy.zero_hpz_partition_size, 2);
  expect_refused(zero(R"("stage": 3, "zero_hpz_partition_size": 3)"), 8,
                 "ds.json: zero_optimization.zero_hpz_partition_size: is 3, but the mesh is shard 8; use a "
                 "divisor of shard");
  expect_refused(zero(R"("stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 4)"), 8,
                 "ds.json: zero_optimization.zero_hpz_partition_size: is 2, but the mesh is replicate 2 x "
                 "shard 4; use the size of shard, or no replicas");
  EXPECT_EQ(read(zero(R"("stage": 2, "zero_hpz_partition_size": 2)"), 8).warnings.size(), 1u);
}

TEST(MeshKeys, WhatNeedsWholeLayersIsRefusedWithTp) {
  expect_refused(
      R"({"optimizer": {"type": "Muon"}, "tensor_parallel": {"autotp_size": 2}})", 4,
      "ds.json: optimizer.type: Muon needs whole matrices, but on the mesh shard 2 x tp 2 ranks have "
      "parts of them; choose another optimizer, or choose tp 1");
  for (const std::string hook : {"fp16", "bf16", "power_sgd", "batched_power_sgd"})
    expect_refused(
        R"({"ringzero": {"mesh": {"tp": 2}, "comm_hook": ")" + hook + "\"}}", 4,
        "ds.json: ringzero.comm_hook: " + hook +
            " compresses gradients of whole layers, but on the mesh shard 2 x tp 2 ranks have parts "
            "of them; remove it, or choose tp 1");
}

TEST(MeshKeys, KeysWithoutEffectAreRefusedOrWarnedOf) {
  for (const char* key : {R"("partition_config": {"layer_specs": []})", R"("preset_model": "llama")"})
    EXPECT_EQ(test::error_of([&] { read(tensor_parallel(key), 2); }).code(), Errc::unsupported) << key;
  EXPECT_EQ(read(tensor_parallel(R"("vocab_parallel_lm_head": false)"), 2).warnings.size(), 1u);
  EXPECT_EQ(read(zero(R"("mics_hierarchical_params_gather": true)"), 2).warnings.size(), 1u);
}

}  // namespace
}  // namespace rz
