#pragma once
/// What doctor finds, and what it prints.

#include <span>
#include <string>
#include <vector>

#include "tools/doctor/checks.h"
#include "tools/doctor/options.h"

namespace rz::doctor {

struct Report {
  int ranks = 1, nodes = 1;
  std::vector<NamedFacts> facts;
  std::vector<PairMeasurement> pairs;
  std::vector<Finding> findings;
};

// Reads the facts of all hosts, measures, and judges.
Report diagnose_this_host(const Options&);
/// A host that cannot be reached is a finding, and so is a pair that cannot be measured.
Report diagnose_hosts(const Options&);

/// Whether a job would run: nothing is missing.
bool runs(const Report&);
/// A line for each finding, under its host; below it the remedy; last the result in one line.
std::string table(const Report&);
std::string json(const Report&);

}  // namespace rz::doctor
