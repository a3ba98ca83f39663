// Needs: train_lm_lib

// The parts of train_lm, one by one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "autograd_lite/models/gpt2.h"
#include "comm/core/error.h"
#include "sharding/data/token_shards.h"
#include "sharding/data/tokens.h"
#include "sharding/io/json.h"
#include "sharding/lm/inputs.h"
#include "sharding/lm/sample_text.h"
#include "sharding/lm/update_report.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"
#include "tools/train_lm/options.h"
#include "tools/train_lm/report/progress.h"
#include "tools/train_lm/report/throughput.h"

namespace rz::train_lm {
namespace {

using namespace lm;

namespace fs = std::filesystem;
using test::expect_parts;
using test::refusal;

class TrainLmFiles : public testing::Test, protected test::Folder {
 protected:
  std::string put_tokens(const std::vector<std::uint16_t>& tokens) const {
    put("tokens.bin", std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
    return path("tokens.bin");
  }
};

// ---- flags

ParsedOptions parse(std::vector<const char*> words) {
  words.insert(words.begin(), "train_lm");
  return parse_options(static_cast<int>(words.size()), words.data());
}

TEST(TrainLmOptions, AreRead) {
  const Options o =
      parse({"--model", "m.json", "--config", "ds.json", "--data", ".", "--steps", "7", "--no-shuffle",
             "--no-overlap", "--seq-len=32", "--sample", "", "--bucket-mb", "0.5"})
          .options;
  EXPECT_EQ(o.model, "m.json");
  EXPECT_EQ(o.steps, 7);
  EXPECT_EQ(o.seq_len, 32);
  EXPECT_EQ(o.bucket_mb, 0.5);
  EXPECT_FALSE(o.shuffle);
  EXPECT_FALSE(o.overlap);
  EXPECT_FALSE(o.recompute);
  EXPECT_EQ(o.sample, "");
  EXPECT_TRUE(parse({"--model", "m", "--config", "c", "--tokens", "t"}).options.shuffle);
}

TEST(TrainLmOptions, SamplingIsRead) {
  const std::vector<const char*> good{"--model", "m", "--config", "c", "--data", "d"};
  const auto with = [&](std::vector<const char*> more) {
    more.insert(more.begin(), good.begin(), good.end());
    return more;
  };
  const Options o = parse(with({"--sample-temperature", "0.25", "--sample-top-k", "12"})).options;
  EXPECT_EQ(o.sample_temperature, 0.25);
  EXPECT_EQ(o.sample_top_k, 12);
  EXPECT_EQ(parse(good).options.sample_temperature, 0.8);
  EXPECT_EQ(parse(good).options.sample_top_k, 0);
  expect_parts(refusal([&] { parse(with({"--sample-temperature", "-1"})); }), {"--sample-temperature"});
  expect_parts(refusal([&] {
                 parse(with({"--sample-temperature", "hot"}));
               }),
               {"--sample-temperature", "hot"});
  expect_parts(refusal([&] { parse(with({"--sample-top-k", "-1"})); }), {"--sample-top-k"});
  expect_parts(parse({"--help"}).help, {"--sample-temperature X", "--sample-top-k K"});
}

TEST(TrainLmOptions, ArgumentsOfTheConfigurationAreRead) {
  const std::vector<const char*> good{"--model", "m", "--config", "c", "--data", "d"};
  const auto with = [&](std::vector<const char*> more) {
    more.insert(more.begin(), good.begin(), good.end());
    return parse(more).options;
  };
  expect_parts(refusal([&] { with({"--ddp-comm-hook", "int8"}); }), {"--ddp-comm-hook", "int8", "fp16"});
  const Options none = with({});
  EXPECT_FALSE(none.arguments.learning_rate || none.arguments.precision || none.arguments.train_batch_size);
  EXPECT_EQ(none.decay, Decay::matrices);
  const Options o = with({"--train-batch-size",
                          "64",
                          "--per-device-train-batch-size",
                          "4",
                          "--gradient-accumulation-steps",
                          "2",
                          "--learning-rate",
                          "0.5",
                          "--adam-beta1",
                          "0.25",
                          "--adam-beta2",
                          "0.75",
                          "--adam-epsilon",
                          "1e-7",
                          "--weight-decay",
                          "0.125",
                          "--max-grad-norm",
                          "0",
                          "--ddp-comm-hook",
                          "bf16",
                          "--warmup-steps",
                          "5",
                          "--total-steps",
                          "50",
                          "--precision",
                          "bf16",
                          "--decay",
                          "all"});
  EXPECT_EQ(o.arguments.ddp_comm_hook, "bf16");
  EXPECT_EQ(o.arguments.train_batch_size, 64);
  EXPECT_EQ(o.arguments.per_device_train_batch_size, 4);
  EXPECT_EQ(o.arguments.gradient_accumulation_steps, 2);
  EXPECT_EQ(o.arguments.learning_rate, 0.5);
  EXPECT_EQ(o.arguments.adam_beta1, 0.25);
  EXPECT_EQ(o.arguments.adam_beta2, 0.75);
  EXPECT_EQ(o.arguments.adam_epsilon, 1e-7);
  EXPECT_EQ(o.arguments.weight_decay, 0.125);
  EXPECT_EQ(o.arguments.max_grad_norm, 0);
  EXPECT_EQ(o.arguments.warmup_steps, 5);
  EXPECT_EQ(o.arguments.total_steps, 50);
  EXPECT_EQ(o.arguments.precision, DType::bf16);
  EXPECT_EQ(o.arguments.origin, "command line");
  EXPECT_EQ(o.decay, Decay::all);
  expect_parts(refusal([&] { with({"--decay", "some"}); }), {"--decay", "some"});
  expect_parts(refusal([&] { with({"--warmup-steps", "-1"}); }), {"--warmup-steps"});
}

TEST(TrainLmOptions, SpellingsOfDeepSpeedAndTrainerAreRead) {
  const Options o = parse({"--model",
                           "m",
                           "--data",
                           "d",
                           "--deepspeed",
                           "c",
                           "--local_rank=0",
                           "--fp16",
                           "True",
                           "--num_train_epochs",
                           "2",
                           "--lr_scheduler_type",
                           "cosine",
                           "--logging-steps=5",
                           "--gradient_checkpointing",
                           "--warmup_ratio",
                           "0.1",
                           "--output_dir",
                           "out",
                           "--save_steps",
                           "9",
                           "--load_best_model_at_end",
                           "True",
                           "--save_async",
                           "False",
                           "--train_batch_size=8"})
                        .options;
  EXPECT_EQ(o.config, "c");
  EXPECT_EQ(o.data, "d");
  const TrainingArguments& a = o.arguments;
  EXPECT_EQ(a.precision, DType::f16);
  EXPECT_EQ(a.num_train_epochs, 2);
  EXPECT_EQ(a.lr_scheduler_type, "cosine");
  EXPECT_EQ(a.logging_steps, 5);
  EXPECT_EQ(a.gradient_checkpointing, true);
  EXPECT_EQ(a.warmup_ratio, 0.1);
  EXPECT_EQ(a.output_dir, "out");
  EXPECT_EQ(a.save_steps, 9);
  EXPECT_EQ(a.load_best_model_at_end, true);
  EXPECT_EQ(a.async_save, false);
  EXPECT_EQ(a.train_batch_size, 8);
  EXPECT_EQ(updates_of_passes(o, 7), 14);
  const auto steps = [](std::vector<const char*> more) {
    more.insert(more.begin(), {"--model", "m", "--config", "c", "--data", "d"});
    return parse(more).options.steps;
  };
  EXPECT_EQ(steps({"--max_steps", "6"}), 6);
  EXPECT_EQ(steps({"--max_steps", "-1"}), std::nullopt);
  for (const char* other : {"--max_steps=6", "--num_train_epochs=6"})
    expect_parts(refusal([&] { steps({"--steps", "6", other}); }), {"--steps, --max-steps"});
  expect_parts(refusal([&] { steps({"--deepspeed=d"}); }), {"exclude each other"});
  expect_parts(refusal([&] { steps({"--report_to", "wandb"}); }), {"--report-to", "csv_monitor"});
  expect_parts(refusal([&] { steps({"--num_train_epoch", "3"}); }), {"--num-train-epochs"});
}

/// All flags of the table, which docs/configuration.md lists.
TEST(TrainLmOptions, HaveEveryArgument) {
  const std::string help = parse({"--help"}).help;
  for (const ArgumentSpec& a : argument_specs()) {
    if (a.group == ArgumentGroup::derived) continue;
    std::string flag = concat("--", a.name);
    std::ranges::replace(flag, '_', '-');
    EXPECT_NE(help.find(concat("\n  ", flag, " ")), std::string::npos) << flag;
  }
  const TrainingArguments a = parse({"--model=m", "--config=c", "--data=d", "--metric-for-best-model", "loss",
                                     "--greater-is-better", "false", "--ddp-find-unused-parameters=false",
                                     "--ddp-static-graph", "true", "--ddp-broadcast-buffers", "false",
                                     "--async-save", "--output-dir", "o", "--resume-from-checkpoint", "true"})
                                  .options.arguments;
  EXPECT_EQ(a.metric_for_best_model, "loss");
  EXPECT_EQ(a.greater_is_better, false);
  EXPECT_EQ(a.ddp_find_unused_parameters, false);
  EXPECT_EQ(a.ddp_static_graph, true);
  EXPECT_EQ(a.ddp_broadcast_buffers, false);
  EXPECT_EQ(a.async_save, true);
  EXPECT_EQ(a.output_dir, "o");
  EXPECT_EQ(a.resume_from_checkpoint, "true");
}

TEST(TrainLmOptions, FormerNamesAreNamedAsTheyWereTyped) {
  const TrainingArguments a = parse({"--model=m", "--config=c", "--data=d", "--checkpoint-dir", "x2",
                                     "--resume=true", "--save-async"})
                                  .options.arguments;
  EXPECT_EQ(a.output_dir, "x2");
  EXPECT_EQ(a.resume_from_checkpoint, "true");
  EXPECT_EQ(a.async_save, true);
  const auto refused = [&](const TrainingArguments& arguments) {
    return refusal([&] {
      parse_ds_config(R"({"ringzero": {"checkpoint": {"output_dir": "x1"}}})", "ds.json", arguments);
    });
  };
  EXPECT_EQ(refused(a),
            "ds.json: ringzero.checkpoint.output_dir: is \"x1\", but --checkpoint-dir (command line) is "
            "\"x2\"; remove one of them, or write \"auto\" here");
  const TrainingArguments today =
      parse({"--model=m", "--config=c", "--data=d", "--output-dir", "x2"}).options.arguments;
  expect_parts(refused(today), {"but output_dir (command line) is \"x2\""});
}

TEST(TrainLmOptions, ASampleAloneNeedsWeightsOnly) {
  const Options o = parse({"--model", "m", "--init", "w", "--sample", "x"}).options;
  EXPECT_TRUE(o.samples_only);
  EXPECT_EQ(o.steps, 0);
  EXPECT_EQ(parse({"--model", RZ_SOURCE_DIR, "--sample", "x"}).options.init, RZ_SOURCE_DIR)
      << "of the folder";
  expect_parts(refusal([&] { parse({"--model", "m", "--sample", "x"}); }), {"--sample", "--init"});
  expect_parts(refusal([&] {
                 parse({"--model", "m", "--config", "c", "--init", "w", "--sample", "x", "--steps", "3"});
               }),
               {"--data"});
}

TEST(TrainLmOptions, MetricsAreWrittenToTheGivenPath) {
  EXPECT_EQ(parse({"--model", "m", "--config", "c", "--data", "d", "--metrics", "f"}).options.metrics, "f");
}

/// torchrun --no-python train_lm … parses an abbreviation of its own options, also behind the program.
TEST(TrainLmOptions, NoneIsShortForOneOfTorchrun) {
  const std::vector<std::string> torchrun{
      "nnodes",     "nproc-per-node", "rdzv-backend",     "rdzv-endpoint", "rdzv-id",   "rdzv-conf",
      "standalone", "max-restarts",   "monitor-interval", "start-method",  "role",      "module",
      "no-python",  "run-path",       "log-dir",          "redirects",     "tee",       "local-ranks-filter",
      "node-rank",  "master-addr",    "master-port",      "local-addr",    "logs-specs"};
  const std::string help = parse({"--help"}).help;
  int options = 0;
  for (std::size_t at = help.find("\n  --"); at != std::string::npos; at = help.find("\n  --", at + 1)) {
    const std::string name = help.substr(at + 5, help.find_first_of(" =,\n", at + 5) - at - 5);
    ++options;
    for (const auto& theirs : torchrun) EXPECT_FALSE(theirs.starts_with(name)) << "--" << name;
  }
  EXPECT_GT(options, 15);
}

TEST(TrainLmOptions, HelpIsText) {
  const std::string help = parse({"--help"}).help;
  expect_parts(help, {"--model", "--no-shuffle", "rzrun", "Exit status"});
}

TEST(TrainLmOptions, MistakesAreOneLine) {
  const auto wrong = [](std::vector<const char*> words) {
    const std::string what = refusal([&] { parse(std::move(words)); });
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    return what;
  };
  expect_parts(wrong({"--modle", "m"}), {"unknown flag --modle", "did you mean --model"});
  EXPECT_EQ(
      wrong({"--modle", "m", "--stpes", "-1", "--config", "c", "--zzzzzzzzzzz"}),
      "unknown flag --modle; did you mean --model?; unknown flag --stpes; did you mean --steps?; unknown "
      "flag --zzzzzzzzzzz; see --help");
  expect_parts(wrong({"--model", "m", "--config", "c", "--data", "d", "--zzzzzzzzzzz"}),
               {"unknown flag --zzzzzzzzzzz"});
  expect_parts(wrong({"--model", "m", "--config", "c", "--data", "d", "more"}),
               {"unexpected argument 'more'"});
  expect_parts(wrong({"--model", "m", "--config", "c"}), {"--data", "--tokens"});
  expect_parts(wrong({"--model", "m", "--data", "d"}), {"--config"});
  expect_parts(wrong({"--model", "m", "--config", "c", "--data", "d", "--tokens", "t"}),
               {"--tokens", "--data"});
  expect_parts(wrong({"--model", "m", "--config", "c", "--data", "d", "--steps", "many"}),
               {"--steps", "many"});
  expect_parts(wrong({"--model", "m", "--config", "c", "--data", "d", "--seq-len", "0"}), {"--seq-len"});
}

// ---- words of a sample

TEST(TrainLmWords, AreCountedWhole) {
  const std::string data = "The ring sends a chunk.\nThe tree reduces; (in order)";
  const auto count = [&](const std::string& prompt, const std::string& sample) {
    const KnownWords w = known_words(prompt, sample, data);
    return std::pair(w.known, w.all);
  };
  using Known = std::pair<std::size_t, std::size_t>;
  EXPECT_EQ(count("", "The ring, the order. "), Known(3, 4)) << "\"the\" is not \"The\"";
  EXPECT_EQ(count("", "ri sends2tree a-chunk "), Known(4, 5)) << "part of a word is no word";
  EXPECT_EQ(count("The ri", "ng sends "), Known(2, 2)) << "a word that begins in the prompt";
  EXPECT_EQ(count("The ", "ring sen"), Known(1, 1)) << "the last word may go on";
  EXPECT_EQ(count("The ", "12 + 3\n"), Known(0, 0));
  EXPECT_EQ(known_words("", "The ring ", "").all, 0u) << "there is no text to compare with";
}

TEST(TrainLmWords, ReadAsALine) {
  EXPECT_EQ(describe({.all = 8, .known = 7}), "words: 7 of 8 occur in the data (87%)");
}

// ---- tokens

/// Bytes that read() requested in this process so far.
std::uint64_t bytes_read() {
  std::ifstream in("/proc/self/io");
  std::string key;
  std::uint64_t value = 0;
  in >> key >> value;
  EXPECT_EQ(key, "rchar:");
  return value;
}

/// The reason is that of the folder, whatever else is looked up for the message.
TEST_F(TrainLmFiles, AFolderThatCannotBeWrittenIsNamedWithTheReason) {
  put_tokens(std::vector<std::uint16_t>(200, 7));
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  put("ds.json", R"({"train_batch_size": 4, "optimizer": {"type": "SGD"}})");
  fs::create_directory(path("sealed"));
  fs::permissions(path("sealed"), fs::perms{0555});
  fs::permissions(path(), fs::perms{0755});
  Options o;
  o.model = path("model.json"), o.config = path("ds.json"), o.tokens = path("tokens.bin");
  for (const char* below : {"", "/new"}) {
    o.arguments.output_dir = path("sealed") + below;
    const int status = test::in_forked_child([&] {
      if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return false;
      const std::string what = refusal([&] { read_inputs(o, 0, 1); });
      std::fprintf(stderr, "%s\n", what.c_str());
      return what == "--output-dir: " + *o.arguments.output_dir + ": cannot be written: " + path("sealed") +
                         ": Permission denied";
    });
    EXPECT_EQ(status, 0) << below;
  }
  fs::permissions(path("sealed"), fs::perms{0755});
}

TEST_F(TrainLmFiles, OfALongFileOneRankReadsALittleBeforeTheStart) {
  const std::uint64_t size = std::uint64_t{256} << 20;
  put("tokens.bin", "");
  fs::resize_file(path("tokens.bin"), size);  // zeros that occupy no disk space
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  put("ds.json", R"({"train_batch_size": 4, "optimizer": {"type": "SGD"}})");
  Options o;
  o.model = path("model.json"), o.config = path("ds.json"), o.tokens = path("tokens.bin");
  for (const int rank : {0, 1}) {
    const std::uint64_t before = bytes_read();
    read_inputs(o, rank, 2);
    EXPECT_LE(bytes_read() - before, rank == 0 ? (17u << 20) : (1u << 20)) << "rank " << rank;
  }
  // The beginning and the end are among the samples that rank 0 reads.
  for (const std::uint64_t at : {std::uint64_t{0}, size - 2}) {
    std::fstream file(path("tokens.bin"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at)).write("\xff\xff", 2);
    file.close();
    expect_parts(refusal([&] { read_inputs(o, 0, 2); }),
                 {"token 65535 at position " + std::to_string(at / 2), "vocab_size 256"});
    file.open(path("tokens.bin"));
    file.seekp(static_cast<std::streamoff>(at)).write("\0\0", 2);
  }
  // A token that this check omits is rejected when it is read.
  std::fstream file(path("tokens.bin"), std::ios::in | std::ios::out | std::ios::binary);
  const std::uint64_t every = size / 2 / 8;
  for (std::uint64_t at = every / 2; at < size / 2; at += every)
    file.seekp(static_cast<std::streamoff>(2 * at)).write("\xff\x01", 2);
  file.close();
  const Inputs in = read_inputs(o, 1, 2);
  std::vector<std::int32_t> few(8);
  expect_parts(refusal([&] { in.tokens.read(every / 2 - 3, few); }),
               {"token 511 at position " + std::to_string(every / 2), "vocab_size 256"});
  EXPECT_EQ(refusal([&] { in.tokens.read(every / 2 + 1, few); }), "");
}

TEST_F(TrainLmFiles, TheConfigurationMayLeaveValuesToTheCommandLine) {
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  put("ds.json",
      R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupDecayLR",
    "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})");
  Options o;
  o.model = path("model.json"), o.config = path("ds.json");
  o.tokens = put_tokens(std::vector<std::uint16_t>(16 * 20 + 1, 7));
  expect_parts(refusal([&] { read_inputs(o, 0, 2); }), {"train_batch_size: missing"});
  o.arguments.train_batch_size = 4;
  EXPECT_EQ(std::get<WarmupDecayLr>(read_inputs(o, 0, 2).ds.schedule).num_steps, 1) << "Trainer's default";
  o.arguments.warmup_steps = 2;
  o.arguments.learning_rate = 0.25;
  const Inputs in = read_inputs(o, 0, 2);
  EXPECT_EQ(in.sizes, (BatchSizes{4, 2, 1}));
  EXPECT_EQ(in.ds.strategy.reduce_bucket_size, 256) << "16 channels";
  EXPECT_EQ(in.ds.schedule, LrSchedule(WarmupDecayLr{.total_num_steps = 5, .max_lr = 0.25, .num_steps = 2}))
      << "one pass over 20 samples";
  o.steps = 9;
  EXPECT_EQ(std::get<WarmupDecayLr>(read_inputs(o, 0, 2).ds.schedule).total_num_steps, 9);
}

TEST_F(TrainLmFiles, SchedulesAreCheckedWithTheOptimizer) {
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  Options o;
  o.model = path("model.json"), o.config = path("ds.json");
  o.tokens = put_tokens(std::vector<std::uint16_t>(16 * 20 + 1, 7));
  const auto refused = [&](const char* optimizer, const char* scheduler) {
    put("ds.json", concat(R"({"train_batch_size": 4, "optimizer": {"type": ")", optimizer,
                          R"("}, "scheduler": {"type": )", scheduler, "}}"));
    return refusal([&] { read_inputs(o, 0, 2); });
  };
  expect_parts(refused("SGD", R"("OneCycleLR", "params": {"max_lr": 1, "total_steps": 9})"),
               {"ds.json: scheduler.params: OneCycleLR: cycle_momentum: sgd has neither betas"});
  expect_parts(refused("AdamW", R"("ReduceLROnPlateau")"),
               {"ds.json: scheduler.type: ReduceLROnPlateau follows eval_loss", "--eval-steps N"});
  o.arguments.eval_steps = 2, o.validation_split_percentage = 50;
  EXPECT_EQ(refused("AdamW", R"("ReduceLROnPlateau")"), "");
}

TEST_F(TrainLmFiles, WhatIsNotThereYetIsRefusedByName) {
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  Options o;
  o.model = path("model.json"), o.config = path("ds.json");
  o.tokens = put_tokens(std::vector<std::uint16_t>(100, 7));
  const auto refused = [&](const std::string& rest, std::initializer_list<std::string> parts) {
    put("ds.json", R"({"train_batch_size": 4, )" + rest + "}");
    expect_parts(refusal([&] { read_inputs(o, 0, 1); }), parts);
  };
  refused(R"("optimizer": null)", {"optimizer: missing", "--learning-rate"});
  refused(
      R"("optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2, 3]}})",
      {"scheduler.params", "3 values"});
}

