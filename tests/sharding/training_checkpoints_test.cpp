// Runs: ci
// Not under sanitizers: AKillAtAnyCallLeavesAValidBest

/// Runs that save, keep the best checkpoint, stop and resume by the section "ringzero.checkpoint".
#include "sharding/engine/checkpoints/training_checkpoints.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/engine/checkpoints/save_requests.h"
#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"

namespace {
/// Calls that change a folder until this process is killed; negative: it is not.
int calls_to_live = -1;
/// Called by fsync(); may be empty.
std::function<void()> at_fsync;

void count_call() {
  if (calls_to_live >= 0 && calls_to_live-- == 0) ::raise(SIGKILL);
}
}  // namespace

// These replace the C library's.
extern "C" {
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
int rename(const char* from, const char* to) noexcept {
  count_call();
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}
int fsync(int) {  // the machine does not stop
  count_call();
  if (at_fsync) at_fsync();
  return 0;
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
}

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using Names = std::vector<std::string>;

using Net = lab::Mlp;

void update(Engine& engine, Net& net) {
  engine.backward(net(engine.tape(), lab::batch(0)));
  engine.step();
}

/// The keys of ringzero.checkpoint, without signals: the ranks of most tests are threads of one process.
EngineOptions options(const std::string& keys, const char* signals = "false") {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
                               "optimizer": {"type": "AdamW"}, "ringzero": {"checkpoint": {"signals": )",
                           signals, keys.empty() ? "" : ", ", keys, "}}}"),
          .seed = 1,
          .log = nullptr};
}

/// What a run did.
struct Outcome {
  std::int64_t updates = 0;
  bool stopped = false, early = false;
  BestMetric best;
  std::vector<float> values;
  bool operator==(const Outcome&) const = default;
};

/// A folder that a test owns.
class TrainingCheckpointsTest : public testing::Test {
 protected:
  std::string keys(const std::string& more) const {
    return concat(R"("output_dir": ")", dir_, "\"", more.empty() ? "" : ", ", more);
  }
  /// Trains up to `steps` updates; evaluation number i has losses[i].
  static Outcome train(World& world, const EngineOptions& o, std::int64_t steps,
                       const std::vector<double>& losses = {}) {
    Net net;
    auto engine = initialize(world, net, {.config = o.config, .seed = o.seed, .log = nullptr});
    TrainingCheckpoints& checkpoints = engine.checkpoints();
    while (engine.global_steps() < steps && !engine.should_stop()) {
      update(engine, net);
      if (!checkpoints.should_evaluate()) continue;
      const auto evaluation =
          static_cast<std::size_t>(engine.global_steps() / checkpoints.config().eval_steps);
      checkpoints.record({{"loss", losses.at(evaluation - 1)}});
    }
    checkpoints.finish();
    return {engine.global_steps(), checkpoints.decision().stops(), checkpoints.early_stopped(),
            checkpoints.best(), lab::values_of(engine, net)};
  }
  Outcome train_on(int ranks, const std::string& more, std::int64_t steps,
                   const std::vector<double>& losses = {}) {
    Outcome result;
    lab::world(ranks, [&](World& world) {
      const Outcome own = train(world, options(keys(more)), steps, losses);
      if (world.is_main()) result = own;
    });
    return result;
  }
  void save_copy(const std::string& tag, const std::string& other) const {
    fs::create_directory(other);
    fs::copy(dir_ + "/" + tag, other + "/" + tag);
  }
  Names files() const {
    Names names;
    for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }
  /// The tag that DIR/best names, of a checkpoint that is complete and undamaged; empty: there is none.
  std::string valid_best() const {
    const std::string tag = read_tag_file(dir_, best_file).value_or("");
    if (tag.empty()) return tag;
    CheckpointReader reader = CheckpointReader::open(dir_ + "/" + tag);
    for (std::size_t f = 0; f < reader.index().files.size(); ++f) reader.verify(f);
    return tag;
  }

  const test::Folder folder_;
  const std::string dir_ = folder_ / "run";  // the first checkpoint makes it
};

// ---- saving

TEST_F(TrainingCheckpointsTest, ARunSavesByItsKeys) {
  for (const char* async : {"false", "true"}) {
    fs::remove_all(dir_);
    train_on(2, concat(R"("save_steps": 2, "async_save": )", async), 5);
    EXPECT_EQ(files(), (Names{"global_step2", "global_step4", "global_step5", "latest"}))
        << "the last one too";
    EXPECT_EQ(read_tag_file(dir_, latest_file), "global_step5");
  }
  fs::remove_all(dir_);
  train_on(2, R"("save_steps": 1, "save_total_limit": 2)", 4);
  EXPECT_EQ(files(), (Names{"global_step3", "global_step4", "latest"}));
}

TEST_F(TrainingCheckpointsTest, AnUpdateIsSavedOnce) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(keys(R"("save_steps": 1)")));
    EXPECT_FALSE(engine.should_stop()) << "before the first update";
    EXPECT_EQ(files(), Names{".ringzero.lock"});
    world.wait_for_everyone();
    update(engine, net);
    EXPECT_FALSE(engine.should_stop());
    EXPECT_TRUE(fs::exists(dir_));
    world.wait_for_everyone();
    if (world.is_main()) fs::remove_all(dir_);
    world.wait_for_everyone();
    EXPECT_FALSE(engine.should_stop());
    engine.checkpoints().finish();
    EXPECT_FALSE(fs::exists(dir_));
  });
}

