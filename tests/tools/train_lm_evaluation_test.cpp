// Needs: rzrun_lib rzrun train_lm checkpoint

// train_lm that evaluates: the loss itself, the best checkpoint, and runs that stop early.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <regex>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/lm/validation.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/reference_gpt2.h"
#include "tests/support/small_gpt.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::lines;
using test::Program;
using test::SmallGpt;
using test::trained_gpt;
using test::TrainedGpt;
using Flags = std::vector<std::string>;

Flags operator+(Flags a, const Flags& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class TrainLmEvaluation : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return gpt_ / name; }
  std::string checkpoints() const { return path("checkpoints"); }
  /// The first samples of the data, of 16 + 1 tokens, or those from `first`.
  void put_samples(const std::string& name, std::size_t first, std::size_t count) const {
    gpt_.put(name, read_text_file(path("tokens.bin")).substr(2 * 16 * first, 2 * (16 * count + 1)));
  }
  /// Tokens that the data do not have: their loss rises.
  void put_other_tokens(const std::string& name) const {
    std::string tokens;
    for (int i = 0; i < 16 * 5 + 1; ++i) tokens += std::string{static_cast<char>(251 + i % 5), '\0'};
    gpt_.put(name, tokens);
  }

  std::string out_;  ///< what the last run printed
  TrainedGpt trained(int ranks, const Flags& flags) {
    const std::string out = path(concat("out", runs_++));
    Program p(gpt_.on_ranks(ranks, flags + Flags{"--metrics", out + ".jsonl", "--save", out}));
    EXPECT_EQ(p.wait(), 0) << p.err();
    out_ = p.out();
    return trained_gpt(out, out + ".jsonl");
  }
  static TrainedGpt without_evaluations(TrainedGpt t) {
    for (auto& update : t.metrics) update.erase("eval_loss");
    return t;
  }
  static std::vector<std::size_t> evaluated_updates(const TrainedGpt& t) {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < t.metrics.size(); ++i)
      if (t.metrics[i].contains("eval_loss")) found.push_back(i + 1);
    return found;
  }

  /// After how many updates the loss was the lowest.
  static std::size_t best_update(const TrainedGpt& t) {
    std::size_t best = 0;
    for (const std::size_t u : evaluated_updates(t))
      if (best == 0 || t.metrics[u - 1]["eval_loss"] < t.metrics[best - 1]["eval_loss"]) best = u;
    return best;
  }
  static std::string tag(std::size_t updates) { return step_tag(static_cast<std::int64_t>(updates)); }

  SmallGpt gpt_;
  int runs_ = 0;
};

TEST_F(TrainLmEvaluation, ChangesNoBitOfTheTraining) {
  put_samples("eval.bin", 3, 7);
  const TrainedGpt plain = trained(2, {"--steps", "6"});
  for (const char* strategy : {"ddp", "zero3"}) {
    const TrainedGpt evaluated = trained(
        2, {"--steps", "6", "--strategy", strategy, "--eval-steps", "2", "--eval-data", path("eval.bin")});
    EXPECT_EQ(evaluated_updates(evaluated), (std::vector<std::size_t>{2, 4, 6}));
    EXPECT_EQ(without_evaluations(evaluated), plain) << strategy;
  }
}

TEST_F(TrainLmEvaluation, SamplesThatAreHeldOutAreNotTrainedOn) {
  const Flags evaluation{"--steps", "5", "--eval-steps", "5"};
  const TrainedGpt split = trained(2, evaluation + Flags{"--validation-split-percentage", "19"});
  put_samples("eval.bin", 20, 5);
  put_samples("train.bin", 0, 20);
  EXPECT_EQ(split,
            trained(2, evaluation + Flags{"--eval-data", path("eval.bin"), "--tokens", path("train.bin")}));
  EXPECT_NE(out_.find("eval.bin, 5 samples, after every 5 updates"), std::string::npos) << out_;
}