TEST_F(TrainLmFiles, AnAbsentKeyWhoseDefaultDiffersIsNamed) {
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256, )"
                    R"("embd_pdrop": 0, "resid_pdrop": 0})");
  put("ds.json", R"({"train_batch_size": 4, "wall_clock_breakdown": true, "memory_breakdown": true,)"
                 R"( "steps_per_print": 3, "optimizer": {"type": "AdamW"}})");
  Options o;
  o.model = path("model.json"), o.config = path("ds.json"), o.tensorboard = path("events");
  o.tokens = put_tokens(std::vector<std::uint16_t>(100, 7));
  const Inputs in = read_inputs(o, 0, 1);
  EXPECT_EQ(in.ds.warnings,
            (std::vector<std::string>{
                o.model + ": attn_pdrop: absent, which is 0 here and 0.1 in Hugging Face; give the rate"}));
  EXPECT_TRUE(in.ds.monitor.tensorboard_enabled);
  EXPECT_EQ(in.ds.monitor.tensorboard_output_path + in.ds.monitor.tensorboard_job_name, o.tensorboard);
}

TEST_F(TrainLmFiles, TextNeedsAVocabularyOfBytes) {
  put("ds.json", R"({"train_batch_size": 4, "optimizer": {"type": "AdamW"}})");
  put("text.txt", std::string(200, 'a'));
  Options o;
  o.model = path("model.json"), o.config = path("ds.json"), o.data = path("text.txt");
  for (const int vocabulary : {255, 257, 50257}) {
    put("model.json", concat(R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": )",
                             vocabulary, "}"));
    expect_parts(refusal([&] { read_inputs(o, 0, 1); }),
                 {"--data: " + o.data, "vocab_size 256", o.model, concat("has ", vocabulary), "--tokens"});
  }
  Options eval = o;
  std::swap(eval.data, eval.eval_data);
  expect_parts(refusal([&] { read_inputs(eval, 0, 1); }), {"--eval-data: " + o.data, "vocab_size 256"});
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})");
  EXPECT_EQ(read_inputs(o, 0, 1).tokens.count(), 200u);
}

