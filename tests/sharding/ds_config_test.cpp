#include "sharding/config/ds_config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "comm/core/error.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

/// The error of parsing, and of missing batch sizes if there are ranks; empty if there is none.
std::string error_message(const std::string& text, int ranks = 0, const TrainingArguments& arguments = {}) {
  const std::string line = test::refusal([&] {
    try {
      const DsConfig config = parse_ds_config(text, "ds.json", arguments, {.ranks = ranks ? ranks : 1});
      if (ranks) required_sizes(config);
    } catch (const Error& e) {
      EXPECT_TRUE(e.code() == Errc::config || e.code() == Errc::unsupported) << e.what();
      throw;
    }
  });
  EXPECT_TRUE(line.empty() || line.starts_with("ds.json: ")) << line;
  return line;
}

void expect_error_message(const std::string& text, std::initializer_list<std::string> parts, int ranks = 0) {
  test::expect_parts(error_message(text, ranks), parts);
}

std::string warnings(const std::string& text) {
  std::string all;
  for (const auto& w : parse_ds_config(text, "ds.json").warnings) all += w + "\n";
  return all;
}

TEST(DsConfig, ReadsSupportedKeys) {
  const DsConfig c = parse_ds_config(R"({
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
    "optimizer": {"type": "adamw", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": false}
  })",
                                     "ds.json");
  EXPECT_EQ(c.batch.train, 8);
  EXPECT_EQ(c.batch.accumulation, 2);
  EXPECT_FALSE(c.batch.micro);
  EXPECT_EQ(c.gradient_clipping, 0.5);
  EXPECT_EQ(c.optimizer, (OptimizerConfig{.type = OptimizerConfig::Type::adamw,
                                          .lr = 3e-4,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-6,
                                          .weight_decay = 0.1}));
  EXPECT_EQ(c.stage, 2);
  EXPECT_EQ(c.strategy.overlap_comm, false);
  EXPECT_TRUE(std::holds_alternative<ConstantLr>(c.schedule));
  EXPECT_TRUE(c.warnings.empty());
}

TEST(DsConfig, AcceptsCommentsTrailingCommasAndFloatsAsIntegers) {
  const DsConfig c = parse_ds_config(R"({
    // a comment with a "quote" and a , }
    "train_batch_size": 1.6e1, /* in between */ # and hash
    "optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9, "nesterov": true,},},
  })",
                                     "ds.json");
  EXPECT_EQ(c.batch.train, 16);
  EXPECT_EQ(c.optimizer->type, OptimizerConfig::Type::sgd);
  EXPECT_TRUE(c.optimizer->nesterov);
  EXPECT_EQ(error_message(R"({"train_batch_size": 8, "zero_optimization": {"sub_group_size": 1e9}})"), "");
}

TEST(DsConfig, CommentMarksInsideStringsAreText) {
  expect_error_message(R"({"optimizer": {"type": "a//b,}"}})", {R"("a//b,}")"});
}

TEST(DsConfig, KeepsPositionsInMessages) {
  expect_error_message("{\n // comment\n \"train_batch_size\": nought\n}", {"line 3", "not valid JSON"});
  expect_error_message("{\"a\": /* never ends", {"not valid JSON"});
  expect_error_message("", {"not valid JSON"});
  expect_error_message("[1]", {"expected an object"});
  expect_error_message(std::string(100000, '['), {"nested more than"});
}

TEST(DsConfig, RefusesADuplicateKey) {
  expect_error_message(R"({"train_batch_size": 8, "train_batch_size": 16})", {"train_batch_size", "twice"});
  expect_error_message(R"({"zero_optimization": {"stage": 1, "stage": 1}})", {"stage", "twice"});
  EXPECT_EQ(error_message(R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})"), "");
}

TEST(DsConfig, NothingMayFollowAZeroByte) {
  const std::string good = R"({"train_batch_size": 8})";
  expect_error_message(good + std::string("\0", 1), {"not valid JSON", "byte 24 is zero"});
  expect_error_message(good + std::string("\0{\"zero\": 1}", 12), {"not valid JSON", "byte 24 is zero"});
  expect_error_message(good + std::string(" // a comment\0", 14), {"is zero"});
}

TEST(DsConfig, MessagesAreFitForATerminal) {
  const auto plain = [](const std::string& text, const char* part) {
    const std::string what = error_message(text);
    EXPECT_NE(what.find(part), std::string::npos) << what;
    for (const char c : what) EXPECT_FALSE(static_cast<unsigned char>(c) < 0x20 || c == 0x7f) << what;
    EXPECT_EQ(what.find('\xff'), std::string::npos) << what;
  };
  plain(R"({"train_\u001b[2J": 8})", "train_\\x1b[2J: unknown key");
  plain(R"({"optimizer": {"type": "A\u007f\nB"}})", "\"A\\x7f\\x0aB\"");
  plain(R"({"zero_optimization": {"offload_param": {"device": "\u001bc"}}})", "\\x1bc");
  plain("{\"train_batch_size\": \xff}", "not valid JSON");
  plain("{\"\x1b\": 1}", "not valid JSON");
}

TEST(DsConfig, SuggestsTheNearestKey) {
  expect_error_message(R"({"gradient_cliping": 1})",
                       {"gradient_cliping", "did you mean 'gradient_clipping'"});
  expect_error_message(R"({"zero_optimization": {"stge": 1}})", {"zero_optimization.stge", "'stage'"});
  expect_error_message(R"({"optimizer": {"type": "Adam", "params": {"weightdecay": 1}}})",
                       {"optimizer.params.weightdecay", "'weight_decay'"});
  expect_error_message(R"({"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}})",
                       {"optimizer.params.betas"});
  expect_error_message(R"({"zzzzzzzzzzzzzzzzzzzzzzzzzz": 1})", {"unknown key"});
  expect_error_message(R"({"bf61": {}})", {"did you mean 'bf16'"});
  // Words that are far from every key get no suggestion.
  for (const char* far : {"comment", "warmup", "lr", "_note"})
    EXPECT_EQ(error_message(concat("{\"", far, "\": 1}")),
              concat("ds.json: ", far, ": unknown key; remove it"));
}

