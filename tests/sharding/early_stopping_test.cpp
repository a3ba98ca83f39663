/// The best value of a metric, and the end of a training that does not improve it.
#include "sharding/engine/checkpoints/early_stopping.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sharding/engine/checkpoints/engine_state.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using test::error_of;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();

/// After how many evaluations the training stops; 0: not at all.
std::size_t evaluations(const EarlyStopping::Options& options, const std::vector<double>& metrics) {
  EarlyStopping stopping(options);
  for (std::size_t i = 0; i < metrics.size(); ++i)
    if (stopping.update(metrics[i])) return i + 1;
  return 0;
}

/// Parsed back from its text, as a checkpoint does it.
struct Document {
  explicit Document(const nlohmann::json& j)
      : node(parse_json(j.dump(), "state.json", JsonDialect::strict)) {}
  JsonObject object() const { return JsonObject(node, "state.json"); }
  nlohmann::json node;
};

TEST(EarlyStopping, StopsAfterThatManyEvaluationsWithoutImprovement) {
  EXPECT_EQ(evaluations({.early_stopping_patience = 2}, {5, 4, 4, 4.5, 3}), 4u);
  EXPECT_EQ(evaluations({.early_stopping_patience = 3}, {5, 4, 4, 4.5, 3, 4, 4, 4}), 8u);
  EXPECT_EQ(evaluations({.early_stopping_patience = 1}, {5, 4, 3, 2, 1}), 0u);
  EXPECT_EQ(evaluations({.early_stopping_patience = 2, .greater_is_better = true}, {1, 2, 2, 1, 3}), 4u);
}

TEST(EarlyStopping, AnImprovementUpToTheThresholdIsNone) {
  const EarlyStopping::Options options{.early_stopping_patience = 2, .early_stopping_threshold = 0.5};
  EXPECT_EQ(evaluations(options, {4, 3.5, 3.0}), 3u)
      << "each is compared with the best before, as Hugging Face does";
  EXPECT_EQ(evaluations(options, {4, 3.25, 2.5, 1.75}), 0u);
}

TEST(EarlyStopping, ValuesThatAreNotFiniteAreNoImprovement) {
  EXPECT_EQ(evaluations({.early_stopping_patience = 2}, {nan, nan, 1}), 2u);
  EXPECT_EQ(evaluations({.early_stopping_patience = 2}, {5, nan, 4, -inf, inf, 3}), 5u);
  EXPECT_EQ(
      evaluations({.early_stopping_patience = 2, .greater_is_better = true}, {nan, 1, inf, 2, nan, nan}), 6u);
}

TEST(EarlyStopping, OptionsAreChecked) {
  for (const EarlyStopping::Options& o : {EarlyStopping::Options{.early_stopping_patience = 0},
                                          EarlyStopping::Options{.early_stopping_threshold = -1},
                                          EarlyStopping::Options{.early_stopping_threshold = nan}})
    EXPECT_EQ(error_of([&] { EarlyStopping stopping(o); }).code(), Errc::config);
}

TEST(EarlyStopping, ARunThatResumesStopsAtTheSameEvaluation) {
  const std::vector<double> metrics{5, 4.125, 4.2, 0.1 + 4.05, 4.125, 3};
  const EarlyStopping::Options options{.early_stopping_patience = 3};
  const std::size_t whole = evaluations(options, metrics);
  EXPECT_EQ(whole, 5u);
  for (std::size_t saved = 0; saved < whole; ++saved) {
    EarlyStopping first(options), resumed(options);
    for (std::size_t i = 0; i < saved; ++i) first.update(metrics[i]);
    resumed.set_state(early_stopping_from_json(Document(to_json(first.state())).object()));
    EXPECT_EQ(resumed.state(), first.state());
    std::size_t at = saved;
    while (!resumed.update(metrics[at++])) {
    }
    EXPECT_EQ(at, whole) << "saved after " << saved;
  }
}

TEST(EarlyStopping, AWrongStateIsNamed) {
  for (const char* text :
       {"{}", R"({"best_metric": 1})", R"({"best_metric": "x", "early_stopping_patience_counter": 1})",
        R"({"best_metric": 1, "early_stopping_patience_counter": -1})"}) {
    const Document d(nlohmann::json::parse(text));
    const Error e = error_of([&] { early_stopping_from_json(d.object()); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(std::string(e.what()).rfind("state.json: ", 0), 0u) << e.what();
  }
}

TEST(BestMetric, KeepsTheFirstOfTheBestValues) {
  BestMetric best;
  EXPECT_FALSE(best.update(nan, 1, "a"));
  EXPECT_FALSE(best.update(-inf, 2, "b"));
  EXPECT_FALSE(best.value);
  EXPECT_TRUE(best.update(3, 3, "c"));
  EXPECT_FALSE(best.update(3, 4, "d"));
  EXPECT_FALSE(best.update(nan, 5, "e"));
  EXPECT_EQ(best, (BestMetric{false, 3.0, 3, "c"}));
  EXPECT_TRUE(best.update(2.5, 6, "f"));
  EXPECT_EQ(best, (BestMetric{false, 2.5, 6, "f"}));
  BestMetric accuracy{.greater_is_better = true};
  EXPECT_TRUE(accuracy.update(0.5, 1, "a"));
  EXPECT_FALSE(accuracy.update(0.25, 2, "b"));
  EXPECT_TRUE(accuracy.update(0.75, 3, "c"));
}

TEST(BestMetric, IsTheSameAfterJson) {
  BestMetric best{.greater_is_better = true};
  EXPECT_EQ(best_metric_from_json(Document(to_json(best)).object()), best);
  best.update(0.1 + 0.2, 123456789012, "global_step7");
  EXPECT_EQ(best_metric_from_json(Document(to_json(best)).object()), best);
}

TEST(BestMetric, AMissingOrWrongKeyIsNamed) {
  BestMetric best;
  best.update(1, 2, "t");
  for (const char* key : {"best_metric", "best_global_step", "best_model_checkpoint", "greater_is_better"}) {
    nlohmann::json missing = to_json(best), wrong = missing;
    missing.erase(key);
    wrong[key] = nlohmann::json::array();
    for (const auto& j : {missing, wrong}) {
      const Document d(j);
      const Error e = error_of([&] { best_metric_from_json(d.object()); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_EQ(std::string(e.what()).rfind(concat("state.json: ", key, ": "), 0), 0u) << e.what();
    }
  }
}

}  // namespace
}  // namespace rz
