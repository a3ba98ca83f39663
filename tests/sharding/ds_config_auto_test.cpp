// "auto", arguments, and the origins of values.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/config/arguments.h"
#include "sharding/config/ds_config.h"
#include "sharding/io/json.h"
#include "tests/support/configs_in_notes.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

DsConfig parse(const std::string& text, const TrainingArguments& arguments = {}, const RunFacts& facts = {}) {
  return parse_ds_config(text, "ds.json", arguments, facts);
}

std::string refusal(const std::string& text, const TrainingArguments& arguments = {},
                    const RunFacts& facts = {}) {
  const Error e = test::error_of([&] { parse(text, arguments, facts); });
  EXPECT_EQ(e.code(), Errc::config);
  return e.what();
}

std::string origin(const DsConfig& config, const std::string& path) {
  const auto found = std::ranges::find(config.settings, path, &ResolvedSetting::path);
  return found == config.settings.end() ? "absent" : found->origin;
}

TEST(DsConfigAuto, SizesOfBucketsFollowFromTheHiddenSize) {
  const char* const text = R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}})";
  const DsConfig c = parse(text, {}, {.hidden_size = 125});
  EXPECT_EQ(c.strategy.reduce_bucket_size, 15625);
  EXPECT_EQ(c.strategy.gathers.prefetch_bucket_size, 14062) << "the floor of 14062.5";
  EXPECT_EQ(c.strategy.gathers.param_persistence_threshold, 1250);
  EXPECT_EQ(origin(c, "zero_optimization.reduce_bucket_size"), "auto: hidden size 125");
  std::string missing;
  for (const char* key :
       {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"})
    missing +=
        concat(missing.empty() ? "" : "\n", "ds.json: zero_optimization.", key,
               ": \"auto\" stands for the model's hidden size, which is not given; give it, or write a "
               "value");
  EXPECT_EQ(refusal(text), missing);
}

TEST(DsConfigAuto, OtherKeysOfASectionHaveDeepSpeedsDefault) {
  const DsConfig c = parse(R"({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto",
    "stage3_max_reuse_distance": "auto"}})");
  EXPECT_EQ(c.strategy.gathers.max_live_parameters, 1000000000);
  EXPECT_EQ(origin(c, "zero_optimization.stage3_max_live_parameters"), "auto: DeepSpeed's default");
  EXPECT_NE(refusal(R"({"gradient_predivide_factor": "auto"})").find("stands for no argument"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}})").find("momentum"),
            std::string::npos);
}

constexpr const char* all_auto = R"({
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
    "warmup_num_steps": "auto", "total_num_steps": "auto"}}})";

TEST(DsConfigAuto, ArgumentsStandBehindIt) {
  const DsConfig c = parse(all_auto,
                           {.per_device_train_batch_size = 4,
                            .gradient_accumulation_steps = 3,
                            .learning_rate = 0.25,
                            .adam_beta1 = 0.5,
                            .adam_beta2 = 0.75,
                            .adam_epsilon = 1e-5,
                            .weight_decay = 0.125,
                            .max_grad_norm = 2,
                            .warmup_steps = 7,
                            .total_steps = 70,
                            .precision = DType::bf16,
                            .origin = "command line"},
                           {.ranks = 2});
  EXPECT_EQ(c.sizes, (BatchSizes{24, 4, 3}));
  EXPECT_EQ(c.optimizer,
            (OptimizerConfig{.lr = 0.25, .beta1 = 0.5, .beta2 = 0.75, .eps = 1e-5, .weight_decay = 0.125}));
  EXPECT_EQ(c.gradient_clipping, 2);
  EXPECT_EQ(c.strategy.precision.parameters, DType::bf16);
  EXPECT_EQ(c.schedule, LrSchedule(WarmupDecayLr{.total_num_steps = 70, .max_lr = 0.25, .num_steps = 7}));
  EXPECT_EQ(origin(c, "optimizer.params.lr"), "auto: learning_rate (command line)");
  EXPECT_EQ(origin(c, "train_batch_size"), "auto: from the other batch sizes");
  EXPECT_EQ(origin(c, "scheduler.params.warmup_max_lr"), "auto: optimizer.params.lr");
}

