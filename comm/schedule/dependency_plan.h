#pragma once
/// A Schedule with the dependencies of its steps and the order of steps on each link; input of the executor.

#include <vector>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

/// Steps refer to each other by index. A step may touch byte b of its chunk once each of its dependencies has
/// passed byte b: a reduction when it has written it, a send when the transport has released it. If two steps
/// use one scratch cell for different chunks, the earlier one must have completed (`complete`).
struct DependencyPlan {
  struct Dependency {
    int step;
    bool complete;
  };
  struct PlannedStep {
    Step step;
    std::vector<Dependency> after;
    bool remote = false;  ///< an operand is a message
  };
  Schedule schedule;
  std::vector<PlannedStep> steps;
  /// By peer, in program order: the steps that send to it, and those that receive a message from it.
  std::vector<std::vector<int>> sends, receives;
};

/// Optimization for calls that are not in place: a step that writes a scratch cell, only for it to be copied
/// to the output, writes the output instead. Saves one pass over memory.
void elide_scratch_copies(Schedule&);
/// Pure function. Unless `in_place`, it applies elide_scratch_copies() first.
DependencyPlan make_dependency_plan(Schedule, int size, bool in_place);

}  // namespace rz::schedule
