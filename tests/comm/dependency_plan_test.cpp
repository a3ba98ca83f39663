// Runs: pure

// Construction of a dependency plan.

#include "comm/schedule/dependency_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/schedule/algorithms/algorithm.h"

namespace rz {
namespace {

schedule::DependencyPlan plan_of(const char* algorithm, bool in_place) {
  return schedule::make_dependency_plan(
      schedule::find_algorithm(Collective::all_reduce, algorithm).schedule({1, 3, 0}), 3, in_place);
}

bool uses_scratch(const schedule::DependencyPlan& plan) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [](const auto& s) { return s.step.chunk.region == schedule::Region::scratch; });
}

// In place the sum must not overwrite data that peers have not read yet; otherwise it needs no copy.
TEST(DependencyPlan, ASumGoesStraightToTheOutputUnlessThatIsTheInput) {
  const schedule::DependencyPlan apart = plan_of("one_shot", false), in_place = plan_of("one_shot", true);
  EXPECT_EQ(apart.steps.size() + 1, in_place.steps.size());
  EXPECT_FALSE(uses_scratch(apart));
  EXPECT_TRUE(uses_scratch(in_place));
  const schedule::Step& sum = apart.steps.back().step;
  EXPECT_EQ(sum.chunk, schedule::output(0));
  EXPECT_EQ(sum.operands.size(), 3u);
  EXPECT_TRUE(sum.final);
  EXPECT_TRUE(apart.steps.back().after.empty()) << "no step reads what it writes";
  for (int peer : {0, 2}) EXPECT_EQ(apart.receives[static_cast<std::size_t>(peer)].size(), 1u);
}

TEST(DependencyPlan, OtherStepsAreKept) {
  for (const char* name : {"two_shot", "ring", "tree", "chain", "halving_doubling"}) {
    const schedule::Schedule schedule =
        schedule::find_algorithm(Collective::all_reduce, name).schedule({1, 3, 0});
    EXPECT_EQ(plan_of(name, false).steps.size(), schedule.steps.size()) << name;
  }
}

}  // namespace
}  // namespace rz
