// Needs: rzrun_lib rzrun train_lm checkpoint

// train_lm that is stopped and resumed: the bits of a run that was never interrupted.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <regex>
#include <thread>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "tests/support/small_gpt.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test::lines;
using test::Program;
using test::ranks_of;
using test::SmallGpt;
using test::trained_gpt;
using test::TrainedGpt;
using Flags = std::vector<std::string>;

Flags operator+(Flags a, const Flags& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Without the end of the run: it ends by a signal.
const Flags endless{"--steps", "1000000"};

class TrainLmResume : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return gpt_ / name; }
  std::string checkpoints() const { return path("checkpoints"); }

  /// A run of its own, from the start or from a checkpoint, to the end.
  TrainedGpt trained(int ranks, const Flags& flags) {
    const std::string out = path(concat("out", runs_++));
    Program p(gpt_.on_ranks(ranks, flags + Flags{"--metrics", out + ".jsonl", "--save", out}));
    EXPECT_EQ(p.wait(), 0) << p.err();
    return trained_gpt(out, out + ".jsonl");
  }
  /// Stops after `stop` updates by itself, and is resumed; the metrics are those of both parts.
  TrainedGpt stopped_and_resumed(int ranks, const Flags& flags, int stop, int steps) {
    const std::string metrics = path("parts.jsonl");
    fs::remove_all(checkpoints());
    const Flags both = flags + Flags{"--metrics", metrics};
    Program first(
        gpt_.on_ranks(ranks, both + Flags{"--steps", concat(stop), "--checkpoint-dir", checkpoints()}));
    EXPECT_EQ(first.wait(), 0) << first.err();
    Program second(gpt_.on_ranks(
        ranks, both + Flags{"--steps", concat(steps), "--resume", checkpoints(), "--save", path("resumed")}));
    EXPECT_EQ(second.wait(), 0) << second.err();
    EXPECT_NE(second.out().find(
                  concat("resumed: ", checkpoints(), "/", step_tag(stop), ", after ", stop, " updates")),
              std::string::npos)
        << second.out();
    return trained_gpt(path("resumed"), metrics);
  }

  /// The tags in the folder; each checkpoint is complete, every byte is as written, and nothing else is
  /// there.
  std::vector<std::string> complete_checkpoints() const {
    const auto tags = checkpoint_tags(checkpoints());
    for (const std::string& tag : tags) {
      auto reader = CheckpointReader::open(checkpoints() + "/" + tag);
      for (std::size_t f = 0; f < reader.index().files.size(); ++f) reader.verify(f);
    }
    std::size_t names = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(checkpoints())) ++names;
    EXPECT_EQ(names, tags.size() + 1) << "checkpoints and the file latest";
    return tags;
  }

  SmallGpt gpt_;
  int runs_ = 0;
};

TEST_F(TrainLmResume, EveryStrategyGoesOnWithTheSameBits) {
  for (const int ranks : {1, 2}) {
    const TrainedGpt whole = trained(ranks, {"--strategy", "ddp", "--steps", "11"});
    ASSERT_EQ(whole.metrics.size(), 11u);
    for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
      EXPECT_EQ(stopped_and_resumed(ranks, {"--strategy", strategy}, 5, 11), whole)
          << strategy << ", ranks " << ranks;
  }
}

TEST_F(TrainLmResume, SixteenBitsGoOnWithTheSameBits) {
  gpt_.put_config("bf16.json", R"(, "bf16": {"enabled": true})");
  // The scale grows every second update, until gradients overflow.
  gpt_.put_config("fp16.json",
                  R"(, "fp16": {"enabled": true, "initial_scale_power": 22, "loss_scale_window": 2})");
  for (const char* config : {"bf16.json", "fp16.json"}) {
    const Flags flags{"--config", path(config), "--strategy", "zero3"};
    const TrainedGpt whole = trained(2, flags + Flags{"--steps", "11"});
    EXPECT_EQ(stopped_and_resumed(2, flags, 5, 11), whole) << config;
    if (std::string(config) != "fp16.json") continue;
    ASSERT_EQ(whole.metrics.size(), 11u);
    EXPECT_TRUE(std::ranges::any_of(whole.metrics, [](const auto& m) { return m.contains("skipped"); }));
    EXPECT_NE(whole.metrics[5].at("loss_scale"), whole.metrics[0].at("loss_scale"));
  }
}