TEST_F(TrainLmEvaluation, TheBestCheckpointIsLoadedAtTheEnd) {
  put_other_tokens("eval.bin");
  const Flags flags{"--eval-steps", "2", "--eval-data", path("eval.bin")};
  for (const Flags& async : {Flags{}, Flags{"--save-async"}}) {
    fs::remove_all(checkpoints());
    const TrainedGpt run =
        trained(2, flags + async +
                       Flags{"--steps", "9", "--save-steps", "1", "--save-total-limit", "1",
                             "--checkpoint-dir", checkpoints(), "--load-best-model-at-end"});
    ASSERT_EQ(evaluated_updates(run), (std::vector<std::size_t>{2, 4, 6, 8}));
    const std::size_t best = best_update(run);
    ASSERT_LT(best, 8u);
    EXPECT_EQ(checkpoint_tags(checkpoints()), (std::vector<std::string>{tag(best), "global_step9"}));
    EXPECT_EQ(read_tag_file(checkpoints(), best_file), tag(best));
    EXPECT_TRUE(std::regex_search(out_, std::regex(concat("best: eval_loss \\d+\\.\\d{4} after ", best,
                                                          " updates; loaded .*/", tag(best)))))
        << out_;
    EXPECT_EQ(run.weights, trained(2, {"--steps", concat(best)}).weights);
  }
}

TEST_F(TrainLmEvaluation, AnInterruptedRunStopsEarlyAtTheSameUpdate) {
  put_other_tokens("eval.bin");
  const Flags flags{"--eval-steps", "2", "--eval-data", path("eval.bin"), "--early-stopping-patience", "3"};
  const TrainedGpt whole = trained(2, flags + Flags{"--steps", "100"});
  const std::size_t best = best_update(whole), all = best + 6;
  EXPECT_EQ(whole.metrics.size(), all);
  EXPECT_NE(out_.find(concat("early stopping after ", all,
                             " updates: eval_loss has not improved in 3 evaluations")),
            std::string::npos)
      << out_;
  for (const int interrupted : {3, 4, 7}) {
    fs::remove_all(checkpoints());
    const Flags both = flags + Flags{"--metrics", path("parts.jsonl")};
    Program first(
        gpt_.on_ranks(2, both + Flags{"--steps", concat(interrupted), "--checkpoint-dir", checkpoints()}));
    EXPECT_EQ(first.wait(), 0) << first.err();
    Program second(gpt_.on_ranks(
        2, both + Flags{"--steps", "100", "--resume", checkpoints(), "--save", path("resumed")}));
    EXPECT_EQ(second.wait(), 0) << second.err();
    EXPECT_EQ(trained_gpt(path("resumed"), path("parts.jsonl")), whole) << interrupted;
    EXPECT_EQ(read_tag_file(checkpoints(), best_file), tag(best)) << interrupted;
    Program third(gpt_.on_ranks(2, flags + Flags{"--steps", "100", "--resume", checkpoints()}));
    EXPECT_EQ(third.wait(), 0) << third.err();
    EXPECT_EQ(read_tag_file(checkpoints(), latest_file), tag(all)) << "it is finished";
  }
}

