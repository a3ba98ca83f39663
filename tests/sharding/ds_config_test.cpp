#include "sharding/config/ds_config.h"

#include <gtest/gtest.h>

#include <string>

#include "comm/core/error.h"

namespace rz {
namespace {

/// The error of parsing (and of resolving for `ranks`, if any); empty if there is none.
std::string error_message(const std::string& text, int ranks = 0) {
  try {
    const DsConfig config = parse_ds_config(text, "ds.json");
    if (ranks) resolve_batch(config, ranks);
    return "";
  } catch (const Error& e) {
    EXPECT_TRUE(e.code() == Errc::config || e.code() == Errc::unsupported) << e.what();
    EXPECT_EQ(std::string(e.what()).rfind("ds.json: ", 0), 0u) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return e.what();
  }
}

void expect_error_message(const std::string& text, std::initializer_list<const char*> parts, int ranks = 0) {
  const std::string what = error_message(text, ranks);
  for (const char* part : parts)
    EXPECT_NE(what.find(part), std::string::npos) << "'" << what << "' lacks " << part;
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
  EXPECT_EQ(c.train_batch_size, 8);
  EXPECT_EQ(c.gradient_accumulation_steps, 2);
  EXPECT_FALSE(c.train_micro_batch_size_per_gpu);
  EXPECT_EQ(c.gradient_clipping, 0.5);
  EXPECT_EQ(c.optimizer.type, OptimizerConfig::Type::adamw);
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_EQ(c.optimizer.beta1, 0.9);
  EXPECT_EQ(c.optimizer.beta2, 0.95);
  EXPECT_EQ(c.optimizer.eps, 1e-6);
  EXPECT_EQ(c.optimizer.weight_decay, 0.1);
  EXPECT_EQ(c.zero_stage, 2);
  EXPECT_FALSE(c.overlap_comm);
  EXPECT_TRUE(c.warnings.empty());
}

TEST(DsConfig, AcceptsCommentsTrailingCommasAndFloatsAsIntegers) {
  const DsConfig c = parse_ds_config(R"({
    // a comment with a "quote" and a , }
    "train_batch_size": 1.6e1, /* in between */ # and hash
    "optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9, "nesterov": true,},},
  })",
                                     "ds.json");
  EXPECT_EQ(c.train_batch_size, 16);
  EXPECT_EQ(c.optimizer.type, OptimizerConfig::Type::sgd);
  EXPECT_TRUE(c.optimizer.nesterov);
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
}

TEST(DsConfig, NamesUnsupportedKeys) {
  const char* refused[][2] = {
      {R"({"fp16": {"enabled": true, "auto_cast": true}})", "fp16.auto_cast"},
      {R"({"scheduler": {"type": "WarmupLR"}})", "scheduler"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
       "zero_optimization.offload_optimizer.device"},
      {R"({"zero_optimization": {"offload_param": {"device": "nvme"}}})",
       "zero_optimization.offload_param.device"},
      {R"({"zero_optimization": {"zero_quantized_weights": true}})", "zero_quantized_weights"},
      {R"({"zero_optimization": {"zero_hpz_partition_size": 2}})", "zero_hpz_partition_size"},
      {R"({"communication_data_type": "fp16"})", "communication_data_type"},
      {R"({"prescale_gradients": true})", "prescale_gradients"},
      {R"({"bf16": {"enabled": true}, "communication_data_type": "fp32"})", "communication_data_type"},
      {R"({"optimizer": {"type": "Lion"}})", "optimizer.type"},
      {R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad"},
  };
  for (const auto& [text, where] : refused)
    expect_error_message(text, {where, "not supported in this build yet"});
}

TEST(DsConfig, ReadsPrecision) {
  const auto of = [](const char* text) { return parse_ds_config(text, "ds.json"); };
  EXPECT_EQ(of("{}").precision, (Precision{DType::f32, DType::f32}));
  EXPECT_EQ(of(R"({"bf16": {"enabled": true}})").precision, (Precision{DType::bf16, DType::bf16}));
  EXPECT_EQ(of(R"({"bfloat16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})").precision,
            (Precision{DType::bf16, DType::f32}));
  EXPECT_FALSE(of(R"({"bf16": {"enabled": true}})").skip_overflow);
  EXPECT_TRUE(of(R"({"bf16": {"enabled": true, "check_grad_overflow": true}})").skip_overflow);
  const DsConfig half = of(R"({"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12,
    "loss_scale_window": 500, "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 2}})");
  EXPECT_EQ(half.precision, (Precision{DType::f16, DType::f16}));
  EXPECT_TRUE(half.skip_overflow);
  EXPECT_EQ(half.loss_scale.initial_power, 12);
  EXPECT_EQ(half.loss_scale.window, 500);
  EXPECT_EQ(half.loss_scale.hysteresis, 3);
  EXPECT_TRUE(half.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(half.loss_scale.minimum, 2);
  // Written output is read back.
  const DsConfig again = parse_ds_config(resolved_json(half, {8, 8, 1}), "again.json");
  EXPECT_EQ(again.precision, half.precision);
  EXPECT_EQ(again.loss_scale.window, 500);
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

TEST(DsConfig, WarnsOfKeysWithoutEffect) {
  EXPECT_NE(warnings(R"({"steps_per_print": 10})").find("ds.json: steps_per_print: has no effect"),
            std::string::npos);
  EXPECT_NE(warnings(R"({"zero_optimization": {"reduce_bucket_size": 5e8}})").find("reduce_bucket_size"),
            std::string::npos);
  EXPECT_NE(warnings(R"({"zero_optimization": {"legacy_stage1": true}})").find("obsolete"),
            std::string::npos);
  EXPECT_NE(warnings(R"({"zero_optimization": {"contiguous_gradients": false}})").find("always on"),
            std::string::npos);
  EXPECT_NE(warnings(R"({"gradient_clipping": "auto"})").find("gradient_clipping: \"auto\""),
            std::string::npos);
  EXPECT_NE(warnings(R"({"train_batch_size": 8})").find("AdamW"), std::string::npos);
  EXPECT_EQ(warnings(R"({"optimizer": {"type": "AdamW"}, "fp16": {"enabled": false, "loss_scale": 0},
    "zero_optimization": {"contiguous_gradients": true, "offload_param": {"device": "none"}}})"),
            "");
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
  expect_error_message(R"({"optimizer": {"type": "Adan"}})",
                       {"optimizer.type", "\"Adan\"", "Adam, AdamW or SGD"});
  expect_error_message(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})", {"momentum"});
  expect_error_message(R"({"zero_optimization": {"stage": 4}})",
                       {"zero_optimization.stage", "from 0 to 3", "4"});
  expect_error_message(R"({"zero_optimization": 2})", {"zero_optimization"});
}