TEST(DsConfig, NamesUnsupportedKeys) {
  const char* refused[][2] = {
      {R"({"scheduler": {"type": "CyclicLR"}})", "scheduler.type"},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
       "zero_optimization.offload_param.device"},
      {R"({"zero_optimization": {"zero_quantized_weights": true}})", "zero_quantized_weights"},
      {R"({"zero_optimization": {"zero_quantized_weights": true}})", "zero_quantized_weights"},
      {R"({"optimizer": {"type": "OneBitAdam"}})", "optimizer.type"},
      {R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}})", "gradient_clipping"},
      {R"({"amp": {"enabled": true}})", "amp.enabled"},
      {R"({"compression_training": {"layer_reduction": {"enabled": true}}})", "compression_training"},
      {R"({"gradient_allreduce_op": "sum"})", "gradient_allreduce_op"},
      {R"({"sequence_parallel_size": 2})", "sequence_parallel_size"},
      {R"({"data_efficiency": {"enabled": true}})", "data_efficiency.enabled"},
      {R"({"optimizer": {"type": "Lamb", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad"},
      {R"({"optimizer": {"type": "Adagrad", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad"},
  };
  for (const auto& [text, where] : refused)
    expect_error_message(text, {where, "not supported in this build yet"});
}

TEST(DsConfig, WhatIsNotEnabledIsNotRefused) {
  for (const char* text :
       {R"({"amp": {"enabled": false, "opt_level": "O2"}})", R"({"elasticity": {"enabled": false}})",
        R"({"compression_training": {"layer_reduction": {"enabled": false, "keep_number_layer": 3}}})",
        R"({"zero_optimization": {"offload_param": {"device": "none", "pin_memory": true}}})",
        R"({"scheduler": null, "sparse_attention": null, "fp16": null})", R"({"pipeline": {}})"})
    EXPECT_EQ(error_message(text), "") << text;
}

TEST(DsConfig, ReadsPrecision) {
  const auto of = [](const char* text) { return parse_ds_config(text, "ds.json").precision; };
  const auto strategy = [](const char* text) { return parse_ds_config(text, "ds.json").strategy; };
  const auto types = [&](const char* text) {
    return std::pair(strategy(text).precision.parameters, strategy(text).precision.gradients);
  };
  EXPECT_EQ(types("{}"), std::pair(DType::f32, DType::f32));
  EXPECT_EQ(types(R"({"bf16": {"enabled": true}})"), std::pair(DType::bf16, DType::bf16));
  EXPECT_EQ(types(R"({"bfloat16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})"),
            std::pair(DType::bf16, DType::f32));
  EXPECT_EQ(strategy(R"({"communication_data_type": "fp16"})").wire.communication_data_type, DType::f16);
  EXPECT_EQ(strategy("{}").wire.communication_data_type, std::nullopt);
  EXPECT_TRUE(of(R"({"bf16": {"enabled": true}})").skip_overflow) << "since DeepSpeed 0.19";
  EXPECT_FALSE(of(R"({"bf16": {"enabled": true, "check_grad_overflow": false}})").skip_overflow);
  EXPECT_FALSE(of("{}").skip_overflow);
  const char* const half = R"({"fp16": {"enabled": true, "auto_cast": true, "loss_scale": 0,
    "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "consecutive_hysteresis": true,
    "min_loss_scale": 2}, "prescale_gradients": true, "gradient_predivide_factor": 4.0})";
  PrecisionConfig expected{.skip_overflow = true};
  expected.loss_scale = {
      .initial_power = 12, .window = 500, .hysteresis = 3, .consecutive_hysteresis = true, .minimum = 2};
  EXPECT_EQ(of(half), expected);
  EXPECT_EQ(types(half), std::pair(DType::f16, DType::f16));
  EXPECT_EQ(strategy(half).wire, (WireFormat{.prescale_gradients = true, .gradient_predivide_factor = 4}));
}

