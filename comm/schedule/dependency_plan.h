#pragma once
/// A Schedule made ready to run: who waits for whom, and in which order each link is used.

#include <vector>

#include "comm/schedule/schedule.h"

namespace rz {

/// Steps refer to each other by index. A step may touch byte b of its slot once each of its dependencies has
/// passed byte b: a combination when it has written it, a send when its memory is released. Where two
/// steps meet in a cell of scratch with different chunks, the earlier one has to be complete (`whole`).
struct DependencyPlan {
  struct Dependency {
    int step;
    bool complete;
  };
  struct PlannedStep {
    Step step;
    std::vector<Dependency> after;
    bool remote = false;  ///< has a term of a peer
  };
  Schedule schedule;
  std::vector<PlannedStep> steps;
  /// By peer, in program order: the steps that send to it, and those that take a message of it.
  std::vector<std::vector<int>> sends, receives;
};

/// Out of place, of the schedule after elide_scratch_copies().
DependencyPlan make_dependency_plan(Schedule, int size, bool in_place);

}  // namespace rz