TEST_F(TrainingCheckpointsTest, WithoutAFolderNothingIsSaved) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(""));
    update(engine, net);
    EXPECT_FALSE(engine.should_stop());
    EXPECT_FALSE(engine.checkpoints().finish());
  });
  EXPECT_FALSE(fs::exists(dir_));
}

TEST_F(TrainingCheckpointsTest, ARunThatIsResumedHasTheBitsOfOneThatIsNot) {
  const Outcome whole = train_on(2, "", 6);
  for (int saved = 1; saved < 6; ++saved) {
    fs::remove_all(dir_);
    train_on(2, "", saved);
    EXPECT_EQ(train_on(2, R"("resume_from_checkpoint": true)", 6), whole) << saved;
    EXPECT_EQ(files(), (Names{concat("global_step", saved), "global_step6", "latest"}));
  }
}

TEST_F(TrainingCheckpointsTest, AFolderWithoutCheckpointsBeginsARun) {
  EXPECT_EQ(train_on(2, R"("resume_from_checkpoint": true)", 2).updates, 2);
  lab::world(1, [&](World& world) {
    Net net;
    const std::string none = dir_ + "/none";
    const auto to = [&](const std::string& resume) {
      return options(concat(R"("output_dir": ")", none, R"(", "resume_from_checkpoint": )", resume));
    };
    auto engine = initialize(world, net, to("true"));
    EXPECT_FALSE(engine.checkpoints().resumed());
    EXPECT_EQ(engine.checkpoints().describe_resume(),
              "resume: " + none + " has no checkpoint; the run starts afresh");
    fs::create_directories(dir_ + "/empty");
    for (const auto& [path, what] :
         {std::pair<std::string, std::string>{
              none,
              concat(": does not exist; ", dir_, " has 1 checkpoint: global_step2; name one that exists")},
          {dir_ + "/empty", ": has no checkpoint; name one"},
          {dir_ + "/global_step7",
           concat(": does not exist; ", dir_, " has 1 checkpoint: global_step2; ")}}) {
      Net other;
      const Error e = error_of([&] { initialize(world, other, to("\"" + path + "\"")); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(
          std::string(e.what()).find(concat("ringzero.checkpoint.resume_from_checkpoint: ", path, what)),
          std::string::npos)
          << e.what();
    }
  });
}

TEST_F(TrainingCheckpointsTest, ARestartedRunGoesOnWithTheLastCheckpointOfItsOwn) {
  struct Variable {
    Variable(const char* n, const char* value) : name(n) { ::setenv(n, value, 1); }
    ~Variable() { ::unsetenv(name); }
    const char* name;
  };
  const auto resumed = [&](const std::string& base, const char* job, const char* restarts) {
    const Variable run("TORCHELASTIC_RUN_ID", job), count("TORCHELASTIC_RESTART_COUNT", restarts);
    std::string line;
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(
          world, net,
          options(keys(concat(R"("save_steps": 1)",
                              base.empty() ? "" : R"(, "resume_from_checkpoint": ")" + base + "\""))));
      if (world.is_main()) line = engine.checkpoints().describe_resume();
      update(engine, net);
      engine.should_stop();
    });
    return line;
  };
  const std::string base = dir_ + "-base";
  train_on(2, "", 3);
  fs::rename(dir_, base);
  const std::string named = base + "/global_step3", again = "resumed: " + named + ", after 3 updates";
  EXPECT_EQ(resumed(named, "a", "0"), again);
  EXPECT_EQ(resumed(named, "a", "1"), concat("resumed: ", dir_, "/global_step4, after 4 updates"));
  EXPECT_EQ(resumed("", "a", "2"), concat("resumed: ", dir_, "/global_step5, after 5 updates"));
  EXPECT_EQ(
      resumed(named, "b", "1"),
      again + concat("\nwarning: ", dir_,
                     " has 3 checkpoints that this run does not go on from: global_step4 to global_step6"))
      << "they are of another job";
  EXPECT_EQ(resumed(named, "none", "1").rfind(again, 0), 0u) << "torchrun's name of every run";
  fs::remove_all(dir_), fs::remove_all(base);
  EXPECT_EQ(resumed("", "a", "1"), concat("warning: the launcher has started the run again, and ", dir_,
                                          " has no checkpoint of it; the run starts afresh"));
}

TEST_F(TrainingCheckpointsTest, AnyCheckpointCanBeTheFirst) {
  train_on(2, R"("save_steps": 1, "eval_steps": 1)", 3, {3, 1, 2});
  const std::pair<const char*, int> cases[] = {
      {"", 3}, {"/", 3}, {"/latest", 3}, {"/best", 2}, {"/global_step1", 1}};
  for (const auto& [name, steps] : cases)
    lab::world(1, [&](World& world) {
      Net net;
      auto engine =
          initialize(world, net, options(concat(R"("resume_from_checkpoint": ")", dir_, name, "\"")));
      ASSERT_TRUE(engine.checkpoints().resumed()) << name;
      EXPECT_EQ(engine.global_steps(), steps) << name;
      EXPECT_EQ(engine.checkpoints().config().output_dir, dir_) << name;
    });
}