TEST(DsConfigAuto, TheRestHasHuggingFacesDefaults) {
  const RunFacts facts{.ranks = 2, .updates = [](const BatchSizes& sizes) { return 1600 / sizes.train; }};
  const DsConfig c = parse(all_auto, {.warmup_steps = 10}, facts);
  EXPECT_EQ(c.sizes, (BatchSizes{16, 8, 1}));
  EXPECT_EQ(c.optimizer, (OptimizerConfig{.lr = 5e-5}));
  EXPECT_EQ(c.gradient_clipping, 1);
  EXPECT_EQ(c.strategy.precision.parameters, DType::f32);
  EXPECT_EQ(c.schedule, LrSchedule(WarmupDecayLr{.total_num_steps = 100, .max_lr = 5e-5, .num_steps = 10}));
  EXPECT_EQ(origin(c, "optimizer.params.lr"), "auto: Hugging Face's default");
}

TEST(DsConfigAuto, AMissingArgumentIsNamed) {
  EXPECT_EQ(refusal(all_auto),
            "ds.json: scheduler.params.total_num_steps: \"auto\" stands for total_steps, which is not given; "
            "give it, or write a value");
}

TEST(DsConfigAuto, AWarmupHasNoUpdatesByDefault) {
  const RunFacts facts{.updates = [](const BatchSizes&) { return std::int64_t{50}; }};
  const DsConfig c = parse(all_auto, {}, facts);
  EXPECT_EQ(c.schedule, LrSchedule(WarmupDecayLr{.total_num_steps = 50, .max_lr = 5e-5, .num_steps = 1}));
  EXPECT_EQ(origin(c, "scheduler.params.warmup_num_steps"), "auto: Hugging Face's default");
  EXPECT_EQ(parse(all_auto, {.warmup_steps = 0}, facts).schedule, c.schedule);
  EXPECT_EQ(parse("{}", {.warmup_steps = 0}).schedule, LrSchedule(ConstantLr{})) << "nothing to warm up";
}

TEST(DsConfigAuto, SizesAreDerivedFromThoseThatAreKnown) {
  const auto sizes = [](const char* text, const TrainingArguments& a = {}) {
    return required_sizes(parse(text, a, {.ranks = 2}));
  };
  EXPECT_EQ(sizes(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"})"),
            (BatchSizes{64, 32, 1}));
  EXPECT_EQ(sizes(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2})"),
            (BatchSizes{4, 2, 1}));
  EXPECT_EQ(
      sizes(
          R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"})"),
      (BatchSizes{64, 4, 8}));
  EXPECT_EQ(sizes("{}", {.train_batch_size = 12}), (BatchSizes{12, 6, 1})) << "a file that leaves them out";
  EXPECT_EQ(sizes(R"({"gradient_accumulation_steps": 3})", {.per_device_train_batch_size = 5}),
            (BatchSizes{30, 5, 3}));
  const Error e = test::error_of([&] { sizes(R"({"gradient_accumulation_steps": 3})"); });
  EXPECT_NE(std::string(e.what()).find("train_batch_size: missing"), std::string::npos);
}

TEST(DsConfigAuto, AnArgumentAndTheFileMustAgree) {
  EXPECT_EQ(refusal(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})",
                    {.learning_rate = 0.01, .origin = "command line"}),
            "ds.json: optimizer.params.lr: is 0.001, but learning_rate (command line) is 0.01; remove one of "
            "them, or "
            "write \"auto\" here");
  EXPECT_NE(refusal(R"({"bf16": {"enabled": true}})", {.precision = DType::f16}).find("bf16.enabled"),
            std::string::npos);
  EXPECT_EQ(parse(R"({"train_batch_size": 8})", {.train_batch_size = 8}).sizes.train, 8);
}

TEST(DsConfigAuto, AnArgumentThatNothingUsesIsAnError) {
  EXPECT_NE(refusal("{}", {.warmup_steps = 10}).find("no key for warmup_steps"), std::string::npos);
  EXPECT_NE(refusal(R"({"optimizer": {"type": "SGD"}})", {.adam_beta1 = 0.5}).find("no key for adam_beta1"),
            std::string::npos);
}