/// The best loss so far, and early stopping, would compare what is not comparable.
TEST_F(TrainLmEvaluation, OtherDataAtAResumeAreNamed) {
  put_samples("eval.bin", 0, 4);
  put_samples("longer.bin", 0, 5);
  put_other_tokens("other.bin");
  const auto run = [&](const char* steps, const Flags& more) {
    Program p(gpt_.on_ranks(
        2, more + Flags{"--eval-steps", "2", "--steps", steps, "--checkpoint-dir", checkpoints()}));
    EXPECT_EQ(p.wait(), 0) << p.err();
    std::vector<std::string> named;
    for (const std::string& line : lines(p.out()))
      if (line.find("the data of 'evaluation'") != line.npos) named.push_back(line);
    return named;
  };
  const auto on = [&](const char* file) {
    return Flags{"--eval-data", path(file), "--resume", checkpoints()};
  };
  EXPECT_EQ(run("2", {"--eval-data", path("eval.bin")}).size(), 0u);
  EXPECT_EQ(run("4", on("eval.bin")).size(), 0u);
  const auto longer = run("6", on("longer.bin"));
  ASSERT_EQ(longer.size(), 1u);
  EXPECT_TRUE(std::regex_match(
      longer[0],
      std::regex("warning: the data of 'evaluation' are not those of the checkpoint: 4 samples of 16 \\+ 1 "
                 "tokens from number 0 on, checksum [0-9]+; now 5 samples .*; losses and the best one "
                 "before are of other data")))
      << longer[0];
  EXPECT_EQ(run("8", on("other.bin")).size(), 1u) << "as many samples";
  EXPECT_EQ(run("10", on("other.bin")).size(), 0u);
}

TEST_F(TrainLmEvaluation, AnImprovementMustExceedTheThreshold) {
  const Flags flags{"--validation-split-percentage", "20", "--eval-steps", "1", "--steps", "6",
                    "--early-stopping-patience",     "2"};
  const TrainedGpt whole = trained(1, flags);
  ASSERT_EQ(whole.metrics.size(), 6u) << "it improves by less than 100";
  EXPECT_EQ(trained(1, flags + Flags{"--early-stopping-threshold", "100"}).metrics.size(), 3u);
}

TEST_F(TrainLmEvaluation, KeysOfTheConfigurationDoTheSame) {
  put_other_tokens("eval.bin");
  gpt_.put_config("eval.json",
                  concat(R"(, "ringzero": {"checkpoint": {"output_dir": ")", checkpoints(),
                         R"(", "eval_steps": 2, "early_stopping_patience": 1, "save_steps": 3}})"));
  const TrainedGpt run =
      trained(1, {"--config", path("eval.json"), "--eval-data", path("eval.bin"), "--steps", "9"});
  const std::size_t best = best_update(run);
  EXPECT_EQ(run.metrics.size(), best + 2);
  EXPECT_EQ(read_tag_file(checkpoints(), best_file), tag(best));
  EXPECT_TRUE(fs::exists(checkpoints() + "/global_step3"));
}

TEST_F(TrainLmEvaluation, ACheckpointHasTheConfigurationOfItsModel) {
  Program p(gpt_.on_ranks(2, {"--steps", "1", "--checkpoint-dir", checkpoints(), "--save-async"}));
  EXPECT_EQ(p.wait(), 0) << p.err();
  Program merge({test::built("checkpoint"), "merge", checkpoints(), path("merged")});
  EXPECT_EQ(merge.wait(), 0) << merge.err();
  EXPECT_EQ(to_json(read_gpt2_config(path("merged"))), to_json(read_gpt2_config(path("model.json"))));
  Program init(gpt_.program({"--steps", "0", "--init", path("merged"), "--model", path("merged")}));
  EXPECT_EQ(init.wait(), 0) << init.err();
}

// ---- the loss