TEST_F(TrainingCheckpointsTest, WhatHasChangedSinceTheCheckpointIsOneLine) {
  const auto resumed = [&](const std::string& config, Decay decay = Decay::all) {
    std::string line;
    lab::world(1, [&](World& world) {
      Net net;
      Engine engine = initialize(
          world, net,
          {.config =
               concat("{", config, R"(, "ringzero": {"checkpoint": {"signals": false, "output_dir": ")", dir_,
                      R"(", "resume_from_checkpoint": true}, "deterministic": "world_size_invariant"}})"),
           .decay = decay,
           .seed = 1,
           .log = nullptr});
      if (const auto& loaded = engine.checkpoints().resumed()) line = loaded->differences;
      if (!fs::exists(dir_)) engine.save_checkpoint(dir_);
    });
    return line;
  };
  const std::string batches = R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 4)";
  const std::string adamw =
      R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99]}})";
  EXPECT_EQ(resumed(batches + adamw), "");
  EXPECT_EQ(resumed(batches + adamw), "");
  EXPECT_EQ(resumed(R"("train_batch_size": 16, "train_micro_batch_size_per_gpu": 2)" + adamw),
            "train_batch_size: 8, now 16; train_micro_batch_size_per_gpu: 4, now 2");
  EXPECT_EQ(
      resumed(
          batches +
              R"(, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 0.5,
      "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10}},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.999], "weight_decay": 0.1}})",
          Decay::matrices),
      "bf16.check_grad_overflow: absent, now true; bf16.enabled: absent, now true; "
      "data_types.grad_accum_dtype: absent, now \"fp32\"; gradient_clipping: 1.0, now 0.5; "
      "optimizer.params.betas: [0.9,0.99], now [0.9,0.999]; optimizer.params.lr: 0.01, now 0.5; "
      "optimizer.params.weight_decay: 0.0, now 0.1; scheduler.params.warmup_max_lr: absent, now 0.5; "
      "scheduler.params.warmup_num_steps: absent, now 10; scheduler.params.warmup_type: absent, now "
      "\"log\"; scheduler.type: absent, now \"WarmupLR\"; groups of parameters: all, now matrices, rest");
}

