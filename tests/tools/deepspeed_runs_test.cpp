// What DeepSpeed 0.19 did with gpt2_tiny, done again: tests/data/deepspeed, and ../shared/fixtures/deepspeed
// if it lies beside the sources.

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/lab/training.h"
#include "tests/support/folder.h"
#include "tests/support/reference_deepspeed.h"
#include "tests/support/rounding_bound.h"
#include "tests/support/shared_fixture.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

struct Placement {
  StrategyKind kind;
  int ranks;
};

using Updates = std::vector<UpdateReport>;

/// As train_lm does with this configuration, but with weight decay of all parameters as DeepSpeed has it.
/// DeepSpeed rounds a model to 16 bits before it makes the masters, so the start of a case is rounded.
Updates train(const DeepSpeedRun& run, Placement at,
              const lab::LanguageData& data = {shared_fixture::sequence_length}) {
  const Gpt2Config gpt2 = tiny_case("tiny").config;
  const auto options = [&](EngineOptions& o) {
    o.decay = Decay::all;
    if (!data.weights.empty()) return;
    const DType precision = o.ds_config->strategy.precision.parameters;
    o.initial_values = [&gpt2, precision](const Parameter& p, Range r, float* out) {
      gpt2_tiny_weights(p, gpt2.n_layer, r, out);
      round_to(precision, {out, r.count()});
    };
  };
  return lab::train({.model = lab::language(
                         data, [&] { return std::make_unique<Gpt2>(gpt2); }, run.config),
                     .strategy = at.kind,
                     .ranks = at.ranks,
                     .updates = std::ssize(run.lr),
                     .options = options})
      .updates;
}

/// Rates (except for torch's own annealing, a unit in the last place), skipped updates and loss scales agree
/// exactly.
void expect_same_course(const Updates& updates, const DeepSpeedRun& run) {
  ASSERT_EQ(updates.size(), run.lr.size());
  for (const UpdateReport& r : updates) {
    SCOPED_TRACE(concat("update ", r.step));
    if (run.config.find("CosineAnnealingLR") == std::string::npos)
      EXPECT_EQ(r.lr, run.lr[r.step]);
    else
      EXPECT_DOUBLE_EQ(r.lr, run.lr[r.step]);
    EXPECT_EQ(r.skipped, run.skipped[r.step] != 0);
    if (r.loss_scale != 0) {
      EXPECT_EQ(r.loss_scale, run.scale[r.step]);
    }
  }
}

void expect_same_values(const Updates& updates, const DeepSpeedRun& run, double loss, double norm) {
  for (const UpdateReport& r : updates) {
    SCOPED_TRACE(concat("update ", r.step));
    EXPECT_NEAR(r.loss, run.loss[r.step], loss);
    const double expected = run.grad_norm[r.step].value_or(0);  // DeepSpeed computes none without clipping
    if (expected > 0) {
      EXPECT_NEAR(r.grad_norm, expected, norm * expected);
    }
  }
}

int beyond_rounding(const Updates& updates, const DeepSpeedRun& run) {
  std::vector<double> loss, norm;
  for (const UpdateReport& r : updates) loss.push_back(r.loss), norm.push_back(r.grad_norm);
  return test::beyond_rounding(run, loss, norm);
}

constexpr int placement_ranks[] = {1, 2, 4};
bool every_placement() { return std::getenv("RZ_EVERY_PLACEMENT") != nullptr; }

std::size_t index_of(const std::string& name) {
  const auto names = own_deepspeed_runs();
  return static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
}

/// One of the twelve placements for each run, in turn, so that all have their turn; or all of them. Whether
/// f16 overflows depends on the ranks: a rank's loss is the mean over its own samples, so each sample weighs
/// more where there are fewer. Runs with overflows are therefore done again on as many ranks, by two
/// strategies each.
std::vector<Placement> placements(const std::string& name, const DeepSpeedRun& run) {
  const std::size_t index = index_of(name);
  const bool overflows = name.find("overflow") != name.npos;
  std::vector<Placement> all;
  for (const StrategyKind kind : lab::strategies)
    for (const int ranks : placement_ranks)
      if (!overflows || ranks == run.ranks) all.push_back({kind, ranks});
  if (every_placement()) return all;
  if (overflows) return {all[index % 4], all[(index + 2) % 4]};
  return {all[index * 5 % 12]};
}

class OwnDeepSpeedRuns : public testing::TestWithParam<std::string> {};

TEST_P(OwnDeepSpeedRuns, AreFollowed) {
  const DeepSpeedRun run = own_deepspeed_run(GetParam());
  for (const Placement at : placements(GetParam(), run)) {
    SCOPED_TRACE(concat(name(at.kind), " on ", at.ranks, " ranks"));
    const Updates updates = train(run, at);
    expect_same_course(updates, run);
    if (run.loss_mean.empty()) {
      expect_same_values(updates, run, 2e-4, 1e-3);
    } else {
      EXPECT_EQ(beyond_rounding(updates, run), 0);
    }
  }
}

std::vector<std::string> followed_runs() {
  std::vector<std::string> names = own_deepspeed_runs();
  // See tests/tools/deepspeed_16bit_test.cpp.
  std::erase_if(names, [](const std::string& n) { return n.find("_stage0") != n.npos; });
  return names;
}
INSTANTIATE_TEST_SUITE_P(Runs, OwnDeepSpeedRuns, testing::ValuesIn(followed_runs()),
                         [](const auto& info) { return info.param; });

// ---- the shared fixture

class SharedDeepSpeedRuns : public testing::TestWithParam<std::tuple<const char*, Placement>> {};

TEST_P(SharedDeepSpeedRuns, HaveTheSameRatesAndLosses) {
  if (shared_deepspeed_folder().empty()) GTEST_SKIP() << "no ../shared/fixtures/deepspeed beside the sources";
  const auto& [name, at] = GetParam();
  const DeepSpeedRun run = shared_deepspeed_run(name);
  const Folder folder;
  const std::string start = folder / "start.safetensors";
  shared_fixture::write_start(start);
  const Updates updates =
      train(run, at, {shared_fixture::sequence_length, start, shared_fixture::folder() + "/tokens.bin"});
  expect_same_course(updates, run);
  for (const UpdateReport& r : updates) {
    const double bound = test::rounding_bound(run.loss_deviation.at(r.step), 2e-4);
    EXPECT_NEAR(r.loss, run.loss[r.step], bound) << "update " << r.step;
  }
}

std::string setting_name(const testing::TestParamInfo<std::tuple<const char*, Placement>>& info) {
  const auto& [run, at] = info.param;
  return concat(run, "_", name(at.kind), "_ranks", at.ranks);
}

constexpr const char* f32_runs[] = {"accumulate_clip", "adam_l2", "adamw_decay_all", "one_cycle",
                                    "range_test",      "sgd",     "warmup_cosine",   "warmup_decay_linear",
                                    "warmup_log"};
constexpr Placement shared_placements[] = {
    {StrategyKind::ddp, 1}, {StrategyKind::zero2, 2}, {StrategyKind::zero3, 4}};
INSTANTIATE_TEST_SUITE_P(F32, SharedDeepSpeedRuns,
                         testing::Combine(testing::ValuesIn(f32_runs), testing::ValuesIn(shared_placements)),
                         setting_name);

}  // namespace
}  // namespace rz::lm