TEST_F(TrainLmResume, InitStartsFromTheWeightsOfACheckpoint) {
  for (const char* saved_by : {"ddp", "zero3"}) {
    fs::remove_all(checkpoints());
    const TrainedGpt saved =
        trained(2, {"--strategy", saved_by, "--steps", "4", "--checkpoint-dir", checkpoints()});
    for (const int ranks : {1, 2})
      for (const char* strategy : {"ddp", "zero2", "zero3"})
        for (const std::string& from : {checkpoints(), checkpoints() + "/global_step4"})
          EXPECT_EQ(trained(ranks, {"--strategy", strategy, "--steps", "0", "--init", from}).weights,
                    saved.weights)
              << saved_by << ", then " << strategy << " on " << ranks << " from " << from;
  }
}

TEST_F(TrainLmResume, InitNamesWhichOfSeveralSourcesItReads) {
  trained(1, {"--steps", "4", "--checkpoint-dir", checkpoints(), "--save-steps", "2"});
  const auto line_of = [&](int ranks) {
    Program p(gpt_.on_ranks(ranks, {"--steps", "0", "--init", checkpoints()}));
    EXPECT_EQ(p.wait(), 0) << p.err();
    return p.err();
  };
  const std::string read = "--init: read: the f32 values of " + checkpoints() + "/global_step4; not read: ";
  const std::string one = line_of(2);
  EXPECT_NE(one.find(read + "the checkpoint global_step2"), std::string::npos) << one;
  EXPECT_EQ(one.find(read), one.rfind(read)) << "on rank 0 only";
  fs::copy(path("out0/model.safetensors"), checkpoints() + "/model.safetensors");
  const std::string newer = line_of(1);
  EXPECT_NE(newer.find("--init: read: " + checkpoints() +
                       "/model.safetensors; not read: the checkpoint global_step4 (older)"),
            std::string::npos)
      << newer;
}

TEST_F(TrainLmResume, ARunThatIsFinishedIsLeftAsItIs) {
  const TrainedGpt whole = trained(2, {"--steps", "4"});
  EXPECT_EQ(stopped_and_resumed(2, {}, 4, 4), whole);
  EXPECT_EQ(complete_checkpoints(), std::vector<std::string>{"global_step4"});
}

TEST_F(TrainLmResume, AnEmptyFolderBeginsARun) {
  const TrainedGpt whole = trained(1, {"--steps", "3"});
  Program p(gpt_.program(
      {"--steps", "3", "--checkpoint-dir", checkpoints(), "--resume", "true", "--save", path("out")}));
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_NE(p.out().find("resume: " + checkpoints() + " has no checkpoint; the run starts afresh"),
            std::string::npos);
  EXPECT_EQ(read_text_file(path("out/model.safetensors")), whole.weights);
  EXPECT_EQ(complete_checkpoints(), std::vector<std::string>{"global_step3"});
}

TEST_F(TrainLmResume, CheckpointsBelowTheDataAreNoData) {
  fs::create_directory(path("text"));
  gpt_.put("text/a.txt", read_text_file(RZ_SOURCE_DIR "/tests/data/gpt2_tiny/README.md").substr(0, 450));
  Flags flags{"--data", path("text"), "--strategy", "zero1"};
  const TrainedGpt whole = trained(1, flags + Flags{"--steps", "6"});
  const Flags into{"--checkpoint-dir", path("text/checkpoints")};
  for (const Flags& both : {into, Flags{}}) {
    fs::remove_all(path("text/checkpoints"));
    const Flags all = flags + Flags{"--metrics", path("m.jsonl")};
    Program first(gpt_.on_ranks(1, all + into + Flags{"--steps", "4"}));
    EXPECT_EQ(first.wait(), 0) << first.err();
    Program second(gpt_.on_ranks(
        1,
        all + both + Flags{"--steps", "6", "--resume", path("text/checkpoints"), "--save", path("resumed")}));
    EXPECT_EQ(second.wait(), 0) << second.err();
    EXPECT_EQ(trained_gpt(path("resumed"), path("m.jsonl")), whole) << both.size();
  }
}

// ---- limits