TEST(DsConfig, ReadsAutocast) {
  const auto of = [](const char* text) { return parse_ds_config(text, "ds.json").precision; };
  EXPECT_EQ(of("{}").autocast, std::nullopt);
  EXPECT_EQ(of(R"({"torch_autocast": {"enabled": false, "dtype": "bfloat16"}})").autocast, std::nullopt);
  EXPECT_EQ(of(R"({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}})"),
            (PrecisionConfig{.autocast = DType::bf16}));
  EXPECT_EQ(of(R"({"torch_autocast": {"enabled": true}})").autocast, DType::bf16);
  // f16 needs a scaled loss, by GradScaler's rules.
  EXPECT_EQ(of(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}})"),
            (PrecisionConfig{.autocast = DType::f16,
                             .loss_scale = {.rule = LossScaleRule::grad_scaler},
                             .skip_overflow = true}));
  // A model in bf16 may compute its norms in f32.
  const DsConfig both = parse_ds_config(
      R"({"bf16": {"enabled": true}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}})", "ds.json");
  EXPECT_EQ(both.strategy.precision.parameters, DType::bf16);
  EXPECT_EQ(both.precision.autocast, DType::bf16);
  expect_error_message(R"({"torch_autocast": {"enabled": true, "dtype": "fp32"}})",
                       {"torch_autocast.dtype", "bf16 or fp16"});
  EXPECT_EQ(warnings(R"({"torch_autocast": {"enabled": true, "dtype": "bf16",
    "lower_precision_safe_modules": ["torch.nn.Linear"]}})"),
            "ds.json: read and not applied in this build (docs/configuration.md): "
            "torch_autocast.lower_precision_safe_modules\n");
}

TEST(DsConfig, RefusesWrongPrecision) {
  expect_error_message(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
                       {"fp16", "bf16", "one of"});
  expect_error_message(R"({"fp16": {"enabled": true, "min_loss_scale": 0}})", {"fp16.min_loss_scale", "0"});
  expect_error_message(R"({"fp16": {"enabled": true, "hysterisis": 1}})", {"'hysteresis'"});
  expect_error_message(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})",
                       {"data_types.grad_accum_dtype", "choose bf16 or fp32"});
  expect_error_message(R"({"data_types": {"grad_accum_dtype": "bf16"}})", {"data_types.grad_accum_dtype"});
  expect_error_message(R"({"communication_data_type": "fp17"})", {"communication_data_type", "fp17"});
}

TEST(DsConfig, WarnsOfKeysThatAreNotApplied) {
  EXPECT_EQ(warnings(R"({"zero_optimization": {"contiguous_gradients": false}})"),
            "ds.json: zero_optimization.contiguous_gradients: has no effect: gradients lie in contiguous "
            "buckets\n");
  EXPECT_EQ(warnings(R"({"wandb": {"enabled": true}, "comet": {"enabled": true}})"),
            "ds.json: read and not applied in this build (docs/configuration.md): "
            "wandb.enabled, comet.enabled\n");
  EXPECT_EQ(warnings(R"({"wandb": {"enabled": false}})"), "") << "the default";
  EXPECT_EQ(warnings(R"({"steps_per_print": 10, "wall_clock_breakdown": true, "optimizer": {"type": "AdamW"},
    "fp16": {"enabled": false, "loss_scale": 0},
    "zero_optimization": {"contiguous_gradients": true, "offload_param": {"device": "none"}}})"),
            "");
  EXPECT_EQ(warnings(R"({"steps_per_print": 20000000000000000})"), "") << "never";
}

TEST(DsConfig, NamesKeyPathAndValueOfAWrongType) {
  expect_error_message(R"({"train_batch_size": "eight"})", {"train_batch_size", "whole number", "\"eight\""});
  expect_error_message(R"({"train_batch_size": 1.5})", {"whole number", "1.5"});
  expect_error_message(R"({"train_batch_size": 0})", {"from 1"});
  expect_error_message(R"({"gradient_clipping": -1})", {"gradient_clipping", "-1"});
  expect_error_message(R"({"optimizer": "AdamW"})", {"optimizer", "expected an object"});
  expect_error_message(R"({"optimizer": {"type": "AdamW", "params": {"lr": [1]}}})", {"optimizer.params.lr"});
  expect_error_message(R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}})",
                       {"optimizer.params.betas"});
  expect_error_message(R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}})", {"below 1"});
  expect_error_message(R"({"optimizer": {"params": {}}})", {"optimizer.type", "missing", "AdamW"});
  expect_error_message(R"({"optimizer": {"type": "Adan"}})", {"optimizer.type", "\"Adan\"", "AdamW", "Muon"});
  expect_error_message(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})", {"momentum"});
  expect_error_message(R"({"zero_optimization": {"stage": 4}})",
                       {"zero_optimization.stage", "from 0 to 3", "4"});
  expect_error_message(R"({"zero_optimization": 2})", {"zero_optimization"});
  expect_error_message(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}})",
                       {"scheduler.params.warmup_type", "cosine", "log or linear"});
  expect_error_message(R"({"scheduler": {"type": "WarmupDecayLR"}})",
                       {"scheduler.params.total_num_steps", "missing"});
  expect_error_message(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}})",
                       {"from 0"});
}

std::string all_errors(const std::string& text, const TrainingArguments& arguments = {}) {
  const Error e = test::error_of([&] { parse_ds_config(text, "ds.json", arguments); });
  return e.what();
}

