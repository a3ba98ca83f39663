// What DeepSpeed 0.19 did with gpt2_tiny, done again: tests/data/deepspeed, and ../shared/fixtures/deepspeed
// if it lies beside the sources.

#include <gtest/gtest.h>

#include <cstdlib>

#include "sharding/io/json.h"
#include "tests/support/reference_deepspeed.h"
#include "tests/support/rounding_bound.h"
#include "tests/support/shared_fixture.h"
#include "tests/support/train_tiny.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

struct Placement {
  StrategyKind kind;
  int ranks;
};

/// Options of a run of train_lm with this configuration, and with weight decay of all parameters as
/// DeepSpeed has it.
TinyOptions options_of(const std::string& config, Placement at) {
  TinyOptions o;
  o.ds = parse_ds_config(config, "ds.json", {}, {.ranks = at.ranks});
  o.strategy = at.kind;
  o.strategy_options = strategy_options(o.ds, at.kind);
  o.decay = Decay::all;
  o.seq_len = shared_fixture::sequence_length;
  return o;
}

/// DeepSpeed rounds a model to 16 bits before it makes the masters, so the start is rounded.
Reports train_own(const DeepSpeedRun& run, Placement at,
                  const std::function<void(TinyOptions&)>& change = {}) {
  const Folder folder;
  const TinyCase c = tiny_case("tiny");
  TinyRun tiny{c, at.ranks, options_of(run.config, at), folder / "start.safetensors"};
  write_tiny_start(c.config, tiny.checkpoint, tiny.options.strategy_options.precision.parameters);
  if (change) change(tiny.options);
  return train(tiny, static_cast<std::int64_t>(run.lr.size()));
}

Reports train_shared(const DeepSpeedRun& run, Placement at) {
  const Folder folder;
  TinyRun tiny{tiny_case("tiny"), at.ranks, options_of(run.config, at), folder / "start.safetensors"};
  tiny.tokens = shared_fixture::folder() + "/tokens.bin";
  shared_fixture::write_start(tiny.checkpoint);
  return train(tiny, static_cast<std::int64_t>(run.lr.size()));
}

/// Rates (except for torch's own annealing, a unit in the last place), skipped updates and loss scales agree
/// exactly.
void expect_same_course(const Reports& reports, const DeepSpeedRun& run) {
  ASSERT_EQ(reports.size(), run.lr.size());
  for (const UpdateReport& r : reports) {
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

void expect_same_values(const Reports& reports, const DeepSpeedRun& run, double loss, double norm) {
  for (const UpdateReport& r : reports) {
    SCOPED_TRACE(concat("update ", r.step));
    EXPECT_NEAR(r.loss, run.loss[r.step], loss);
    const double expected = run.grad_norm[r.step].value_or(0);  // DeepSpeed computes none without clipping
    if (expected > 0) {
      EXPECT_NEAR(r.grad_norm, expected, norm * expected);
    }
  }
}

int beyond_rounding(const Reports& reports, const DeepSpeedRun& run) {
  std::vector<double> loss, norm;
  for (const UpdateReport& r : reports) loss.push_back(r.loss), norm.push_back(r.grad_norm);
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
  for (const StrategyKind kind : strategies)
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
    const Reports reports = train_own(run, at);
    expect_same_course(reports, run);
    if (run.loss_mean.empty()) {
      expect_same_values(reports, run, 2e-4, 1e-3);
    } else {
      EXPECT_EQ(beyond_rounding(reports, run), 0);
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
  const Reports reports = train_shared(run, at);
  expect_same_course(reports, run);
  for (const UpdateReport& r : reports) {
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