TEST_F(TrainLmResume, TheLastCheckpointsAreKept) {
  for (const bool async : {false, true}) {
    fs::remove_all(checkpoints());
    Program p(gpt_.on_ranks(2, Flags{"--steps", "11", "--save-steps", "2", "--checkpoint-dir", checkpoints(),
                                     "--save-total-limit", "3"} +
                                   (async ? Flags{"--save-async"} : Flags{})));
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(complete_checkpoints(),
              (std::vector<std::string>{"global_step8", "global_step10", "global_step11"}));
    EXPECT_EQ(read_tag_file(checkpoints(), latest_file), "global_step11");
  }
}

// ---- signals

/// The process that is this rank of rzrun.
pid_t process_of(const Program& rzrun, int rank) {
  for (const pid_t pid : ranks_of(rzrun)) {
    const std::string environment = test::content(concat("/proc/", pid, "/environ"));
    if ((std::string(1, '\0') + environment).find(std::string(1, '\0') + concat("RANK=", rank) + '\0') !=
        std::string::npos)
      return pid;
  }
  ADD_FAILURE() << "there is no rank " << rank;
  return 0;
}

/// "stopped by SIGTERM on rank R after N updates": R and N.
std::pair<int, int> stopped(const Program& p) {
  const std::string out = p.out();
  std::smatch found;
  if (std::regex_search(out, found,
                        std::regex("stopped by SIGTERM on rank (\\d) after (\\d+) updates; saved to ")))
    return {std::stoi(found[1]), std::stoi(found[2])};
  ADD_FAILURE() << out << p.err();
  return {-1, 0};
}

struct Termination {
  int ranks;
  const char* strategy;
  int signalled;  ///< rank; -1: rzrun
  bool async;
};

TEST_F(TrainLmResume, SigtermSavesAndStopsAndTheRunGoesOn) {
  for (const auto& [ranks, strategy, signalled, async] : {Termination{2, "zero3", 1, true},
                                                          {2, "ddp", 0, false},
                                                          {2, "zero1", -1, true},
                                                          {1, "zero2", -1, false}}) {
    SCOPED_TRACE(concat(strategy, " on ", ranks, ", signal to ", signalled));
    fs::remove_all(checkpoints());
    const Flags flags{"--strategy", strategy};
    Program p(gpt_.on_ranks(
        ranks,
        flags + endless + Flags{"--checkpoint-dir", checkpoints(), "--metrics", path("m.jsonl")} +
            (async ? Flags{"--save-async", "--save-steps", "1", "--save-total-limit", "2"} : Flags{})));
    p.wait_for("step 1/");
    if (signalled < 0) {
      p.signal(SIGTERM);
    } else {
      ::kill(process_of(p, signalled), SIGTERM);
    }
    EXPECT_EQ(p.wait(), stopped_exit_status);
    const auto [rank, updates] = stopped(p);
    EXPECT_TRUE(signalled < 0 || rank == signalled) << rank;
    EXPECT_EQ(complete_checkpoints().back(), step_tag(updates));
    const Flags longer = flags + Flags{"--steps", concat(updates + 3)};
    Program second(gpt_.on_ranks(ranks, longer + Flags{"--resume", checkpoints(), "--metrics",
                                                       path("m.jsonl"), "--save", path("resumed")}));
    EXPECT_EQ(second.wait(), 0) << second.err();
    EXPECT_EQ(trained_gpt(path("resumed"), path("m.jsonl")), trained(ranks, longer));
  }
}

TEST_F(TrainLmResume, Sigusr1SavesAndTheRunGoesOn) {
  Program p(gpt_.on_ranks(2, endless + Flags{"--checkpoint-dir", checkpoints(), "--strategy", "zero2"}));
  p.wait_for("step 1/");
  p.signal(SIGUSR1);
  while (!read_tag_file(checkpoints(), latest_file)) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(50ms);
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(), stopped_exit_status) << p.err();
  const auto tags = complete_checkpoints();
  ASSERT_EQ(tags.size(), 2u) << "one for each signal, though all ranks got both";
  // The first one, resumed to where the second was saved.
  write_tag_file(checkpoints(), latest_file, tags[0]);
  const Flags until{"--strategy", "zero2",      "--steps", concat(*steps_of_tag(tags[1])),
                    "--resume",   checkpoints()};
  const std::string weights = trained(2, until).weights;
  EXPECT_EQ(read_tag_file(checkpoints(), latest_file), tags[1]);
  EXPECT_EQ(weights, trained(2, {"--strategy", "zero2", "--steps", concat(*steps_of_tag(tags[1]))}).weights);
}

// ---- wrong input