TEST(DsConfig, AllThatIsWrongIsInOneAnswer) {
  EXPECT_EQ(all_errors(R"({"train_batch_size": "eight", "gradient_cliping": 1, "sequence_parallel_size": 2,
      "optimizer": {"type": "AdamW", "params": {"lr": -1, "beta": 0.9, "eps": "small"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_step": 10}},
      "zero_optimization": {"stage": 4, "overlap_comm": "maybe"}, "fp16": 1})"),
            "ds.json: gradient_cliping: unknown key; did you mean 'gradient_clipping'?\n"
            "ds.json: optimizer.params.beta: unknown key; did you mean 'betas'?\n"
            "ds.json: scheduler.params.total_num_step: unknown key; did you mean 'total_num_steps'?\n"
            "ds.json: zero_optimization.stage: must be from 0 to 3, found 4\n"
            "ds.json: zero_optimization.overlap_comm: expected true or false, found \"maybe\"\n"
            "ds.json: train_batch_size: expected a whole number, found \"eight\"\n"
            "ds.json: optimizer.params.lr: must be from 0 to 3.4e+38, found -1\n"
            "ds.json: optimizer.params.eps: expected a number, found \"small\"\n"
            "ds.json: scheduler.params.total_num_steps: missing; give a value\n"
            "ds.json: fp16: expected an object { … }, found 1\n"
            "ds.json: sequence_parallel_size: not supported in this build yet: 2; there is no Ulysses; "
            "ringzero.sequence_parallel divides tokens between the ranks of ringzero.mesh.tp");
}

TEST(DsConfig, CombinationsAreAmongThem) {
  EXPECT_EQ(all_errors(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}, "zero": {},
      "ringzero": {"checkpoint": {"save_steps": 5}}, "optimizer": {"type": "SGD", "params": {"nesterov": true}}})"),
            "ds.json: zero: unknown key; remove it\n"
            "ds.json: optimizer.params.nesterov: needs a momentum above 0 and no dampening\n"
            "ds.json: fp16: is enabled, and bf16 too; enable one of them\n"
            "ds.json: ringzero.checkpoint.save_steps: needs a folder; set ringzero.checkpoint.output_dir");
}

/// What follows from a wrong value is no error of its own.
TEST(DsConfig, NoErrorFollowsFromAnother) {
  EXPECT_EQ(all_errors(R"({"train_batch_size": "eight", "train_micro_batch_size_per_gpu": 2,
      "gradient_accumulation_steps": 3, "optimizer": {"type": 7, "params": {"lr": "x"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})",
                       {.total_steps = 5}),
            "ds.json: train_batch_size: expected a whole number, found \"eight\"\n"
            "ds.json: optimizer.type: expected a text in quotes, found 7");
  EXPECT_EQ(all_errors(R"({"fp16": {"enabled": "perhaps"}, "bf16": {"enabled": true},
      "optimizer": {"type": "SGD", "params": {"nesterov": true, "momentum": "high"}}})"),
            "ds.json: optimizer.params.momentum: expected a number, found \"high\"\n"
            "ds.json: fp16.enabled: expected true or false, found \"perhaps\"");
}

TEST(DsConfig, ManyErrorsAreCutAfterTwentyLines) {
  std::string keys;
  for (int i = 0; i < 30; ++i) keys += concat(i ? "," : "", "\"no_such_key_", i, "\": 1");
  const std::string what = all_errors("{" + keys + "}");
  EXPECT_EQ(std::ranges::count(what, '\n'), 20);
  EXPECT_TRUE(what.ends_with("\nand 10 more")) << what;
}

TEST(DsConfig, OnlyUnsupportedKeysAreErrcUnsupported) {
  const auto code = [](const char* text) {
    return test::error_of([&] { parse_ds_config(text, "ds.json"); }).code();
  };
  EXPECT_EQ(code(R"({"sequence_parallel_size": 2, "gradient_allreduce_op": "sum"})"), Errc::unsupported);
  EXPECT_EQ(code(R"({"sequence_parallel_size": 2, "zzz": 1})"), Errc::config);
}