TEST_F(TrainingCheckpointsTest, ACheckpointThatIsDamagedIsWrongInput) {
  train_on(2, "", 1);
  const std::string file = dir_ + "/global_step1/" + rank_file(1, 2);
  fs::resize_file(file, fs::file_size(file) - 1);
  lab::world(2, [&](World& world) {
    Net net;
    const Error e =
        error_of([&] { initialize(world, net, options(keys(R"("resume_from_checkpoint": true)"))); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(std::string(e.what()).rfind("configuration: ringzero.checkpoint.resume_from_checkpoint: ", 0),
              0u)
        << e.what();
    EXPECT_NE(std::string(e.what()).find(file), std::string::npos) << e.what();
  });
}

TEST_F(TrainingCheckpointsTest, AnotherProcessThatSavesToTheFolderIsNamed) {
  test::Gate ready, end;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = lock_checkpoint_folder(dir_);
    ready.open();
    end.wait();
    _exit(0);
  }
  ready.wait();
  const std::string what = concat(dir_, ": process ", child, " on ");
  lab::world(2, [&](World& world) {
    Net net;
    const Error e = error_of([&] { initialize(world, net, options(keys(""))); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("ringzero.checkpoint.output_dir: " + what), std::string::npos)
        << e.what();
    Engine engine = initialize(world, net, options(""));
    EXPECT_EQ(error_of([&] { engine.save_checkpoint(dir_); }).code(), Errc::io);
  });
  EXPECT_FALSE(fs::exists(dir_ + "/global_step0"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(train_on(2, "", 2).updates, 2);
  EXPECT_EQ(files(), (Names{"global_step2", "latest"}));
}

TEST_F(TrainingCheckpointsTest, ValuesOfTheProgramAreSaved) {
  lab::world(2, [&](World& world) {
    Net net, other;
    auto engine = initialize(world, net, options(keys(R"("save_steps": 1)")));
    engine.checkpoints().client_state()["epoch"] = 3;
    update(engine, net);
    EXPECT_FALSE(engine.should_stop());
    auto resumed = initialize(world, other, options(keys(R"("resume_from_checkpoint": true)")));
    EXPECT_EQ(resumed.checkpoints().client_state(), (ClientState{{"epoch", 3}}));
  });
}

// ---- the best checkpoint

TEST_F(TrainingCheckpointsTest, TheBestCheckpointIsKept) {
  for (const char* async : {"false", "true"}) {
    fs::remove_all(dir_);
    const Outcome run = train_on(
        2, concat(R"("save_steps": 1, "save_total_limit": 1, "eval_steps": 2, "async_save": )", async), 9,
        {5, 3, 4, 4});
    EXPECT_EQ(files(), (Names{"best", "global_step4", "global_step9", "latest"}));
    EXPECT_EQ(valid_best(), "global_step4");
    EXPECT_EQ(run.best.value, 3.0);
    EXPECT_EQ(run.best.step, 4u);
  }
}

TEST_F(TrainingCheckpointsTest, ABestValueIsSavedThoughNothingElseRequiresIt) {
  train_on(2, R"("eval_steps": 2)", 7, {3, 2, 2});
  EXPECT_EQ(files(), (Names{"best", "global_step2", "global_step4", "global_step7", "latest"}));
  EXPECT_EQ(valid_best(), "global_step4");
  fs::remove_all(dir_);
  train_on(2, R"("eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": true)", 4, {3, 4});
  EXPECT_EQ(valid_best(), "global_step4") << "of the last update, which finish() saves";
}

TEST_F(TrainingCheckpointsTest, TheBestModelIsLoadedAtTheEnd) {
  const Outcome best = train_on(2, "", 4);
  fs::remove_all(dir_);
  const Outcome run = train_on(2, R"("eval_steps": 2, "load_best_model_at_end": true)", 7, {3, 2, 2.5});
  EXPECT_EQ(run.values, best.values);
  EXPECT_EQ(run.updates, 7);
  fs::remove_all(dir_);
  EXPECT_NE(train_on(2, R"("eval_steps": 2)", 7, {3, 2, 2.5}).values, best.values);
}

TEST_F(TrainingCheckpointsTest, TheBestCheckpointIsLoadedByItsName) {
  train_on(2, R"("save_steps": 1, "eval_steps": 1)", 3, {3, 1, 2});
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(""));
    const auto loaded = engine.load_checkpoint(dir_, {.tag = "best"});
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->tag, "global_step2");
    world.wait_for_everyone();
    if (world.is_main()) fs::remove(dir_ + "/best");
    world.wait_for_everyone();
    const Error e = error_of([&] { engine.load_checkpoint(dir_, {.tag = "best"}); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(e.what(),
              dir_ + ": has no file best that names a checkpoint; give a tag, or none for the last one");
  });
}

TEST_F(TrainingCheckpointsTest, AnotherFolderHasABestCheckpointOfItsOwn) {
  train_on(2, R"("eval_steps": 1)", 3, {3, 1, 2});
  const std::string other = dir_ + "/other";
  save_copy("global_step2", other);  // of some other run
  lab::world(2, [&](World& world) {
    train(world,
          options(concat(R"("output_dir": ")", other, R"(", "resume_from_checkpoint": ")", dir_,
                         R"(", "eval_steps": 1, "early_stopping_patience": 3)")),
          9, {9, 9, 9, 2.5, 2.25, 8, 8, 8, 8});
  });
  EXPECT_EQ(read_tag_file(other, best_file), "global_step5");
  EXPECT_EQ(checkpoint_tags(other), (Names{"global_step2", "global_step4", "global_step5", "global_step6"}))
      << "it stops after three values that are worse than 1";
}

TEST_F(TrainingCheckpointsTest, ABestFileThatACrashLeftBehindIsMended) {
  train_on(2, R"("save_steps": 1, "eval_steps": 1)", 3, {3, 2, 1});
  write_tag_file(dir_, best_file, "global_step1");  // the process ended before it wrote the file
  train_on(2, R"("eval_steps": 1, "resume_from_checkpoint": true)", 4, {9, 9, 9, 5});
  EXPECT_EQ(valid_best(), "global_step3");
  remove_checkpoint(dir_, "global_step3");
  train_on(2, R"("eval_steps": 1, "resume_from_checkpoint": true)", 5, {9, 9, 9, 9, 6});
  EXPECT_EQ(valid_best(), "global_step5") << "the best of those that are left to evaluate";
}

// ---- evaluation and early stopping

TEST_F(TrainingCheckpointsTest, AnInterruptedRunStopsAtTheSameUpdate) {
  const std::vector<double> losses{4, 3.5, 3.75, 3.4375, 3.5, 3.46875, 3.5, 1};
  const std::string rule =
      R"("eval_steps": 2, "save_total_limit": 1, "early_stopping_patience": 3, "early_stopping_threshold": 0.125)";
  const Outcome whole = train_on(2, rule, 16, losses);
  EXPECT_EQ(whole.updates, 10) << "the fourth value is better, but not by the threshold";
  EXPECT_TRUE(whole.early);
  EXPECT_FALSE(whole.stopped);
  EXPECT_EQ(whole.best.tag, "global_step8");
  const Names all = files();
  for (int interrupted = 1; interrupted <= 10; ++interrupted) {
    fs::remove_all(dir_);
    train_on(2, rule, interrupted, losses);
    EXPECT_EQ(train_on(2, rule + R"(, "resume_from_checkpoint": true)", 16, losses), whole) << interrupted;
    EXPECT_EQ(files(), all) << interrupted;
    EXPECT_EQ(valid_best(), "global_step8");
  }
}

TEST_F(TrainingCheckpointsTest, EarlyStoppingNeedsNoFolder) {
  lab::world(2, [&](World& world) {
    const Outcome run =
        train(world, options(R"("eval_steps": 1, "early_stopping_patience": 2)"), 9, {3, 4, 4});
    EXPECT_EQ(run.updates, 3);
    EXPECT_TRUE(run.early);
  });
  EXPECT_FALSE(fs::exists(dir_));
}

TEST_F(TrainingCheckpointsTest, ValuesOfAnotherMetricAreNotCompared) {
  train_on(2, R"("eval_steps": 1)", 2, {0.25, 0.5});
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(
        world, net, options(keys(R"("resume_from_checkpoint": true, "metric_for_best_model": "accuracy")")));
    EXPECT_FALSE(engine.checkpoints().best().value);
    EXPECT_TRUE(engine.checkpoints().best().greater_is_better);
    engine.checkpoints().record({{"eval_loss", 1}, {"eval_accuracy", 0.125}});
    EXPECT_EQ(engine.checkpoints().best().value, 0.125);
  });
}

