// plan: memory and traffic of a training run before it starts. See --help.
#include <cstdio>

#include "comm/core/error.h"
#include "tools/command_line/command_line.h"
#include "tools/plan/options.h"
#include "tools/plan/report.h"

namespace rz::plan {
namespace {

Findings find(const Options& o) {
  Findings f{.memory = o.memory};
  for (const int ranks : o.ranks) {
    f.runs.push_back(plan_at(o, ranks));
    f.alternatives.push_back(alternatives(o, ranks));
    f.meshes.push_back(meshes(o, f.runs.back()));
    if (o.memory) f.micro_batches.push_back(largest_micro_batch(o, ranks, *o.memory));
  }
  const lm::Inputs in = lm::read_model_inputs(o.run, o.ranks[0], ranks_per_node(o, o.ranks[0]));
  for (const std::string& warning : in.ds.warnings)
    std::fprintf(stderr, "plan: warning: %s\n", warning.c_str());
  f.model = lm::describe_model(*in.model);
  return f;
}

/// All errors before a plan is made are of the inputs.
Findings find_in_inputs(const Options& o) {
  try {
    return find(o);
  } catch (const Error& e) {
    if (e.code() == Errc::system) throw;
    fail(Errc::config, e.what());
  }
}

int run(const Options& o) {
  const Findings f = find_in_inputs(o);
  std::fputs((o.json ? json(f) : table(f)).c_str(), stdout);
  return fits(f) ? 0 : 1;
}

}  // namespace
}  // namespace rz::plan

int main(int argc, char** argv) {
  const auto parse = [&] { return rz::plan::parse_options(argc, argv); };
  return rz::run_program("plan", parse, rz::plan::run);
}