/// As pydantic.
TEST(DsConfig, NumbersAndSwitchesMayBeInQuotes) {
  const DsConfig c = parse_ds_config(R"({"train_batch_size": " 16 ", "gradient_clipping": "5e-1",
      "optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "betas": ["0.5", 0.75], "eps": "+1e-6"}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": ["0.25"], "warmup_num_steps": "1e2"}},
      "bf16": {"enabled": "True"}, "fp16": {"enabled": "no"}, "amp": {"enabled": "false"},
      "sequence_parallel_size": "1", "sparse_gradients": "false", "prescale_gradients": 1,
      "zero_optimization": {"stage": "2", "overlap_comm": "off", "reduce_bucket_size": "1e6"}})",
                                     "ds.json");
  EXPECT_EQ(c.batch.train, 16);
  EXPECT_EQ(c.gradient_clipping, 0.5);
  EXPECT_EQ(c.optimizer,
            (OptimizerConfig{.lr = 1e-3, .beta1 = 0.5, .beta2 = 0.75, .eps = 1e-6, .weight_decay = 0}));
  EXPECT_EQ(c.schedule, LrSchedule(WarmupLr{.min_lr = {0.25}, .num_steps = 100}));
  EXPECT_EQ(c.strategy.precision.parameters, DType::bf16);
  EXPECT_TRUE(c.strategy.wire.prescale_gradients);
  EXPECT_EQ(c.stage, 2);
  EXPECT_EQ(c.strategy.overlap_comm, false);
  EXPECT_EQ(c.strategy.reduce_bucket_size, 1000000);
  EXPECT_EQ(parse_ds_config(resolved_json(c), "again.json").schedule, c.schedule);
  // Neither a number where a text is expected, nor words that are no number.
  expect_error_message(R"({"csv_monitor": {"job_name": 7}})", {"csv_monitor.job_name", "text"});
  expect_error_message(R"({"comms_logger": {"prof_ops": "all_reduce"}})",
                       {"comms_logger.prof_ops", "list of names"});
  expect_error_message(R"({"zero_optimization": {"stage": "2x"}})", {"whole number", "\"2x\""});
  expect_error_message(R"({"zero_optimization": {"stage": ""}})", {"whole number"});
  expect_error_message(R"({"zero_optimization": {"stage": "1.5"}})", {"whole number", "1.5"});
  expect_error_message(R"({"bf16": {"enabled": 2}})", {"expected true or false, found 2"});
  expect_error_message(R"({"gradient_clipping": "nan"})", {"gradient_clipping", "expected a number"});
  expect_error_message(R"({"gradient_clipping": "1e999"})", {"gradient_clipping", "expected a number"});
}

TEST(DsConfig, OldSwitchesMayBeInQuotesToo) {
  const auto offloads = [](const char* value) {
    return parse_ds_config(concat(R"({"zero_optimization": {"stage": 2, "cpu_offload": )", value, "}}"),
                           "ds.json")
               .strategy.offload_optimizer.device == OffloadDevice::cpu;
  };
  EXPECT_TRUE(offloads("\"true\""));
  EXPECT_TRUE(offloads("true"));
  EXPECT_FALSE(offloads("\"false\""));
  EXPECT_FALSE(offloads("null"));
  expect_error_message(R"({"zero_optimization": {"stage": 2, "cpu_offload": "maybe"}})",
                       {"zero_optimization.offload_optimizer", "\"maybe\""});
  expect_error_message(R"({"fp32_allreduce": "maybe"})", {"communication_data_type", "\"maybe\""});
}

/// Accelerate writes steps_per_print as Python's infinity.
TEST(DsConfig, InfinityIsNever) {
  for (const char* text : {R"({"steps_per_print": Infinity})", R"({"steps_per_print":Infinity})",
                           R"({"steps_per_print": "inf"})", R"({"steps_per_print": "Infinity"})"})
    EXPECT_EQ(parse_ds_config(text, "ds.json").monitor.steps_per_print, std::int64_t{1} << 62) << text;
  expect_error_message(R"({"gradient_clipping": Infinity})", {"gradient_clipping: expected a number"});
  expect_error_message(R"({"steps_per_print": -Infinity})", {"steps_per_print", "\"-inf\""});
  expect_error_message(R"({"steps_per_print": Infinitys})", {"not valid JSON"});
  expect_error_message(R"({"steps_per_print": xInfinity})", {"not valid JSON"});
  expect_error_message("{\"steps_per_print\": Infinity,\n \"x\": nought}", {"line 2"});
  EXPECT_EQ(parse_ds_config(R"({"csv_monitor": {"job_name": "Infinity"}})", "ds.json").monitor.csv_job_name,
            "Infinity");
}

TEST(DsConfig, NumbersMustBeFiniteInF32) {
  EXPECT_EQ(error_message(R"({"optimizer": {"type": "AdamW", "params": {"lr": 1e308}}})"),
            "ds.json: optimizer.params.lr: must be from 0 to 3.4e+38, found 1e+308");
  EXPECT_EQ(
      parse_ds_config(R"({"optimizer": {"type": "AdamW", "params": {"lr": 3e38}}})", "ds.json").optimizer->lr,
      3e38);
  EXPECT_EQ(error_message(R"({"optimizer": {"type": "AdamW"}})", 0, {.learning_rate = 1e308}),
            "ds.json: optimizer.params.lr: must be from 0 to 3.4e+38, found 1e+308");
  EXPECT_EQ(parse_ds_config(R"({"fp16": {"enabled": true, "initial_scale_power": 127}})", "ds.json")
                .precision.loss_scale.initial_power,
            127);
  expect_error_message(R"({"fp16": {"enabled": true, "initial_scale_power": 128}})", {"from 0 to 127"});
}

OptimizerConfig optimizer(const char* type, const char* params) {
  return parse_ds_config(concat(R"({"optimizer": {"type": ")", type, R"(", "params": )", params, "}}"),
                         "ds.json")
      .optimizer.value();
}

