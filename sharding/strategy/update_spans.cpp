#include "sharding/strategy/update_spans.h"

#include <algorithm>
#include <utility>

namespace rz {

std::span<const UpdateSpans::Call> UpdateSpans::calls(const Tile& tile, const TileMemory& memory,
                                                      std::span<const MemberUpdate> updates,
                                                      float* directions,
                                                      const std::function<bool(int member)>& filter) {
  runs_ = member_runs(model_.layout().buckets(), tile.bucket, tile.range, updates, std::move(runs_));
  if (filter) std::erase_if(runs_, [&](const MemberRun& run) { return !filter(run.first); });
  std::ranges::sort(runs_, {},
                    [](const MemberRun& run) { return std::pair(run.update.missed, run.range.begin); });
  spans_.clear(), calls_.clear();
  for (const MemberRun& run : runs_) spans_.push_back(span(run, tile, memory, directions));
  for (std::size_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
    const std::int64_t missed = runs_[begin].update.missed;
    while (end < runs_.size() && runs_[end].update.missed == missed) ++end;
    calls_.push_back({std::span(spans_).subspan(begin, end - begin), missed, runs_[begin].first});
  }
  return calls_;
}

UpdateSpan UpdateSpans::span(const MemberRun& run, const Tile& tile, const TileMemory& memory,
                             float* directions) const {
  const std::size_t at = run.range.begin - tile.range.begin,
                    updated = run.range.begin - model_.layout().updated(tile.bucket).begin;
  const Tensor& gradients = model_.gradients().mean(tile.bucket);
  UpdateSpan span;
  span.value = memory.value + at;
  span.gradient = gradients.raw() + updated * size_of(gradients.dtype());
  span.gradient_dtype = gradients.dtype();
  if (memory.working) {
    span.working_dtype = model_.options().precision.parameters;
    span.working = memory.working + at * size_of(span.working_dtype);
  }
  span.count = run.range.count();
  span.group = run.update.group;
  span.member = run.first;
  if (directions) span.direction = directions + run.range.begin;
  for (std::size_t s = 0; s < max_states; ++s) {
    const TileMemory::State& moved = memory.states[s];
    float* const stored = state_.at(s, run.first, run.range.begin);
    span.state[s] = stored && moved.used ? moved.used + (stored - moved.stored) : stored;
  }
  return span;
}

}  // namespace rz