TEST_F(TrainingCheckpointsTest, WrongMetricsAreErrorsOnAllRanks) {
  lab::world(3, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(R"("metric_for_best_model": "eval_f1")"));
    TrainingCheckpoints& checkpoints = engine.checkpoints();
    EXPECT_STREQ(
        error_of([&] {
          checkpoints.record({{"eval_loss", 1}, {"loss", 1}});
        }).what(),
        "configuration: ringzero.checkpoint.metric_for_best_model: the evaluation has no eval_f1; it "
        "has eval_loss, loss");
    for (const double other : {1.0000000000000002, -1.0, std::nan("")}) {
      const Error e = error_of([&] { checkpoints.record({{"f1", world.rank() == 1 ? other : 1}}); });
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_NE(std::string(e.what()).find("different values of eval_f1"), std::string::npos) << e.what();
    }
    checkpoints.record({{"f1", world.rank() == 1 ? -std::nan("") : std::nan("")}});
    EXPECT_FALSE(checkpoints.best().value) << "not a number is not the best one";
    checkpoints.record({{"f1", 1}});
    EXPECT_EQ(checkpoints.best().value, 1.0);
    Net other;
    auto stopping = initialize(world, other, options(R"("eval_steps": 1, "early_stopping_patience": 1)"));
    const Error e = error_of([&] { stopping.checkpoints().record({{"loss", std::nan("")}}); });
    EXPECT_EQ(e.code(), Errc::diverged);
    EXPECT_NE(std::string(e.what()).find("the evaluation counted no target"), std::string::npos) << e.what();
    EXPECT_FALSE(stopping.should_stop());
  });
}

TEST_F(TrainingCheckpointsTest, ASignalInAnEvaluationSavesAndTheResumedRunEvaluates) {
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
    World world(Communicator::connect(rank, 2, std::move(store)));
    const std::string with_signals = keys(R"("eval_steps": 2, "resume_from_checkpoint": true)");
    Net net, again;
    {
      auto engine = initialize(world, net, options(with_signals, "true"));
      while (!engine.checkpoints().should_evaluate()) update(engine, net);
      require(!engine.checkpoints().stop_requested(), Errc::system, "nothing was requested");
      if (rank == 1) ::raise(SIGUSR1), ::raise(SIGTERM);
      require(engine.checkpoints().stop_requested(), Errc::system, "the signal was not found");
      require(engine.should_stop() && engine.checkpoints().decision().reason == SaveReason::terminate,
              Errc::system, "the run does not stop");
      engine.checkpoints().finish();
    }
    auto engine = initialize(world, again, options(with_signals, "true"));
    require(engine.global_steps() == 2 && engine.checkpoints().should_evaluate(), Errc::system,
            "the evaluation was left out");
    require(!engine.should_stop(), Errc::system, "stopped");
    if (rank == 0) ::raise(SIGTERM);
    require(!engine.should_stop(), Errc::system, "decided again within an update");
    engine.checkpoints().record({{"loss", 1}});
    update(engine, again);
    require(engine.should_stop(), Errc::system, "did not stop");
    engine.checkpoints().finish();
    auto last = initialize(world, net, options(with_signals, "false"));
    require(!last.checkpoints().should_evaluate(), Errc::system, "evaluated twice");
  });
  EXPECT_EQ(read_tag_file(dir_, latest_file), "global_step3");
}

TEST_F(TrainingCheckpointsTest, ASignalBeforeTheFirstUpdateStopsTheRun) {
  test::expect_processes(1, [&](int, std::shared_ptr<Store> store) {
    World world(Communicator::connect(0, 1, std::move(store)));
    Net net;
    auto engine = initialize(world, net, options(keys(""), "true"));
    ::raise(SIGTERM);
    require(engine.should_stop(), Errc::system, "did not stop");
    engine.checkpoints().finish();
  });
  EXPECT_FALSE(fs::exists(dir_));
}

// ---- signals and the end of an allocation

/// Ranks in folders of their own have an output_dir of their own, as hosts without a shared file system.
TEST_F(TrainingCheckpointsTest, AFolderThatRanksDoNotShareIsFoundBeforeTheFirstUpdate) {
  fs::create_directories(dir_ + "/0");
  fs::create_directories(dir_ + "/1/out");
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
    fs::current_path(concat(dir_, "/", rank));
    World world(Communicator::connect(rank, 2, std::move(store)));
    Net net;
    auto engine = initialize(world, net, options(R"("output_dir": "out")"));
    const std::string error = error_of([&] { engine.should_stop(); }).what();
    if (error.find("out: rank 1 does not see what rank 0 has made there") == std::string::npos ||
        engine.global_steps() != 0) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.c_str());
      ::_exit(7);
    }
  });
}

TEST_F(TrainingCheckpointsTest, SigtermOnOneRankSavesAndStopsAll) {
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
    World world(Communicator::connect(rank, 2, std::move(store)));
    Net net;
    auto engine = initialize(world, net,
                             options(keys(R"("async_save": true, "load_best_model_at_end": true)"), "true"));
    for (int i = 0; i < 9 && !engine.should_stop(); ++i) {
      update(engine, net);
      if (i == 1 && rank == 0) ::raise(SIGUSR1);
      if (i == 3 && rank == 1) ::raise(SIGTERM);
    }
    const SaveDecision& decision = engine.checkpoints().decision();
    const bool right = engine.global_steps() == 4 && decision.reason == SaveReason::terminate &&
                       decision.rank == 1 && !engine.checkpoints().finish() && engine.should_stop();
    if (!right) ::_exit(7);
  });
  EXPECT_EQ(files(), (Names{"global_step2", "global_step4", "latest"}));
}