TEST(DsConfig, AdamIsAdamWUnlessConfiguredOtherwise) {
  using Type = OptimizerConfig::Type;
  EXPECT_EQ(optimizer("Adam", "{}").type, Type::adamw);
  EXPECT_EQ(optimizer("Adam", R"({"adam_w_mode": false})").type, Type::adam);
  EXPECT_EQ(optimizer("Adam", R"({"torch_adam": true})").type, Type::adamw);
  EXPECT_EQ(optimizer("AdamW", R"({"adam_w_mode": false})").type, Type::adamw);
}

TEST(DsConfig, TorchsAdamWDecaysByDefault) {
  EXPECT_EQ(optimizer("AdamW", "{}").weight_decay, 0);
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true})").weight_decay, 0.01);
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true, "weight_decay": 0})").weight_decay, 0);
  EXPECT_EQ(optimizer("Adam", R"({"torch_adam": true, "adam_w_mode": false})").weight_decay, 0);
}

TEST(DsConfig, EveryOptimizerHasDeepSpeedsDefaults) {
  using Type = OptimizerConfig::Type;
  EXPECT_EQ(optimizer("sgd", "{}"), (OptimizerConfig{.type = Type::sgd}));
  EXPECT_EQ(optimizer("Adagrad", "{}"), (OptimizerConfig{.type = Type::adagrad, .lr = 0.01, .eps = 1e-10}));
  EXPECT_EQ(optimizer("RMSprop", "{}"), (OptimizerConfig{.type = Type::rmsprop, .lr = 0.01}));
  EXPECT_EQ(optimizer("Lion", "{}"), (OptimizerConfig{.type = Type::lion}));
  EXPECT_EQ(optimizer("Lamb", "{}"), (OptimizerConfig{.type = Type::lamb}));
  const OptimizerConfig muon = optimizer("Muon", R"({"lr": 0.1, "adam_lr": 0.2})");
  EXPECT_EQ(muon.muon_lr, 0.1);
  EXPECT_EQ(muon.adam_lr, 0.2);
  EXPECT_EQ(muon.momentum, 0.95);
  EXPECT_EQ(optimizer("Muon", "{}").muon_lr, 0.02);
  EXPECT_EQ(optimizer("Muon", "{}").adam_lr, 3e-4);
}

TEST(DsConfig, OptimizersHaveTorchsKeys) {
  using Type = OptimizerConfig::Type;
  EXPECT_EQ(optimizer("SGD", R"({"momentum": 0.9, "dampening": 0.5, "maximize": true, "foreach": true,
                                 "fused": false, "capturable": false, "differentiable": false})"),
            (OptimizerConfig{.type = Type::sgd, .momentum = 0.9, .dampening = 0.5, .maximize = true}));
  EXPECT_EQ(optimizer("SGD", R"({"dampening": -0.5})").dampening, -0.5);
  expect_error_message(
      R"({"optimizer": {"type": "SGD", "params": {"nesterov": true, "momentum": 0.9, "dampening": 0.5}}})",
      {"optimizer.params.nesterov", "no dampening"});
  const char* const adam = R"({"amsgrad": true, "maximize": true, "foreach": null, "fused": true,
                               "capturable": true, "differentiable": false})";
  EXPECT_EQ(optimizer("AdamW", adam),
            (OptimizerConfig{.type = Type::adamw, .amsgrad = true, .maximize = true}));
  EXPECT_TRUE(optimizer("Adam", adam).amsgrad);
  EXPECT_EQ(optimizer("Adagrad", R"({"maximize": true, "foreach": false, "fused": null})"),
            (OptimizerConfig{.type = Type::adagrad, .lr = 0.01, .eps = 1e-10, .maximize = true}));
  EXPECT_EQ(optimizer("RMSprop", R"({"alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.5,
                               "centered": true, "maximize": true, "foreach": null, "capturable": false})"),
            (OptimizerConfig{.type = Type::rmsprop,
                             .lr = 0.01,
                             .eps = 1e-6,
                             .momentum = 0.5,
                             .weight_decay = 0.1,
                             .maximize = true,
                             .alpha = 0.9,
                             .centered = true}));
}

TEST(DsConfig, WithoutASectionThereIsNoOptimizer) {
  EXPECT_FALSE(parse_ds_config(R"({"train_batch_size": 8})", "ds.json").optimizer);
  EXPECT_FALSE(parse_ds_config(R"({"optimizer": null})", "ds.json").optimizer);
  const DsConfig c = parse_ds_config("{}", "ds.json", {.learning_rate = 0.5}, {.adamw_by_default = true});
  EXPECT_EQ(c.optimizer->lr, 0.5);
  EXPECT_EQ(c.optimizer->type, OptimizerConfig::Type::adamw);
}

TEST(DsConfig, GradientsAreClippedAtOneUnlessConfiguredOtherwise) {
  EXPECT_EQ(parse_ds_config("{}", "ds.json").gradient_clipping, 1) << "since DeepSpeed 0.19";
  EXPECT_EQ(parse_ds_config(R"({"gradient_clipping": 0})", "ds.json").gradient_clipping, 0);
}

