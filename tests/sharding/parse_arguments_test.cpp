/// Options of an engine from a command line, with Hugging Face's names.
#include "sharding/engine/parse_arguments.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sharding/config/arguments.h"
#include "sharding/parallel/world.h"
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

TEST(ParseArguments, FlagsOfTrainingSetTheirFields) {
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
                                  "--bf16"});
  EXPECT_EQ(o.config, "ds.json");
  EXPECT_EQ(o.seed, 3u);
  const TrainingArguments& a = o.arguments;
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

TEST(ParseArguments, FlagsOfDdpSetTheirFields) {
  const TrainingArguments a = parsed({"--ddp_find_unused_parameters=false", "--ddp_static_graph=True",
                                      "--ddp_broadcast_buffers", "0", "--ddp_comm_hook=fp16"})
                                  .arguments;
  EXPECT_EQ(a.ddp_find_unused_parameters, false);
  EXPECT_EQ(a.ddp_static_graph, true);
  EXPECT_EQ(a.ddp_broadcast_buffers, false);
  EXPECT_EQ(a.ddp_comm_hook, "fp16");
  EXPECT_NE(refused({"--ddp_static_graph=maybe"}).find("expected true or false"), std::string::npos);
}

TEST(ParseArguments, FlagsOfCheckpointsSetTheirFields) {
  const TrainingArguments a =
      parsed({"--output_dir=out", "--resume_from_checkpoint", "true", "--save_steps=1", "--save_minutes=2",
              "--save_total_limit=3", "--async_save=true", "--eval_steps=4", "--metric_for_best_model=f1",
              "--greater_is_better=true", "--load_best_model_at_end=false", "--early_stopping_patience=5",
              "--early_stopping_threshold=0.5"})
          .arguments;
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
  EXPECT_EQ(refused({"--bf16", "--fp16"}), "--bf16, --fp16 and --precision exclude each other");
  EXPECT_EQ(refused({"--max_grad_norm", "-1"}), "--max_grad_norm -1: must be from 0 to 3.4e+38");
  EXPECT_EQ(refused({"--lr_scheduler_type=polynomial"}),
            "--lr_scheduler_type polynomial: choose one of linear cosine constant constant_with_warmup "
            "reduce_lr_on_plateau");
  EXPECT_EQ(refused({"--save_strategy", "epoch"}),
            "--save_strategy epoch: not supported; give --save_steps N, the updates of an epoch");
  EXPECT_EQ(refused({"--warmup_steps=1", "--warmup_ratio=0.1"}),
            "--warmup_steps and --warmup_ratio exclude each other");
  EXPECT_EQ(
      refused({"--report_to", "wandb"}),
      "--report_to: a flag of Trainer without a counterpart here: enable tensorboard or csv_monitor in the "
      "configuration");
}

TEST(ParseArguments, DeepSpeedsFlagsNameOneFile) {
  EXPECT_EQ(parsed({"--deepspeed", "--deepspeed_config", "ds.json"}).config, "ds.json");
  EXPECT_EQ(parsed({"--deepspeed_config=ds.json", "--deepspeed", "--local_rank=-1"}).config, "ds.json");
  EXPECT_EQ(parsed({"--deepspeed-config", "ds.json"}).config, "ds.json");
  EXPECT_EQ(parsed({"--deepspeed", "ds.json", "--deepspeed_config", "ds.json", "--local_rank", "0"}).config,
            "ds.json");
  EXPECT_EQ(
      refused({"--deepspeed"}),
      "--deepspeed: a file is missing; give --deepspeed FILE or --deepspeed_config FILE, or set RZ_CONFIG");
  EXPECT_EQ(refused({"--deepspeed=a.json", "--deepspeed_config=b.json"}),
            "--deepspeed_config b.json: another configuration was given before: a.json; remove one of them");
  EXPECT_NE(refused({"--local_rank", "5"}).find("the local rank is 0 by the environment"), std::string::npos);
}

