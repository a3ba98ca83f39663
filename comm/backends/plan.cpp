#include "comm/backends/plan.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace rz {

namespace {

// What was done to a piece of memory last.
struct History {
  int writer = -1;
  int writer_chunk = 0;
  std::vector<std::pair<int, int>> readers;  // step, chunk; since the last write
};

class Dependencies {
 public:
  explicit Dependencies(bool in_place) : in_place_(in_place) {}

  void read(int step, Slot slot, std::vector<Plan::Dependency>& after) {
    History& h = history(slot);
    if (h.writer >= 0 && h.writer != step) after.push_back({h.writer, h.writer_chunk != slot.chunk});
    h.readers.emplace_back(step, slot.chunk);
  }

  void write(int step, Slot slot, std::vector<Plan::Dependency>& after) {
    History& h = history(slot);
    if (h.writer >= 0 && h.writer != step) after.push_back({h.writer, h.writer_chunk != slot.chunk});
    for (const auto& [reader, chunk] : h.readers)
      if (reader != step) after.push_back({reader, chunk != slot.chunk});
    h = {step, slot.chunk, {}};
  }

 private:
  History& history(Slot slot) {
    const Region region = in_place_ && slot.region == Region::input ? Region::output : slot.region;
    return memory_[{region, region == Region::scratch ? slot.cell : slot.chunk}];
  }
  bool in_place_;
  std::map<std::pair<Region, int>, History> memory_;
};

bool touches(const Step& step, const auto& is_it) {
  return is_it(step.slot) || std::any_of(step.terms.begin(), step.terms.end(),
                                         [&](const Term& t) { return t.peer < 0 && is_it(t.slot); });
}

// A sum that is made in scratch only so that it overwrites no input, and then copied, is made where it
// belongs if that is other memory: one walk through memory less.
void leave_out_copies(Schedule& schedule) {
  const auto count = [&](const auto& is_it) {
    return std::count_if(schedule.steps.begin(), schedule.steps.end(),
                         [&](const Step& s) { return touches(s, is_it); });
  };
  for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step copy = schedule.steps[i];
    if (copy.kind != Step::combine || copy.terms.size() != 1 || copy.terms[0].peer >= 0) continue;
    const Slot from = copy.terms[0].slot, to = copy.slot;
    const auto same_cell = [&](Slot s) { return s.region == Region::scratch && s.cell == from.cell; };
    const auto same_output = [&](Slot s) { return s.region == Region::output && s.chunk == to.chunk; };
    if (from.region != Region::scratch || to.region != Region::output || copy.final) continue;
    if (count(same_cell) != 2 || count(same_output) != 1) continue;
    const auto maker = std::find_if(schedule.steps.begin(), schedule.steps.end(),
                                    [&](const Step& s) { return s.kind == Step::combine && s.slot == from; });
    if (maker == schedule.steps.end()) continue;
    maker->slot = to;
    schedule.steps.erase(schedule.steps.begin() + static_cast<std::ptrdiff_t>(i--));
  }
}

}  // namespace

Plan make_plan(Schedule schedule, int size, bool in_place) {
  if (!in_place) leave_out_copies(schedule);
  Plan plan;
  plan.sends.resize(static_cast<std::size_t>(size));
  plan.receives.resize(static_cast<std::size_t>(size));
  Dependencies dependencies(in_place);
  for (const Step& step : schedule.steps) {
    const int index = static_cast<int>(plan.steps.size());
    Plan::PlannedStep planned{.step = step, .after = {}};
    if (step.kind == Step::send) {
      dependencies.read(index, step.slot, planned.after);
      plan.sends[static_cast<std::size_t>(step.peer)].push_back(index);
    } else {
      for (const Term& term : step.terms) {
        if (term.peer < 0)
          dependencies.read(index, term.slot, planned.after);
        else
          plan.receives[static_cast<std::size_t>(term.peer)].push_back(index), planned.remote = true;
      }
      dependencies.write(index, step.slot, planned.after);
    }
    plan.steps.push_back(std::move(planned));
  }
  plan.schedule = std::move(schedule);
  return plan;
}

}  // namespace rz