TEST_F(TrainLmEvaluation, TheLossIsTheMeanOfAllSamplesOnAnyNumberOfRanks) {
  constexpr std::size_t seq_len = 8, first = 5, samples = 11;
  std::string bytes;
  std::mt19937 random(1);
  for (std::size_t i = 0; i < seq_len * 16 + 1; ++i)
    bytes += std::string{static_cast<char>(random() % 32), '\0'};
  gpt_.put("random.bin", bytes);
  const Tokens tokens = Tokens::from_file(path("random.bin"));
  std::vector<std::vector<int>> all(samples, std::vector<int>(seq_len + 1));
  for (std::size_t s = 0; s < samples; ++s) tokens.read((first + s) * seq_len, all[s]);
  const Gpt2Config shape{.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 16, .vocab_size = 32};
  const test::ReferenceConfig reference{
      .layers = 1, .heads = 2, .channels = 16, .positions = 16, .vocabulary = 32};
  for (const int ranks : {1, 2, 3})
    for (const int stage : {0, 3}) {
      std::vector<double> losses(static_cast<std::size_t>(ranks));
      test::ReferenceParameters values;
      lab::world(ranks, [&](World& world) {
        Gpt2 model(shape);
        auto engine = initialize(world, model,
                                 {.config = concat(R"({"train_micro_batch_size_per_gpu": 2, "optimizer":
                                     {"type": "SGD"}, "zero_optimization": {"stage": )",
                                                   stage, "}}"),
                                  .seed = 3,
                                  .log = nullptr});
        for (const auto& [name, p] : model.named_parameters()) {
          const Tensor value = engine.strategy().values().whole(*p);
          if (world.rank() == 0)
            values[name].assign(value.data<float>(), value.data<float>() + value.count());
        }
        lm::Validation validation(engine, {tokens, first, samples}, seq_len);
        double& loss = losses[static_cast<std::size_t>(world.rank())];
        loss = validation.loss(engine, model).value();
        EXPECT_EQ(validation.loss(engine, model), loss) << "the same again";
      });
      const double expected = test::ReferenceGpt2(reference, values).forward_backward(all);
      EXPECT_GT(expected, 3);
      for (const double loss : losses) {
        EXPECT_EQ(loss, losses[0]) << "the same bits on all ranks";
        EXPECT_NEAR(loss, expected, 1e-6 * expected) << ranks << " ranks, stage " << stage;
      }
    }
}

// ---- wrong input

TEST_F(TrainLmEvaluation, WrongFlagsAreRefused) {
  put_samples("eval.bin", 0, 2);
  gpt_.put_config("f1.json",
                  R"(, "ringzero": {"checkpoint": {"eval_steps": 2, "metric_for_best_model": "f1"}})");
  const Flags split{"--validation-split-percentage", "20"}, steps{"--eval-steps", "1"};
  const std::pair<Flags, std::string> cases[] = {
      {steps, "--eval-steps: there is nothing to evaluate; add --eval-data FILE|DIR or "},
      {split, "--validation-split-percentage: is never evaluated; add --eval-steps N"},
      {{"--eval-data", path("eval.bin")}, "--eval-data: is never evaluated; add --eval-steps N"},
      {{"--early-stopping-patience", "1"},
       "--early-stopping-patience: needs evaluations; add --eval-steps N"},
      {{"--load-best-model-at-end"}, "--load-best-model-at-end: there is no folder for checkpoints"},
      {{"--load-best-model-at-end", "--checkpoint-dir", checkpoints()},
       "--load-best-model-at-end: needs evaluations; add --eval-steps N"},
      {steps + Flags{"--validation-split-percentage", "97"},
       "leave none to train on; use less, or more data"},
      {steps + Flags{"--eval-data", path("none.bin")}, "--eval-data: " + path("none.bin")},
      {split + Flags{"--config", path("f1.json")},
       "ringzero.checkpoint.metric_for_best_model: train_lm measures eval_loss, found eval_f1"}};
  for (const auto& [flags, what] : cases) {
    Program p(
        gpt_.program(Flags{"--steps", "2", "--metrics", path("m.jsonl"), "--save", path("out")} + flags));
    EXPECT_EQ(p.wait(), 2) << p.out();
    EXPECT_EQ(p.out(), "");
    const auto errors = lines(p.err());
    ASSERT_EQ(errors.size(), 1u) << p.err();
    EXPECT_NE(errors[0].find(what), std::string::npos) << errors[0];
    EXPECT_FALSE(fs::exists(path("m.jsonl")) || fs::exists(path("out")) || fs::exists(checkpoints()));
  }
}

}  // namespace
}  // namespace rz