TEST(ParseArguments, TrainersFormsOfASwitchAreRead) {
  EXPECT_EQ(parsed({"--bf16", "True"}).arguments.precision, DType::bf16);
  EXPECT_EQ(parsed({"--bf16=true"}).arguments.precision, DType::bf16);
  EXPECT_FALSE(parsed({"--bf16", "False"}).arguments.precision);
  EXPECT_EQ(parsed({"--precision", "f16"}).arguments.precision, DType::f16);
  const TrainingArguments a =
      parsed({"--gradient_checkpointing", "--dataloader_drop_last", "false", "--load_best_model_at_end",
              "--lr_scheduler_type", "cosine", "--warmup_ratio=0.03", "--logging_steps", "5", "--max_steps",
              "40", "--num_train_epochs=1.5", "--evaluation_strategy", "steps", "--eval_steps", "7",
              "--save_strategy=steps"})
          .arguments;
  EXPECT_EQ(a.gradient_checkpointing, true);
  EXPECT_EQ(a.dataloader_drop_last, false);
  EXPECT_EQ(a.load_best_model_at_end, true);
  EXPECT_EQ(a.lr_scheduler_type, "cosine");
  EXPECT_EQ(a.warmup_ratio, 0.03);
  EXPECT_EQ(a.logging_steps, 5);
  EXPECT_EQ(a.max_steps, 40);
  EXPECT_EQ(a.num_train_epochs, 1.5);
  EXPECT_EQ(a.eval_steps, 7);
  EXPECT_EQ(a.eval_strategy, "steps");
  EXPECT_EQ(a.save_strategy, "steps");
}

TEST(ParseArguments, WordsOfTheProgramAreLeftOver) {
  const char* words[] = {"program", "--my_flag", "3",  "--learning-rate", "0.5", "data.txt", "--deepspeed",
                         "ds.json", "-x",        "--", "--bf16"};
  const KnownArguments known = parse_known_arguments(static_cast<int>(std::size(words)), words);
  EXPECT_EQ(known.rest, (std::vector<std::string>{"--my_flag", "3", "data.txt", "-x", "--bf16"}));
  EXPECT_EQ(known.options.config, "ds.json");
  EXPECT_EQ(known.options.arguments.learning_rate, 0.5);
  EXPECT_FALSE(known.options.arguments.precision);
  EXPECT_FALSE(known.help);
  EXPECT_EQ(refused({"--my_flag", "3"}), "--my_flag: unknown flag");
  EXPECT_EQ(refused({"--my_flag", "3", "--learning_rat", "1", "data.txt", "--optim=sgd"}),
            "--my_flag: unknown flag\n--learning_rat: unknown flag; nearest: --learning_rate\n"
            "data.txt: expected a flag, e.g. --deepspeed FILE\n"
            "--optim: a flag of Trainer without a counterpart here: write optimizer.type to the DeepSpeed "
            "configuration");
}

TEST(ParseArguments, TheSwitchOfDeepSpeedNeedsAConfiguration) {
  EXPECT_NE(refused({"--deepspeed"}).find("or set RZ_CONFIG"), std::string::npos);
  ::setenv("RZ_CONFIG", "{}", 1);
  EXPECT_EQ(parsed({"--deepspeed"}).config, "");
  ::unsetenv("RZ_CONFIG");
}

TEST(ParseArguments, HelpHasEveryFlag) {
  const char* words[] = {"program", "--help", "--own"};
  const KnownArguments known = parse_known_arguments(3, words);
  EXPECT_TRUE(known.help);
  EXPECT_EQ(known.rest, std::vector<std::string>{"--own"});
  try {
    parse_arguments(3, words);
    FAIL() << "returned";
  } catch (const HelpRequest& help) {
    EXPECT_EQ(help.what(), arguments_help());
  }
  const std::string help = arguments_help();
  for (const ArgumentSpec& spec : argument_specs())
    if (spec.group != ArgumentGroup::derived)
      EXPECT_NE(help.find("\n  --" + std::string(spec.name) + " "), std::string::npos) << spec.name;
  for (const char* flag : {"--deepspeed FILE", "--seed N", "--local_rank N"})
    EXPECT_NE(help.find(flag), std::string::npos) << flag;
}