/// The tokenizer of bytes with a token 256 that ends texts.
void put_tokenizer(const std::string& folder) {
  Tokenizer::bytes().save_pretrained(folder);
  const auto change = [&](const char* name, const auto& edit) {
    const std::string path = folder + "/" + name;
    auto file = nlohmann::ordered_json::parse(read_text_file(path));
    edit(file);
    std::ofstream(path) << file;
  };
  change("tokenizer.json", [](auto& file) {
    file["added_tokens"] = {{{"id", 256},
                             {"content", "<|end|>"},
                             {"single_word", false},
                             {"lstrip", false},
                             {"rstrip", false},
                             {"normalized", false},
                             {"special", true}}};
  });
  change("tokenizer_config.json", [](auto& file) { file["eos_token"] = "<|end|>"; });
}

TEST_F(TrainLmFiles, TextIsReadByTheTokenizerOfTheModel) {
  put("model/config.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 4, "vocab_size": 300,)"
                           R"( "eos_token_id": 256})");
  put("ds.json", R"({"train_batch_size": 1, "optimizer": {"type": "AdamW"}})");
  put("data.jsonl", "{\"text\": \"ab\", \"answer\": \"c\"}\n{\"text\": \"cde\", \"answer\": \"d\"}");
  put_tokenizer(path("model"));
  Options o;
  o.model = path("model/config.json"), o.config = path("ds.json"), o.data = path("data.jsonl");
  o.document_mask = true;
  const Inputs in = read_inputs(o, 0, 1);
  std::vector<std::int32_t> tokens(in.tokens.count());
  in.tokens.read(0, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{'a', 'b', 256, 'c', 'd', 'e', 256}));
  EXPECT_EQ(in.document_end, 256);
  EXPECT_EQ(in.tokens.text(), "ab\ncde");
  o.document_mask = false, o.prompt_key = "text", o.answer_key = "answer", o.long_samples = "refuse";
  EXPECT_EQ(read_inputs(o, 0, 1).samples, 2u);
  o.seq_len = 3;
  expect_parts(refusal([&] { read_inputs(o, 0, 1); }), {"data.jsonl:2: ", "5 tokens", "the 4 of a sample"});
  o.long_samples = "cut";
  EXPECT_EQ(read_inputs(o, 0, 1).samples, 2u);
}