TEST(DsConfig, TwoBatchSizesDetermineTheThird) {
  const auto sizes = [](const char* text, int ranks) {
    return required_sizes(parse_ds_config(text, "ds.json", {}, {.ranks = ranks}));
  };
  EXPECT_EQ(sizes(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})", 8),
            (BatchSizes{64, 4, 2}));
  EXPECT_EQ(sizes(R"({"train_batch_size": 64, "gradient_accumulation_steps": 4})", 8),
            (BatchSizes{64, 2, 4}));
  EXPECT_EQ(sizes(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})", 3),
            (BatchSizes{24, 4, 2}));
  EXPECT_EQ(sizes(R"({"train_batch_size": 12})", 3), (BatchSizes{12, 4, 1}));
  EXPECT_EQ(sizes(R"({"train_micro_batch_size_per_gpu": 4})", 3), (BatchSizes{12, 4, 1}));
  EXPECT_EQ(sizes(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2})", 2),
            (BatchSizes{4, 2, 1}));
}

TEST(DsConfig, SizesThatDoNotDivideAreErrorsWithTheNumbers) {
  expect_error_message(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})",
                       {"train_batch_size: 64", "6 ranks", "4", "48 or 72"}, 6);
  expect_error_message(R"({"train_batch_size": 8})", {"8", "3 ranks", "6 or 9"}, 3);
  expect_error_message(R"({"train_batch_size": 2})", {"2", "3 ranks", "use 3"}, 3);
  expect_error_message(
      R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})",
      {"10", "= 8"}, 2);
  expect_error_message(R"({"gradient_accumulation_steps": 2})", {"train_batch_size", "missing"}, 2);
  expect_error_message("{}", {"train_batch_size", "missing"}, 1);
}

void expect_equal(const DsConfig& a, const DsConfig& b) {
  EXPECT_EQ(a.sizes, b.sizes);
  EXPECT_EQ(a.optimizer, b.optimizer);
  EXPECT_EQ(a.schedule, b.schedule);
  EXPECT_EQ(a.precision, b.precision);
  EXPECT_EQ(a.stage, b.stage);
  EXPECT_EQ(a.strategy, b.strategy);
  EXPECT_EQ(a.checkpoint_activations, b.checkpoint_activations);
  EXPECT_EQ(a.monitor, b.monitor);
  EXPECT_EQ(a.gradient_clipping, b.gradient_clipping);
  EXPECT_EQ(a.drop_last, b.drop_last);
  EXPECT_EQ(a.ddp, b.ddp);
}

TEST(DsConfig, ResolvedConfigurationReadsBack) {
  const RunFacts facts{.ranks = 2, .hidden_size = 64, .updates = [](const BatchSizes&) { return 100; }};
  for (
      const char* text :
      {R"({"train_batch_size": 8, "gradient_clipping": 1, "optimizer": {"type": "Adam", "params":
          {"adam_w_mode": false, "lr": 0.1}}, "zero_optimization": {"stage": 3}})",
       R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "fp16": {"enabled": true,
          "hysteresis": 3}, "optimizer": {"type": "Muon", "params": {"lr": 0.05}}, "zero_optimization":
          {"cpu_offload": true, "stage": 2, "reduce_bucket_size": "auto"}, "dataloader_drop_last": true,
          "ringzero": {"unused_parameters": "deepspeed"}, "activation_checkpointing": {"number_checkpoints": 4}})",
       R"({"train_batch_size": 4, "bf16": {"enabled": true, "check_grad_overflow": false}, "gradient_clipping": 0,
          "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": true}}, "scheduler": {"type": "warmupdecaylr",
          "params": {"warmup_max_lr": [0.1, 0.2], "total_num_steps": "auto", "warmup_num_steps": 5}},
          "steps_per_print": 3, "csv_monitor": {"enabled": true, "output_path": "logs"}})",
       R"({"train_batch_size": 4, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4,
          "cycle_max_lr": 1e-3, "cycle_second_step_size": 7, "cycle_momentum": false}}, "zero_optimization": true})",
       R"({"train_batch_size": 4, "ringzero": {"find_unused_parameters": false, "static_graph": true, "comm_hook":
          "batched_power_sgd", "comm_state_option": {"warm_start": false, "random_seed": 3}, "join": {"enable": false}}})"}) {
    const DsConfig c = parse_ds_config(text, "ds.json", {}, facts);
    const DsConfig again = parse_ds_config(resolved_json(c), "again.json", {}, {.ranks = 2});
    expect_equal(c, again);
    EXPECT_EQ(resolved_json(again), resolved_json(c));
  }
}

TEST(DsConfig, ReadsWhatHappensToUnusedParameters) {
  const auto policy = [](const char* text) {
    return parse_ds_config(text, "ds.json").strategy.unused_parameters;
  };
  EXPECT_EQ(policy("{}"), UnusedParameterPolicy::pytorch);
  EXPECT_EQ(policy(R"({"ringzero": {"unused_parameters": "deepspeed"}})"), UnusedParameterPolicy::deepspeed);
  const auto ignores = [](const char* text) {
    return parse_ds_config(text, "ds.json").strategy.find_unused_parameters;
  };
  EXPECT_TRUE(ignores("{}"));
  EXPECT_FALSE(ignores(R"({"zero_optimization": {"ignore_unused_parameters": false}})"));
  expect_error_message(R"({"ringzero": {"decay_1d": true}})", {"ringzero", "decay_1d"});
  expect_error_message(R"({"ringzero": {"unused_parameters": "jax"}})",
                       {"ringzero.unused_parameters", "jax", "choose pytorch or deepspeed"});
}