TEST(DsConfigAuto, EveryValueHasAnOrigin) {
  const DsConfig c =
      parse(R"({"train_batch_size": 8, "zero_optimization": {"cpu_offload": true, "stage": 1}})",
            {.max_grad_norm = 0.5, .origin = "command line"});
  EXPECT_EQ(origin(c, "train_batch_size"), "file");
  EXPECT_EQ(origin(c, "train_micro_batch_size_per_gpu"), "from the other batch sizes");
  EXPECT_EQ(origin(c, "gradient_clipping"), "max_grad_norm (command line)");
  EXPECT_EQ(origin(c, "zero_optimization.offload_optimizer.device"),
            "file, as zero_optimization.cpu_offload");
  EXPECT_EQ(origin(c, "dataloader_drop_last"), "default");
  const DsConfig linear =
      parse("{}", {.lr_scheduler_type = "linear", .total_steps = 9, .origin = "command line"});
  EXPECT_EQ(origin(linear, "scheduler.type"), "lr_scheduler_type (command line)");
  EXPECT_EQ(origin(linear, "scheduler.params.end_factor"), "lr_scheduler_type (command line)");
  EXPECT_EQ(origin(linear, "scheduler.params.total_iters"), "auto: total_steps (command line)");
  const std::string table = resolved_table(c);
  EXPECT_EQ(table.rfind("configuration: ds.json\n  train_batch_size ", 0), 0u) << table;
  EXPECT_NE(table.find("max_grad_norm (command line)\n"), std::string::npos) << table;
  EXPECT_EQ(table.find("fp16.loss_scale"), std::string::npos) << "a section that is not in use\n" << table;
}

/// The leaves of a section, by path.
void expect_settings(const DsConfig& c, const nlohmann::json& expected, const std::string& path = "") {
  for (const auto& [key, value] : expected.items()) {
    const std::string at = path.empty() ? key : path + "." + key;
    if (value.is_object()) {
      expect_settings(c, value, at);
      continue;
    }
    const auto found = std::ranges::find(c.settings, at, &ResolvedSetting::path);
    ASSERT_TRUE(found != c.settings.end()) << at;
    EXPECT_EQ(nlohmann::json::parse(found->value), value) << at;
  }
}

/// What transformers' HfTrainerDeepSpeedConfig makes of a file and its arguments.
TEST(DsConfigAuto, IsResolvedAsByHuggingFace) {
  const std::filesystem::path folder = std::filesystem::path(RZ_SOURCE_DIR) / "../shared/fixtures/auto";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no ../shared/fixtures/auto beside the sources";
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().string();
    SCOPED_TRACE(file);
    const nlohmann::json data = parse_json(read_text_file(file), file, JsonDialect::strict);
    TrainingArguments a;
    for (const auto& [key, value] : data["training_arguments"].items()) {
      const std::string word = concat("--", key, "=", value.dump());
      const char* const words[] = {word.c_str()};
      set_argument(a, *find_flag(word), words, 0);
    }
    const RunFacts facts{
        .ranks = data["world_size"].get<int>(),
        .hidden_size = data["hidden_size"].get<std::int64_t>(),
        .updates = [&](const BatchSizes&) { return data["num_training_steps"].get<std::int64_t>(); }};
    const std::string config = data["config"].dump();
    if (data["error"].is_null())
      expect_settings(parse(config, a, facts), data["resolved"]);
    else
      refusal(config, a, facts);
    ++files;
  }
  EXPECT_GE(files, 5);
}

// ---- the configurations in notes of users

TEST(DsConfigAuto, ConfigurationsInNotesAreRead) {
  const RunFacts facts{.ranks = 2, .hidden_size = 128};
  const DsConfig trainer = parse(test::trainer_config, {}, facts);
  EXPECT_EQ(trainer.stage, 3);
  EXPECT_EQ(trainer.sizes, (BatchSizes{4, 2, 1}));
  EXPECT_EQ(trainer.strategy.reduce_bucket_size, 128 * 128);
  EXPECT_FALSE(trainer.optimizer);
  const DsConfig teacher = parse(test::teacher_config, {}, facts);
  EXPECT_FALSE(teacher.optimizer) << "inference";
  EXPECT_EQ(teacher.sizes, (BatchSizes{2, 1, 1}));
  const DsConfig student = parse(test::student_config, {.learning_rate = 1e-3, .warmup_steps = 3}, facts);
  EXPECT_EQ(student.strategy.offload_optimizer.device, OffloadDevice::cpu);
  EXPECT_EQ(student.schedule, LrSchedule(WarmupLr{.max_lr = 1e-3, .num_steps = 3}));
  EXPECT_EQ(student.optimizer->weight_decay, 0) << "Hugging Face's default, not torch's";
}

// ---- the document

TEST(DsConfigDocument, IsGeneratedFromTheTables) {
  const std::string path = RZ_SOURCE_DIR "/docs/configuration.md";
  const std::string document = configuration_document();
  if (std::getenv("RZ_WRITE_DOCUMENTS") != nullptr) std::ofstream(path) << document;
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_EQ(read_text_file(path), document) << "run this test with RZ_WRITE_DOCUMENTS=1";
}

}  // namespace
}  // namespace rz