TEST_F(TrainLmFiles, ATokenizerOfAnotherModelIsRefused) {
  put("ds.json", R"({"train_batch_size": 1, "optimizer": {"type": "AdamW"}})");
  put("data.txt", std::string(40, 'a'));
  put_tokenizer(path("tokenizer"));
  Options o;
  o.model = path("model.json"), o.config = path("ds.json"), o.data = path("data.txt");
  o.tokenizer = path("tokenizer");
  const auto what = [&](int vocabulary, const std::string& more = "") {
    put("model.json", concat(R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 4, "vocab_size": )",
                             vocabulary, more, "}"));
    return refusal([&] { read_inputs(o, 0, 1); });
  };
  EXPECT_EQ(what(257), "");
  EXPECT_EQ(what(300, R"(, "eos_token_id": [1, 256])"), "");
  // The end of the document is a token that the vocabulary lacks.
  expect_parts(what(256), {path("data.txt"), "token 256 at position 40", "vocab_size 256"});
  expect_parts(what(255), {path("tokenizer"), "256 tokens", "vocab_size 255"});
  expect_parts(what(257, R"(, "eos_token_id": 0)"),
               {"model.json: eos_token_id: is 0", path("tokenizer") + " is 256"});
  o.tokenizer = path("none");
  expect_parts(what(257), {"--tokenizer: ", path("none")});

  // Folders of tokens have the checksum of their tokenizer, which may lie in them.
  o.tokenizer = o.data = "", o.tokens = path("shards");
  const Tokenizer tokenizer = Tokenizer::from_pretrained(path("tokenizer"));
  const auto put_shards = [&](std::uint64_t checksum, std::optional<std::int32_t> eos) {
    fs::remove_all(path("shards"));
    TokenShards shards(path("shards"), 257);
    shards.write(std::vector<std::int32_t>(40, 7));
    put_tokenizer(shards.folder() + "/tokenizer");
    shards.commit({.tokenizer = checksum, .eos_token_id = eos, .documents = 1});
  };
  put_shards(tokenizer.checksum(), 256);
  EXPECT_EQ(what(257), "");
  EXPECT_EQ(read_inputs(o, 0, 1).tokenizer_name, path("shards/tokenizer"));
  EXPECT_EQ(what(256), "") << "none of the tokens is the one that the vocabulary lacks";
  expect_parts(what(255), {"shards/index.json: vocab_size: ", "257 kinds", "vocab_size 255"});
  put_shards(tokenizer.checksum(), 9);
  expect_parts(what(257, R"(, "eos_token_id": 256)"), {"eos_token_id: is 256", "shards/index.json is 9"});
  put_shards(tokenizer.checksum() + 1, 256);
  expect_parts(what(257), {"shards/index.json: tokenizer: ", "--tokenizer " + path("shards/tokenizer")});
  put_shards(tokenizer.checksum(), std::nullopt);
  o.document_mask = true;
  expect_parts(what(257), {"--document-mask: ", "shards/index.json", "no token that ends documents"});
}