/// SIGTERM in micro-batch `at` of update `in`, counted from 0, of 4 with 3 micro-batches each. Returns
/// whether the run was stopped with the state before that update; a run that goes on has the bits of one
/// without.
TEST_F(TrainingCheckpointsTest, SigtermInALongUpdateSavesTheStateBeforeIt) {
  const auto accumulating = [&](int stage, const std::string& more, const char* signals) {
    EngineOptions o = options(keys(more), signals);
    const std::string key = R"("stage": 2)";
    o.config.replace(o.config.find(key), key.size(), concat(R"("stage": )", stage));
    o.config.insert(1, R"("gradient_accumulation_steps": 3, )");
    return o;
  };
  for (const int stage : {0, 2, 3}) {
    fs::remove_all(dir_);
    std::vector<float> whole;
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, accumulating(stage, "", "false"));
      auto loader = engine.loader(lab::samples());
      for (int u = 0; u < 4; ++u) engine.train_batch(loader, std::ref(net));
      const auto all = lab::values_of(engine, net);
      if (world.is_main()) whole = all;
    });
    test::expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
      World world(Communicator::connect(rank, 2, std::move(store)));
      Net net;
      auto engine = initialize(world, net, accumulating(stage, "", "true"));
      auto loader = engine.loader(lab::samples());
      int pass = 0;
      const auto signalled = [&](Tape& t, const Batch& b) {
        const int number = pass++;  // an update in which a micro-batch has taken a second is looked at
        if (number % 3 == 0 && rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1100));
        if (number == 4 && rank == 1) ::raise(SIGTERM);
        return net(t, b);
      };
      while (engine.global_steps() < 4 && !engine.should_stop()) engine.train_batch(loader, signalled);
      const SaveDecision& decision = engine.checkpoints().decision();
      engine.checkpoints().finish();
      const bool right = engine.global_steps() == 1 && pass == 5 && decision.reason == SaveReason::terminate;
      if (!right) ::_exit(7);
    });
    EXPECT_EQ(files(), (Names{"global_step1", "latest"}));
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, accumulating(stage, R"("resume_from_checkpoint": true)", "false"));
      auto loader = engine.loader(lab::samples());
      EXPECT_EQ(engine.global_steps(), 1);
      while (engine.global_steps() < 4) engine.train_batch(loader, std::ref(net));
      const auto all = lab::values_of(engine, net);
      if (world.is_main()) {
        EXPECT_EQ(all, whole) << stage;
      }
    });
  }
}

/// One finds the other's lock in its first should_stop(), since neither found a folder when it began.
TEST_F(TrainingCheckpointsTest, TheSecondOfTwoFreshRunsIsRefusedBeforeItsFirstUpdate) {
  test::Gate ready, begun, end;
  const pid_t child = ::fork();
  if (child == 0) {
    lab::world(1, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options(keys("")));
      ready.wait();
      if (engine.should_stop()) ::_exit(7);
      begun.open(), begun.open();  // for each rank
      end.wait();
    });
    ::_exit(0);
  }
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(keys("")));
    EXPECT_FALSE(fs::exists(dir_));
    world.wait_for_everyone();
    if (world.is_main()) ready.open();
    begun.wait();
    const Error e = error_of([&] { engine.should_stop(); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find(concat("output_dir: ", dir_, ": process ", child, " on ")),
              std::string::npos)
        << e.what();
    EXPECT_EQ(engine.global_steps(), 0);
  });
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

/// SIGTERM ends a load at once.
TEST_F(TrainingCheckpointsTest, WhileACheckpointIsLoadedSigtermIsNotRecorded) {
  EXPECT_EQ(train_on(1, "", 2).updates, 2);
  struct Observer final : StatefulLoader {
    LoaderPosition position() const override { return {}; }
    void set_position(const LoaderPosition&) override { during = current(); }
    static void (*current())(int) {
      struct sigaction now {};
      ::sigaction(SIGTERM, nullptr, &now);
      return now.sa_handler;
    }
    void (*during)(int) = SIG_IGN;
  };
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(keys(""), "true"));
    Observer observer;
    engine.loader_positions()->attach("observer", observer);
    engine.save_checkpoint(dir_);
    const auto recording = Observer::current();
    ASSERT_TRUE(engine.load_checkpoint(dir_));
    EXPECT_EQ(observer.during, SIG_DFL);
    EXPECT_EQ(Observer::current(), recording);
    EXPECT_NE(recording, SIG_DFL);
    engine.loader_positions()->detach(observer);
  });
}

TEST_F(TrainingCheckpointsTest, TheEndOfAnAllocationSavesAndStops) {
  const auto now =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  const auto updates = [&](int seconds, const char* more) {
    ::setenv("SLURM_JOB_END_TIME", concat(now.count() + seconds).c_str(), 1);
    const Outcome run = train_on(2, more, 3);
    ::unsetenv("SLURM_JOB_END_TIME");
    return run.stopped ? run.updates : 0;
  };
  EXPECT_EQ(updates(60, ""), 1) << "two minutes before the end by default";
  EXPECT_EQ(files(), (Names{"global_step1", "latest"}));
  EXPECT_EQ(updates(60, R"("allocation_margin": 5)"), 0);
  EXPECT_EQ(updates(60, R"("stop_before_allocation_end": false)"), 0);
}