/// What a flag sets is in the resolved configuration of a file that leaves it open.
TEST(ParseArguments, SetKeysOfTheConfiguration) {
  const auto resolved = [](std::vector<const char*> words, const std::string& text = "{}") {
    const TrainingArguments a = parsed(std::move(words)).arguments;
    return parse_ds_config(text, "ds.json", a,
                           {.updates = [](const BatchSizes&) { return std::int64_t{200}; },
                            .adamw_by_default = a.learning_rate.has_value()});
  };
  const std::vector<const char*> batch{"--per_device_train_batch_size=1", "--learning_rate=0.5"};
  const auto with = [&](std::vector<const char*> more) {
    more.insert(more.begin(), batch.begin(), batch.end());
    return more;
  };
  EXPECT_TRUE(resolved({"--gradient_checkpointing"}).checkpoint_activations);
  EXPECT_TRUE(resolved({"--dataloader_drop_last"}).drop_last);
  EXPECT_EQ(resolved({"--logging_steps", "7"}).monitor.steps_per_print, 7);
  EXPECT_EQ(resolved({"--save_strategy=steps", "--output_dir=d"}).checkpoint.save_steps, 500)
      << "Trainer's default";
  EXPECT_EQ(resolved({"--save_strategy=no", "--save_steps=9", "--output_dir=d"}).checkpoint.save_steps, 0);
  EXPECT_EQ(resolved({"--eval_steps=9", "--eval_strategy=steps"}).checkpoint.eval_steps, 9);
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=linear", "--warmup_ratio=0.025"})).schedule,
            LrSchedule(WarmupDecayLr{
                .total_num_steps = 200, .max_lr = 0.5, .num_steps = 5, .type = WarmupType::linear}));
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=cosine", "--warmup_steps=3", "--total_steps=50"})).schedule,
            LrSchedule(WarmupCosineLr{
                .total_num_steps = 50, .num_steps = 3, .cos_min_ratio = 0, .type = WarmupType::linear}));
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=constant_with_warmup", "--warmup_ratio=0.1"})).schedule,
            LrSchedule(WarmupLr{.max_lr = 0.5, .num_steps = 20, .type = WarmupType::linear}));
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=constant"})).schedule, LrSchedule(ConstantLr{}));
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=linear", "--warmup_steps=0.025"})).schedule,
            LrSchedule(WarmupDecayLr{
                .total_num_steps = 200, .max_lr = 0.5, .num_steps = 5, .type = WarmupType::linear}))
      << "a share, as in Trainer";
  // Without a warm-up the rates are Trainer's.
  for (const char* none : {"--warmup_steps=0", "--warmup_ratio=0", "--bf16=false"}) {
    EXPECT_EQ(resolved(with({"--lr_scheduler_type=linear", none})).schedule,
              LrSchedule(LinearLr{.start_factor = 1, .end_factor = 0, .total_iters = 200}));
    EXPECT_EQ(resolved(with({"--lr_scheduler_type=cosine", none})).schedule,
              LrSchedule(CosineAnnealingLr{.t_max = 200}));
    EXPECT_EQ(resolved(with({"--lr_scheduler_type=constant_with_warmup", none})).schedule,
              LrSchedule(ConstantLr{}));
  }
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=reduce_lr_on_plateau"})).schedule,
            LrSchedule(ReduceLrOnPlateau{}));
  EXPECT_EQ(resolved(with({"--lr_scheduler_type=linear"}),
                     R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}})")
                .schedule,
            LrSchedule(WarmupDecayLr{.total_num_steps = 9}))
      << "the file's";
  const auto wrong = [&](std::vector<const char*> words, const std::string& text) {
    return std::string(test::error_of([&] { resolved(std::move(words), text); }).what());
  };
  EXPECT_EQ(
      wrong({"--lr_scheduler_type=cosine"}, R"({"scheduler": {"type": "WarmupLR"}})"),
      "ds.json: scheduler.type: is \"WarmupLR\", but lr_scheduler_type (command line) cosine stands for "
      "\"WarmupCosineLR\" or \"CosineAnnealingLR\"; remove one of them");
  EXPECT_EQ(wrong({"--warmup_ratio=0.5"}, "{}"),
            "ds.json: the configuration has no key for warmup_ratio (command line); add its section, or "
            "leave it out");
}

}  // namespace
}  // namespace rz