TEST(TrainLmOptions, OfPromptsAndAnswersGoTogether) {
  const auto what = [&](std::vector<const char*> more) {
    more.insert(more.begin(), {"--model", "m", "--config", "c"});
    return refusal([&] { parse(more); });
  };
  EXPECT_EQ(what({"--data", "d", "--prompt-key", "q", "--answer-key", "a", "--long-samples", "refuse"}), "");
  expect_parts(what({"--data", "d", "--prompt-key", "q"}), {"--prompt-key and --answer-key", "both"});
  expect_parts(what({"--tokens", "d", "--prompt-key", "q", "--answer-key", "a"}), {"--prompt-key", "--data"});
  expect_parts(what({"--data", "d", "--prompt-key", "q", "--answer-key", "a", "--document-mask"}),
               {"--document-mask"});
  expect_parts(what({"--data", "d", "--long-samples", "drop"}), {"--long-samples", "drop"});
}

TEST_F(TrainLmFiles, TheHashCoversTheFirstAndTheLastToken) {
  std::vector<std::uint16_t> many((std::size_t{1} << 22) + 70000, 7);
  const auto hash = [&] { return checksum(Tokens::from_file(put_tokens(many))); };
  const std::uint64_t before = hash();
  EXPECT_EQ(hash(), before);
  for (const std::size_t at : {std::size_t{0}, std::size_t{65535}, many.size() - 1}) {
    many[at] = 8;
    EXPECT_NE(hash(), before) << at;
    many[at] = 7;
  }
}

