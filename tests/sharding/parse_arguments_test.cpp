/// Options of an engine from a command line, with Hugging Face's names.
#include "sharding/engine/parse_arguments.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace rz {
namespace {

EngineOptions parsed(std::vector<const char*> words) {
  words.insert(words.begin(), "program");
  return parse_arguments(static_cast<int>(words.size()), words.data());
}

std::string refused(std::vector<const char*> words) {
  const Error e = test::error_of([&] { parsed(std::move(words)); });
  EXPECT_EQ(e.code(), Errc::config) << e.what();
  return e.what();
}

TEST(ParseArguments, EveryFlagSetsItsField) {
  const EngineOptions o = parsed({"--deepspeed",
                                  "ds.json",
                                  "--seed=3",
                                  "--train_batch_size",
                                  "64",
                                  "--per-device-train-batch-size",
                                  "8",
                                  "--gradient_accumulation_steps=4",
                                  "--learning_rate",
                                  "1e-3",
                                  "--adam_beta1",
                                  "0.8",
                                  "--adam_beta2",
                                  "0.95",
                                  "--adam_epsilon=1e-6",
                                  "--weight_decay",
                                  "0.1",
                                  "--max_grad_norm",
                                  "2",
                                  "--warmup_steps",
                                  "10",
                                  "--total_steps",
                                  "100",
                                  "--ddp_find_unused_parameters=false",
                                  "--ddp_static_graph=True",
                                  "--ddp_broadcast_buffers",
                                  "0",
                                  "--ddp_comm_hook=fp16",
                                  "--output_dir=out",
                                  "--resume_from_checkpoint",
                                  "true",
                                  "--save_steps=1",
                                  "--save_minutes=2",
                                  "--save_total_limit=3",
                                  "--async_save=true",
                                  "--eval_steps=4",
                                  "--metric_for_best_model=f1",
                                  "--greater_is_better=true",
                                  "--load_best_model_at_end=false",
                                  "--early_stopping_patience=5",
                                  "--early_stopping_threshold=0.5",
                                  "--bf16"});
  EXPECT_EQ(o.config, "ds.json");
  EXPECT_EQ(o.seed, 3u);
  const TrainingArguments& a = o.arguments;
  EXPECT_EQ(a.ddp_find_unused_parameters, false);
  EXPECT_EQ(a.ddp_static_graph, true);
  EXPECT_EQ(a.ddp_broadcast_buffers, false);
  EXPECT_EQ(a.ddp_comm_hook, "fp16");
  EXPECT_EQ(a.output_dir, "out");
  EXPECT_EQ(a.resume_from_checkpoint, "true");
  EXPECT_EQ(a.save_steps, 1);
  EXPECT_EQ(a.save_minutes, 2);
  EXPECT_EQ(a.save_total_limit, 3);
  EXPECT_EQ(a.async_save, true);
  EXPECT_EQ(a.eval_steps, 4);
  EXPECT_EQ(a.metric_for_best_model, "f1");
  EXPECT_EQ(a.greater_is_better, true);
  EXPECT_EQ(a.load_best_model_at_end, false);
  EXPECT_EQ(a.early_stopping_patience, 5);
  EXPECT_EQ(a.early_stopping_threshold, 0.5);
  EXPECT_NE(refused({"--ddp_static_graph=maybe"}).find("expected true or false"), std::string::npos);
  EXPECT_EQ(a.train_batch_size, 64);
  EXPECT_EQ(a.per_device_train_batch_size, 8);
  EXPECT_EQ(a.gradient_accumulation_steps, 4);
  EXPECT_EQ(a.learning_rate, 1e-3);
  EXPECT_EQ(a.adam_beta1, 0.8);
  EXPECT_EQ(a.adam_beta2, 0.95);
  EXPECT_EQ(a.adam_epsilon, 1e-6);
  EXPECT_EQ(a.weight_decay, 0.1);
  EXPECT_EQ(a.max_grad_norm, 2.0);
  EXPECT_EQ(a.warmup_steps, 10);
  EXPECT_EQ(a.total_steps, 100);
  EXPECT_EQ(a.precision, DType::bf16);
  EXPECT_EQ(a.origin, "command line");
}

TEST(ParseArguments, WithoutWordsNothingIsSet) {
  const EngineOptions o = parsed({});
  EXPECT_TRUE(o.config.empty());
  EXPECT_FALSE(o.arguments.learning_rate);
  EXPECT_FALSE(o.arguments.precision);
}

TEST(ParseArguments, WrongWordsAreNamed) {
  EXPECT_EQ(refused({"--learning_rat", "1"}), "--learning_rat: unknown flag; nearest: --learning_rate");
  EXPECT_EQ(refused({"--xyzzy"}), "--xyzzy: unknown flag");
  EXPECT_EQ(refused({"ds.json"}), "ds.json: expected a flag, e.g. --deepspeed FILE");
  EXPECT_EQ(refused({"--learning_rate"}), "--learning_rate: a value is missing");
  EXPECT_EQ(refused({"--learning_rate", "fast"}), "--learning_rate fast: expected a number");
  EXPECT_EQ(refused({"--seed", "1.5"}), "--seed 1.5: expected an integer");
  EXPECT_EQ(refused({"--bf16=true"}), "--bf16=true: --bf16 has no value");
  EXPECT_EQ(refused({"--bf16", "--fp16"}), "--bf16 and --fp16 exclude each other");
}

}  // namespace
}  // namespace rz
