#pragma once
/// What doctor prints.

#include <span>
#include <string>
#include <vector>

#include "tools/doctor/checks.h"

namespace rz::doctor {

struct Report {
  int ranks = 1, nodes = 1;
  std::vector<NamedFacts> facts;
  std::vector<PairMeasurement> pairs;
  std::vector<Finding> findings;
};

/// Whether a job would run: nothing is missing.
bool runs(const Report&);
/// A line for each finding, under its host; below it the remedy; last the result in one line.
std::string table(const Report&);
std::string json(const Report&);

}  // namespace rz::doctor