// ---- messages

TEST(TrainLmMetrics, AreJsonWithAllDigits) {
  const UpdateReport r{
      .step = 3, .loss = 0.1, .grad_norm = 1.0 / 3, .lr = 0.001, .tokens_per_second = 10, .step_ms = 1.5};
  EXPECT_EQ(to_json(r),
            R"({"step": 3, "loss": 0.10000000000000001, "grad_norm": 0.33333333333333331, "lr": 0.001, )"
            R"("tokens_per_second": 10.0, "step_ms": 1.500, "exposed_comm_ms": 0.000})");
  EXPECT_NE(to_json({.loss = NAN}).find(R"("loss": null)"), std::string::npos);
}

TEST(TrainLmMetrics, DurationsReadWell) {
  EXPECT_EQ(human_duration(59.2), "59 s");
  EXPECT_EQ(human_duration(125), "2 min 05 s");
  EXPECT_EQ(human_duration(12000), "3 h 20 min");
}

TEST_F(TrainLmFiles, PlainProgressIsSparseAndBarsRedraw) {
  for (const bool terminal : {false, true}) {
    std::FILE* out = std::fopen(path("out").c_str(), "w");
    Progress progress(out, terminal, 500);
    for (std::uint64_t step = 0; step < 500; ++step) progress.update({.step = step, .loss = 2});
    std::fclose(out);
    std::ifstream in(path("out"));
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    EXPECT_EQ(std::ranges::count(text, '\n'), terminal ? 1 : 2) << "first and last, all within a second";
    EXPECT_EQ(std::ranges::count(text, '\r'), terminal ? 500 : 0);
    EXPECT_NE(text.find("500/500"), std::string::npos);
    EXPECT_NE(text.find("loss 2.0000"), std::string::npos);
  }
}

