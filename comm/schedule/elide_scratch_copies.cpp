#include <algorithm>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

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

}  // namespace rz::schedule