std::string setting(const DsConfig& c, const char* path) {
  const auto found = std::ranges::find(c.settings, path, &ResolvedSetting::path);
  return found == c.settings.end() ? "absent" : found->value;
}

TEST(DsConfig, OldSpellingsAreAcceptedWithAWarning) {
  const DsConfig c = parse_ds_config(R"({"bfloat16": {"enabled": true}, "zero_optimization": {"stage": 3,
    "cpu_offload": true, "cpu_offload_param": true, "stage3_gather_fp16_weights_on_model_save": true}})",
                                     "ds.json");
  EXPECT_EQ(c.strategy.precision.parameters, DType::bf16);
  EXPECT_EQ(c.strategy.offload_optimizer.device, OffloadDevice::cpu);
  EXPECT_EQ(c.strategy.offload_param.device, OffloadDevice::cpu);
  EXPECT_EQ(setting(c, "zero_optimization.stage3_gather_16bit_weights_on_model_save"), "true");
  ASSERT_EQ(c.warnings.size(), 4u);
  EXPECT_EQ(c.warnings[0], "ds.json: bfloat16: is an old spelling; write bf16");
  EXPECT_EQ(c.warnings[1],
            "ds.json: zero_optimization.cpu_offload: is an old spelling; write "
            "zero_optimization.offload_optimizer");
  EXPECT_EQ(parse_ds_config(R"({"fp16_enabled": true})", "ds.json").strategy.precision.parameters,
            DType::f16);
  EXPECT_EQ(parse_ds_config(R"({"zero_optimization": true})", "ds.json").stage, 1);
  EXPECT_EQ(parse_ds_config(R"({"zero_optimization": false})", "ds.json").stage, 0);
  expect_error_message(R"({"bfloat16": {}, "bf16": {}})", {"bfloat16", "bf16", "remove one"});
}

TEST(DsConfig, KeysOfStage3NeedNoPrefix) {
  const DsConfig c = parse_ds_config(R"({"zero_optimization": {"stage": 3, "max_live_parameters": 5e8,
    "max_reuse_distance": 6e8, "gather_16bit_weights_on_model_save": true, "prefetch_bucket_size": 7}})",
                                     "ds.json");
  EXPECT_EQ(c.strategy.gathers.max_live_parameters, 500000000);
  EXPECT_EQ(c.strategy.gathers.max_reuse_distance, 600000000);
  EXPECT_EQ(c.strategy.gathers.prefetch_bucket_size, 7);
  EXPECT_EQ(setting(c, "zero_optimization.stage3_gather_16bit_weights_on_model_save"), "true");
  expect_error_message(R"({"zero_optimization": {"max_reuse_distance": 1, "stage3_max_reuse_distance": 1}})",
                       {"max_reuse_distance", "remove one"});
}

TEST(DsConfig, OffloadNeedsItsStage) {
  EXPECT_EQ(warnings(R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})"),
            "ds.json: zero_optimization.offload_param: has no effect: it needs stage 3, found 2\n");
  EXPECT_EQ(
      warnings(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})"),
      "ds.json: zero_optimization.offload_optimizer: has no effect: it needs stage 1, 2 or 3, found 0\n");
  expect_error_message(
      R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})",
      {"ratio"});
  EXPECT_EQ(
      warnings(
          R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})"),
      "");
}

TEST(DsConfig, WithoutAConfigurationThatOfTheVariableHolds) {
  const auto stage = [](const std::string& config) { return find_ds_config(config, "--config").stage; };
  EXPECT_EQ(stage(""), 0);
  ::setenv("RZ_CONFIG", R"({"zero_optimization": {"stage": 3}})", 1);
  EXPECT_EQ(stage(""), 3);
  EXPECT_EQ(find_ds_config("", "--config").file, "RZ_CONFIG");
  EXPECT_EQ(stage(R"({"zero_optimization": {"stage": 1}})"), 1) << "what is given is read";
  const std::string file = ::testing::TempDir() + concat("rz_config_", ::getpid(), ".json");
  std::ofstream(file) << R"({"zero_optimization": {"stage": 2}})";
  EXPECT_EQ(stage(file), 2);
  ::setenv("RZ_CONFIG", file.c_str(), 1);
  EXPECT_EQ(stage(""), 2);
  std::filesystem::remove(file);
  const auto refused = [&] { return std::string(test::error_of([&] { stage(""); }).what()); };
  EXPECT_NE(refused().find("RZ_CONFIG: there is no file " + file), std::string::npos) << refused();
  ::setenv("RZ_CONFIG", R"({"zero_optimisation": {}})", 1);
  EXPECT_NE(refused().find("RZ_CONFIG: zero_optimisation: unknown key"), std::string::npos) << refused();
  ::setenv("RZ_CONFIG", "", 1);
  EXPECT_EQ(stage(""), 0);
  ::unsetenv("RZ_CONFIG");
}

}  // namespace
}  // namespace rz
