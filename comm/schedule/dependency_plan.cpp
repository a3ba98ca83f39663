#include "comm/schedule/dependency_plan.h"

#include <algorithm>
#include <map>

namespace rz::schedule {

namespace {

// The last accesses to the memory of one chunk.
struct History {
  int writer = -1;
  int writer_chunk = 0;
  std::vector<std::pair<int, int>> readers;  // step, chunk; since the last write
};

class Dependencies {
 public:
  explicit Dependencies(bool in_place) : in_place_(in_place) {}

  void read(int step, ChunkRef ref, std::vector<DependencyPlan::Dependency>& after) {
    History& h = history(ref);
    if (h.writer >= 0 && h.writer != step) after.push_back({h.writer, h.writer_chunk != ref.number});
    h.readers.emplace_back(step, ref.number);
  }

  void write(int step, ChunkRef ref, std::vector<DependencyPlan::Dependency>& after) {
    History& h = history(ref);
    if (h.writer >= 0 && h.writer != step) after.push_back({h.writer, h.writer_chunk != ref.number});
    for (const auto& [reader, chunk] : h.readers)
      if (reader != step) after.push_back({reader, chunk != ref.number});
    h = {step, ref.number, {}};
  }

 private:
  History& history(ChunkRef ref) {
    const Region region = in_place_ && ref.region == Region::input ? Region::output : ref.region;
    return memory_[{region, region == Region::scratch ? ref.cell : ref.number}];
  }
  bool in_place_;
  std::map<std::pair<Region, int>, History> memory_;
};

bool touches(const Step& step, const auto& is_it) {
  return is_it(step.chunk) || std::any_of(step.operands.begin(), step.operands.end(),
                                          [&](const Operand& t) { return t.peer < 0 && is_it(t.chunk); });
}

}  // namespace

// Applies to a scratch cell with exactly two accesses, a reduction and a copy, whose output chunk no other
// step touches.
void elide_scratch_copies(Schedule& schedule) {
  const auto count = [&](const auto& is_it) {
    return std::count_if(schedule.steps.begin(), schedule.steps.end(),
                         [&](const Step& s) { return touches(s, is_it); });
  };
  for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step copy = schedule.steps[i];
    if (copy.kind != Step::reduce || copy.operands.size() != 1 || copy.operands[0].peer >= 0) continue;
    const ChunkRef from = copy.operands[0].chunk, to = copy.chunk;
    const auto same_cell = [&](ChunkRef s) { return s.region == Region::scratch && s.cell == from.cell; };
    const auto same_output = [&](ChunkRef s) { return s.region == Region::output && s.number == to.number; };
    if (from.region != Region::scratch || to.region != Region::output || copy.final) continue;
    if (count(same_cell) != 2 || count(same_output) != 1) continue;
    const auto maker = std::find_if(schedule.steps.begin(), schedule.steps.end(),
                                    [&](const Step& s) { return s.kind == Step::reduce && s.chunk == from; });
    if (maker == schedule.steps.end()) continue;
    maker->chunk = to;
    schedule.steps.erase(schedule.steps.begin() + static_cast<std::ptrdiff_t>(i--));
  }
}

DependencyPlan make_dependency_plan(Schedule schedule, int size, bool in_place) {
  if (!in_place) elide_scratch_copies(schedule);
  DependencyPlan plan;
  plan.sends.resize(static_cast<std::size_t>(size));
  plan.receives.resize(static_cast<std::size_t>(size));
  Dependencies dependencies(in_place);
  for (const Step& step : schedule.steps) {
    const int index = static_cast<int>(plan.steps.size());
    DependencyPlan::PlannedStep planned{.step = step, .after = {}};
    if (step.kind == Step::send) {
      dependencies.read(index, step.chunk, planned.after);
      plan.sends[static_cast<std::size_t>(step.peer)].push_back(index);
    } else {
      for (const Operand& term : step.operands) {
        if (term.peer < 0)
          dependencies.read(index, term.chunk, planned.after);
        else
          plan.receives[static_cast<std::size_t>(term.peer)].push_back(index), planned.remote = true;
      }
      dependencies.write(index, step.chunk, planned.after);
    }
    plan.steps.push_back(std::move(planned));
  }
  plan.schedule = std::move(schedule);
  return plan;
}

}  // namespace rz::schedule