TEST(SaveRequestOptions, AreThoseOfTheKeys) {
  ::setenv("SLURM_JOB_END_TIME", "1790000000", 1);
  const SaveRequestOptions o =
      save_request_options({.save_steps = 7, .save_minutes = 3, .allocation_margin = 50});
  EXPECT_EQ(o.save_steps, 7u);
  EXPECT_EQ(o.save_interval, std::chrono::minutes(3));
  EXPECT_EQ(o.allocation_margin, std::chrono::seconds(50));
  EXPECT_EQ(o.allocation_end, std::chrono::system_clock::time_point(std::chrono::seconds(1790000000)));
  EXPECT_FALSE(save_request_options({.stop_before_allocation_end = false}).allocation_end);
  ::unsetenv("SLURM_JOB_END_TIME");
  EXPECT_FALSE(save_request_options({}).allocation_end);
}

TEST_F(TrainingCheckpointsTest, OneEngineHasTheSignalsOfAProcess) {
  lab::world(1, [&](World& world) {
    Net net, other;
    auto engine = initialize(world, net, options(keys(""), "true"));
    const Error e = error_of([&] { initialize(world, other, options(keys(""), "true")); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("configuration: ringzero.checkpoint.signals: "), std::string::npos)
        << e.what();
    initialize(world, other, options(keys("")));
  });
}

/// Of the library, whatever call finds it.
TEST_F(TrainingCheckpointsTest, AFolderThatIsRemovedWhileItIsSavedToIsNamed) {
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(""));
    int refused = 0, gone = 0;
    for (int removed_at = 0; removed_at < 12; ++removed_at) {
      int call = 0;
      at_fsync = [&] {
        if (call++ == removed_at) fs::remove_all(dir_);
      };
      try {
        engine.save_checkpoint(dir_);
      } catch (const Error& e) {
        const std::string what = e.what();
        ++refused, gone += what.find("is gone after it was written") != what.npos;
        EXPECT_EQ(e.code(), Errc::io) << what;
        EXPECT_TRUE(what.starts_with(dir_ + "/")) << what;
        EXPECT_EQ(what.find("filesystem error"), what.npos) << what;
      }
      at_fsync = nullptr;
      engine.save_checkpoint(dir_);  // the next one is complete
      EXPECT_EQ(read_tag_file(dir_, latest_file), "global_step0");
    }
    EXPECT_GE(refused, 2);
    EXPECT_GE(gone, 1);
  });
}

// ---- processes that are killed

/// A run of a process of its own that is killed before its call number `call`, which changes the folder.
/// Returns false once it lives to the end.
bool killed_at(int call, const std::string& keys, const std::vector<double>& losses) {
  const int status = test::in_forked_child([&] {
    World world(Communicator::connect(0, 1, memory_store()));
    Net net;
    auto engine = initialize(world, net, options(keys));
    calls_to_live = call;
    while (engine.global_steps() < static_cast<std::int64_t>(losses.size()) && !engine.should_stop()) {
      update(engine, net);
      engine.checkpoints().record({{"loss", losses[static_cast<std::size_t>(engine.global_steps() - 1)]}});
    }
    engine.checkpoints().finish();
    calls_to_live = -1;
    return true;
  });
  EXPECT_TRUE(status == 0 || status == 1000 + SIGKILL) << status;
  return status != 0;
}

TEST_F(TrainingCheckpointsTest, AKillAtAnyCallLeavesAValidBestCheckpoint) {
  const std::vector<double> losses{4, 4.5, 3}, longer{4, 4.5, 3, 3.5};
  for (const char* async : {"false", "true"}) {
    const std::string all = keys(concat(
        R"("save_steps": 1, "save_total_limit": 1, "resume_from_checkpoint": true, "async_save": )", async));
    std::set<std::string> seen;
    int call = 0;
    const int stride = std::getenv("RZ_LONG_TESTS") || std::string(async) == "false" ? 1 : 7;
    for (bool killed = true; killed; call += stride) {
      fs::remove_all(dir_);
      killed = killed_at(call, all, losses);
      seen.insert(valid_best());
      const std::string last = read_tag_file(dir_, latest_file).value_or("");
      if (!last.empty()) CheckpointReader::open(dir_ + "/" + last);
      killed_at(-1, all, longer);
      EXPECT_EQ(valid_best(), "global_step3") << "killed at " << call;
      EXPECT_EQ(files(), (Names{"best", "global_step3", "global_step4", "latest"})) << "killed at " << call;
    }
    EXPECT_GT(call, 40);
    EXPECT_EQ(seen, (std::set<std::string>{"", "global_step1", "global_step3"}));
  }
}

// ---- keys

CheckpointConfig parsed(const std::string& keys, const TrainingArguments& arguments = {}) {
  return parse_ds_config(concat(R"({"ringzero": {"checkpoint": {)", keys, "}}}"), "ds.json", arguments)
      .checkpoint;
}