class TrainLmBadResume : public TrainLmResume {
 protected:
  void SetUp() override {
    Program p(gpt_.on_ranks(2, {"--steps", "2", "--checkpoint-dir", checkpoints()}));
    ASSERT_EQ(p.wait(), 0) << p.err();
  }
  /// On one rank and on two: status 2, one line that has the parts, and nothing written.
  void expect_refused(const Flags& flags, std::initializer_list<std::string> parts) {
    const Flags all = Flags{"--steps", "4", "--metrics", path("m.jsonl"), "--save", path("out")} + flags;
    for (const int ranks : {1, 2}) {
      Program p(ranks == 1 ? gpt_.program(all) : gpt_.on_ranks(ranks, all));
      EXPECT_EQ(p.wait(), 2) << p.out();
      EXPECT_EQ(p.out(), "");
      auto errors = lines(p.err());
      std::erase_if(errors, [](const std::string& line) { return line.starts_with("rzrun: "); });
      ASSERT_EQ(errors.size(), 1u) << p.err();
      EXPECT_TRUE(errors[0].starts_with("train_lm: ")) << errors[0];
      for (const std::string& part : parts) EXPECT_NE(errors[0].find(part), std::string::npos) << errors[0];
      EXPECT_FALSE(fs::exists(path("m.jsonl")) || fs::exists(path("out"))) << "something was written";
    }
  }
  std::string file_of_rank(int rank) const { return checkpoints() + "/global_step2/" + rank_file(rank, 2); }
};

TEST_F(TrainLmBadResume, FoldersThatAreNone) {
  gpt_.put("file", "");
  expect_refused({"--resume", path("file")}, {"--resume: ", path("file"), "is not a folder"});
  expect_refused({"--resume", path("none")}, {"--resume: ", path("none: does not exist")});
  expect_refused({"--resume", checkpoints() + "/global_step3"},
                 {checkpoints() + "/global_step3: does not exist; " + checkpoints() +
                  " has 1 checkpoint: global_step2"});
  EXPECT_FALSE(fs::exists(path("none")) || fs::exists(checkpoints() + "/global_step3"));
  fs::create_directory(path("trainer"));
  for (const char* file : {"trainer_state.json", "model.safetensors"})
    gpt_.put(concat("trainer/", file), "{}");
  expect_refused({"--resume", path("trainer")}, {path("trainer: is a checkpoint of Hugging Face"), "--init"});
  expect_refused({"--checkpoint-dir", path("file/x")},
                 {"--checkpoint-dir: ", path("file"), "is not a folder"});
}

TEST_F(TrainLmBadResume, CheckpointsThatAreDamaged) {
  const std::string good = read_text_file(file_of_rank(1));
  std::string bad = good;
  bad.back() ^= 1;
  const auto put = [&](const std::string& text) { std::ofstream(file_of_rank(1), std::ios::binary) << text; };
  put(bad);
  expect_refused({"--resume", checkpoints()}, {file_of_rank(1), "the file is damaged"});
  put(good.substr(0, good.size() - 1));
  expect_refused({"--resume", checkpoints()}, {file_of_rank(1), "bytes"});
  fs::remove(file_of_rank(1));
  expect_refused({"--resume", checkpoints()}, {file_of_rank(1), "No such file"});
}

TEST_F(TrainLmBadResume, CheckpointsThatAreNotNamed) {
  write_tag_file(checkpoints(), latest_file, "global_step7");
  expect_refused({"--resume", checkpoints()}, {"global_step7", "checkpoint.json"});
  fs::remove(checkpoints() + "/latest");
  expect_refused({"--resume", checkpoints()}, {checkpoints(), "latest", "global_step2"});
}

TEST_F(TrainLmBadResume, CheckpointsOfAnotherRun) {
  expect_refused({"--resume", checkpoints(), "--seed", "4"}, {"seed 3", "4"});
  gpt_.put("other.json", R"({"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 256, )"
                         R"("embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
  expect_refused({"--resume", checkpoints(), "--model", path("other.json")},
                 {"does not fit the model", "where the model has"});
}

TEST_F(TrainLmBadResume, SavingWithoutAFolder) {
  for (const Flags& flags :
       {Flags{"--save-steps", "2"}, {"--save-minutes", "1"}, {"--save-total-limit", "1"}, {"--save-async"}})
    expect_refused(flags, {flags[0], "--output-dir DIR"});
}

}  // namespace
}  // namespace rz
