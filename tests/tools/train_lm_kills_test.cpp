// Runs: serial
// Needs: rzrun_lib rzrun train_lm checkpoint

// train_lm under rzrun --max-restarts: ranks that are killed at any instant change no bit.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "tests/support/small_gpt.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test::Program;
using test::ranks_of;
using test::SmallGpt;
using test::trained_gpt;
using test::TrainedGpt;

constexpr int steps = 60, kills_of_a_run = 3;

struct Case {
  const char* strategy;
  int ranks;
  bool async;
};
constexpr Case cases[] = {{"ddp", 2, false},  {"zero3", 3, true}, {"ddp", 3, true}, {"zero3", 2, false},
                          {"zero3", 2, true}, {"ddp", 3, false},  {"ddp", 2, true}, {"zero3", 3, false}};

class TrainLmKills : public testing::Test {
 protected:
  void SetUp() override { gpt_.put_config("ds.json", "", 12); }

  struct Uninterrupted {
    TrainedGpt result;
    std::chrono::microseconds time{0};
  };
  const Uninterrupted& uninterrupted(const Case& c) {
    auto& found = uninterrupted_[{c.strategy, c.ranks}];
    if (found.time > 0us) return found;
    const auto start = std::chrono::steady_clock::now();
    Program p(gpt_.on_ranks(c.ranks, flags(c, "whole")));
    EXPECT_EQ(p.wait(), 0) << p.err();
    found.time =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
    found.result = trained_gpt(gpt_ / "whole", gpt_ / "whole.jsonl");
    return found;
  }
  std::vector<std::string> flags(const Case& c, const std::string& name) const {
    return {"--strategy", c.strategy, "--steps", concat(steps), "--metrics", gpt_ / (name + ".jsonl"),
            "--save",     gpt_ / name};
  }

  /// Kills a random rank at a random instant within that time of the group's start; false if the run has
  /// ended before.
  bool kill_one(const Program& p, int restarts, std::chrono::microseconds within) {
    const auto start = std::chrono::steady_clock::now();
    while (ranks_of(p).empty()) {
      if (std::chrono::steady_clock::now() - start > 60s) return false;
      std::this_thread::sleep_for(1ms);
    }
    std::this_thread::sleep_for(within * (random_() % 1000) / 1000);
    const auto ranks = ranks_of(p);
    if (ranks.empty() || ::kill(ranks[random_() % ranks.size()], SIGKILL) != 0) return false;
    const std::string restart = concat("; restart ", restarts, " of ");
    for (const auto end = std::chrono::steady_clock::now() + 60s; std::chrono::steady_clock::now() < end;
         std::this_thread::sleep_for(1ms)) {
      if (p.err().find(restart) != std::string::npos) return true;
      if (ranks_of(p).empty() && p.out().find("saved: ") != std::string::npos) return false;  // it had ended
    }
    ADD_FAILURE() << "no restart: " << p.out() << p.err();
    return false;
  }

  /// Returns the number of kills.
  int killed_run(const Case& c, int kills) {
    fs::remove_all(gpt_ / "checkpoints");
    fs::remove_all(gpt_ / "killed");
    auto all = flags(c, "killed");
    for (const char* flag :
         {"--save-steps", "2", "--save-total-limit", "2", "--resume", "true", "--checkpoint-dir"})
      all.push_back(flag);
    all.push_back(gpt_ / "checkpoints");
    if (c.async) all.push_back("--save-async");
    const Uninterrupted& whole = uninterrupted(c);  // without saves, so a little shorter
    Program p(gpt_.on_ranks(c.ranks, all, {"--max-restarts", concat(kills)}));
    int killed = 0;
    while (killed < kills && kill_one(p, killed + 1, whole.time)) ++killed;
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(trained_gpt(gpt_ / "killed", gpt_ / "killed.jsonl"), whole.result) << p.out() << p.err();
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(gpt_ / "checkpoints"))
      names.insert(entry.path().filename());
    const std::string out = p.out();
    for (std::size_t at = 0; (at = out.find("\nresumed: ", at)) != std::string::npos; ++at) ++resumed_;
    EXPECT_EQ(names, (std::set<std::string>{step_tag(steps - 2), step_tag(steps), latest_file}));
    return killed;
  }

  SmallGpt gpt_;
  int resumed_ = 0;  // groups that went on from a checkpoint
  std::mt19937 random_{17};
  std::map<std::pair<std::string, int>, Uninterrupted> uninterrupted_;
};

TEST_F(TrainLmKills, RunsUnderRzrunEndWithTheBitsOfUninterruptedOnes) {
  const char* const more = std::getenv("RZ_KILLS");
  const int wanted = more ? std::atoi(more) : 4;
  int kills = 0, runs = 0;
  std::map<std::string, int> kills_of;
  for (; kills < wanted && runs < 3 * wanted && !HasFailure(); ++runs) {
    const Case& c = cases[static_cast<std::size_t>(runs) % std::size(cases)];
    const std::string what = concat(c.strategy, " on ", c.ranks, " ranks, ", c.async ? "async" : "sync");
    SCOPED_TRACE(concat(what, ", run ", runs));
    const int killed = killed_run(c, std::min(kills_of_a_run, wanted - kills));
    kills_of[what] += killed;
    kills += killed;
  }
  EXPECT_EQ(kills, wanted);
  for (const auto& [what, number] : kills_of) std::cout << what << ": " << number << " kills\n";
  std::cout << kills << " kills in " << runs << " runs; " << resumed_
            << " groups went on from a checkpoint\n";
}

}  // namespace
}  // namespace rz