TEST(CheckpointKeys, SetTheConfiguration) {
  EXPECT_EQ(parsed(""), CheckpointConfig());
  EXPECT_EQ(parsed(R"("output_dir": "out", "save_steps": 5, "save_minutes": 6, "save_total_limit": 7,
      "async_save": true, "signals": false, "stop_before_allocation_end": false, "allocation_margin": 8,
      "resume_from_checkpoint": true, "eval_steps": 9, "metric_for_best_model": "accuracy",
      "load_best_model_at_end": true, "early_stopping_patience": 10, "early_stopping_threshold": 0.5)"),
            (CheckpointConfig{.output_dir = "out",
                              .save_steps = 5,
                              .save_minutes = 6,
                              .save_total_limit = 7,
                              .async_save = true,
                              .signals = false,
                              .stop_before_allocation_end = false,
                              .allocation_margin = 8,
                              .resume_from_checkpoint = "out",
                              .eval_steps = 9,
                              .metric_for_best_model = "eval_accuracy",
                              .greater_is_better = true,
                              .load_best_model_at_end = true,
                              .early_stopping_patience = 10,
                              .early_stopping_threshold = 0.5}));
  EXPECT_TRUE(parsed(R"("greater_is_better": true)").greater_is_better);
  EXPECT_FALSE(parsed(R"("metric_for_best_model": "my_loss")").greater_is_better);
}

TEST(CheckpointKeys, AreFilledByArguments) {
  const CheckpointConfig c = parsed("", {.output_dir = "out",
                                         .resume_from_checkpoint = "true",
                                         .save_steps = 5,
                                         .save_minutes = 6,
                                         .save_total_limit = 7,
                                         .async_save = true,
                                         .eval_steps = 9,
                                         .early_stopping_patience = 10,
                                         .early_stopping_threshold = 0.5,
                                         .metric_for_best_model = "f1",
                                         .greater_is_better = false,
                                         .load_best_model_at_end = true});
  EXPECT_EQ(c, (CheckpointConfig{.output_dir = "out",
                                 .save_steps = 5,
                                 .save_minutes = 6,
                                 .save_total_limit = 7,
                                 .async_save = true,
                                 .resume_from_checkpoint = "out",
                                 .eval_steps = 9,
                                 .metric_for_best_model = "eval_f1",
                                 .load_best_model_at_end = true,
                                 .early_stopping_patience = 10,
                                 .early_stopping_threshold = 0.5}));
  EXPECT_EQ(parsed("", {.resume_from_checkpoint = "a/best"}).output_dir, "a");
  EXPECT_EQ(parsed("", {.output_dir = "b", .resume_from_checkpoint = "a"}).output_dir, "b");
}

TEST(CheckpointKeys, WrongOnesAreNamed) {
  const auto refused = [](const std::string& keys) {
    const Error e = error_of([&] { parsed(keys); });
    EXPECT_EQ(e.code(), Errc::config) << e.what();
    return std::string(e.what());
  };
  const std::string at = "ds.json: ringzero.checkpoint.",
                    folder = ": needs a folder; set ringzero.checkpoint.output_dir";
  EXPECT_EQ(refused(R"("save_steps": 1)"), at + "save_steps" + folder);
  EXPECT_EQ(refused(R"("save_minutes": 1)"), at + "save_minutes" + folder);
  EXPECT_EQ(refused(R"("save_total_limit": 1)"), at + "save_total_limit" + folder);
  EXPECT_EQ(refused(R"("async_save": true)"), at + "async_save" + folder);
  EXPECT_EQ(refused(R"("load_best_model_at_end": true)"), at + "load_best_model_at_end" + folder);
  EXPECT_EQ(refused(R"("resume_from_checkpoint": true)"), at + "resume_from_checkpoint" + folder);
  EXPECT_EQ(refused(R"("resume_from_checkpoint": 3)"),
            at + "resume_from_checkpoint: expected true, false or a folder, found 3");
  EXPECT_EQ(refused(R"("metric_for_best_model": "")"),
            at + "metric_for_best_model: is empty; name a metric, e.g. eval_loss");
  EXPECT_EQ(refused(R"("save_step": 1)"), at + "save_step: unknown key; did you mean 'save_steps'?");
  for (const char* key : {"save_steps", "save_minutes", "save_total_limit", "allocation_margin", "eval_steps",
                          "early_stopping_patience", "early_stopping_threshold"})
    EXPECT_EQ(refused(concat('"', key, R"(": -1)")).rfind(at + key + ": ", 0), 0u) << key;
  EXPECT_EQ(refused(R"("early_stopping_patience": 0)").rfind(at + "early_stopping_patience: ", 0), 0u);
}

TEST(CheckpointKeys, TheResolvedOnesReadBack) {
  for (const char* keys : {R"("output_dir": "out", "resume_from_checkpoint": true, "save_steps": 3)",
                           R"("resume_from_checkpoint": "out/best", "greater_is_better": true)",
                           R"("early_stopping_patience": 3, "eval_steps": 4)"}) {
    const DsConfig c = parse_ds_config(concat(R"({"ringzero": {"checkpoint": {)", keys, "}}}"), "ds.json");
    EXPECT_EQ(parse_ds_config(resolved_json(c), "again.json").checkpoint, c.checkpoint) << resolved_json(c);
  }
  EXPECT_EQ(resolved_table(parse_ds_config("{}", "ds.json")).find("ringzero.checkpoint"), std::string::npos);
}

}  // namespace
}  // namespace rz