TEST(DsConfig, AdamIsAdamWUnlessConfiguredOtherwise) {
  const auto type = [](const char* params, const char* type_name) {
    return parse_ds_config(concat(R"({"optimizer": {"type": ")", type_name, R"(", "params": )", params, "}}"),
                           "ds.json")
        .optimizer.type;
  };
  EXPECT_EQ(type("{}", "Adam"), OptimizerConfig::Type::adamw);
  EXPECT_EQ(type(R"({"adam_w_mode": false})", "Adam"), OptimizerConfig::Type::adam);
  EXPECT_EQ(type(R"({"torch_adam": true})", "Adam"), OptimizerConfig::Type::adamw);
  EXPECT_EQ(type(R"({"adam_w_mode": false})", "AdamW"), OptimizerConfig::Type::adamw);
}

TEST(DsConfig, TwoBatchSizesDetermineTheThird) {
  const auto sizes = [](const char* text, int ranks) {
    return resolve_batch(parse_ds_config(text, "ds.json"), ranks);
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

TEST(DsConfig, ResolvedConfigurationReadsBack) {
  const DsConfig c = parse_ds_config(R"({"train_batch_size": 8, "gradient_clipping": 1, "optimizer":
    {"type": "Adam", "params": {"adam_w_mode": false, "lr": 0.1}}, "zero_optimization": {"stage": 3}})",
                                     "ds.json");
  const BatchSizes batch = resolve_batch(c, 2);
  const DsConfig again = parse_ds_config(resolved_json(c, batch), "again.json");
  EXPECT_EQ(resolve_batch(again, 2), batch);
  EXPECT_EQ(again.optimizer.type, OptimizerConfig::Type::adam);
  EXPECT_EQ(again.optimizer.lr, 0.1);
  EXPECT_EQ(again.gradient_clipping, 1);
  EXPECT_EQ(again.zero_stage, 3);
  EXPECT_TRUE(again.warnings.empty());
}

TEST(DsConfig, ReadsWhichParametersDecay) {
  const std::string resolved =
      resolved_json(parse_ds_config(R"({"train_batch_size": 8})", "ds.json"), {8, 8, 1});
  EXPECT_NE(resolved.find(R"("decay_one_dimensional": false)"), std::string::npos) << resolved;
  EXPECT_NE(resolved.find(R"("unused_parameters": "pytorch")"), std::string::npos) << resolved;
  const DsConfig c = parse_ds_config(
      R"({"train_batch_size": 8,
          "ringzero": {"decay_one_dimensional": true, "unused_parameters": "deepspeed"}})",
      "ds.json");
  const DsConfig again = parse_ds_config(resolved_json(c, {8, 8, 1}), "again.json");
  EXPECT_TRUE(again.decay_one_dimensional);
  EXPECT_EQ(again.unused_parameters, UnusedParameterPolicy::deepspeed);
  expect_error_message(R"({"ringzero": {"decay_1d": true}})", {"ringzero", "decay_1d"});
  expect_error_message(R"({"ringzero": {"unused_parameters": "jax"}})",
                       {"ringzero.unused_parameters", "jax", "choose pytorch or deepspeed"});
}

}  // namespace
}  // namespace rz