TEST_F(TrainLmFiles, ProgressIsALineEverySoManyUpdates) {
  std::FILE* out = std::fopen(path("out").c_str(), "w");
  Progress progress(out, true, 10, 0, 4);
  for (std::uint64_t step = 0; step < 10; ++step) progress.update({.step = step, .loss = 2});
  std::fclose(out);
  std::ifstream in(path("out"));
  std::string steps;
  for (std::string line; std::getline(in, line);) steps += line.substr(5, line.find('/') - 5) + " ";
  EXPECT_EQ(steps, "1 4 8 10 ");
}

TEST(Throughput, IsShownAsAShareOfThePeak) {
  // GPT-2 124M: 124 439 808 parameters, 786 432 of them for positions.
  Gpt2 model{Gpt2Config()};
  EXPECT_EQ(flops_per_token(model, 1024), 6.0 * (124439808 - 786432) + 12.0 * 12 * 768 * 1024);
  EXPECT_EQ(bf16_peak("NVIDIA H200"), 989.4e12);
  EXPECT_EQ(bf16_peak("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(bf16_peak("emulated GPU"), 0);
  EXPECT_EQ(
      describe_throughput(1000, 9.894e9, {"NVIDIA H200", 2}),
      "speed: 1000 tokens/s in the median, 0.5% of the bf16 peak of 2 x NVIDIA H200 (989.4 TFLOP/s each)");
  EXPECT_EQ(describe_throughput(1000, 1e9, {}), "speed: 1000 tokens/s in the median");
}

TEST(Throughput, TheMedianIsTheMiddle) {
  EXPECT_EQ(median(std::vector<double>{}), 0);
  EXPECT_EQ(median(std::vector<double>{3, 1, 2}), 2);
  EXPECT_EQ(median(std::vector<double>{4, 1, 2, 3}), 2.5);
}

}  // namespace
}  // namespace rz::train_lm
