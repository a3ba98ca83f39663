#include "sharding/update/update_spans.h"

#include <algorithm>
#include <utility>

namespace rz {

std::span<const UpdateSpans::Call> UpdateSpans::calls(int bucket, std::span<const MemberUpdate> updates,
                                                      float* directions,
                                                      const std::function<bool(int member)>& filter) {
  const FlatLayout& layout = model_.layout();
  runs_ = member_runs(layout.buckets(), bucket, layout.updated(bucket), updates, std::move(runs_));
  if (filter) std::erase_if(runs_, [&](const MemberRun& run) { return !filter(run.first); });
  std::ranges::sort(runs_, {},
                    [](const MemberRun& run) { return std::pair(run.update.missed, run.range.begin); });
  spans_.clear(), calls_.clear();
  for (const MemberRun& run : runs_) spans_.push_back(span(run, bucket, directions));
  for (std::size_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
    const std::int64_t missed = runs_[begin].update.missed;
    while (end < runs_.size() && runs_[end].update.missed == missed) ++end;
    calls_.push_back({std::span(spans_).subspan(begin, end - begin), missed, runs_[begin].first});
  }
  return calls_;
}

UpdateSpan UpdateSpans::span(const MemberRun& run, int bucket, float* directions) const {
  const std::size_t at = run.range.begin - model_.layout().updated(bucket).begin;
  const Tensor values = model_.updated_f32(bucket), &gradients = model_.gradients().mean(bucket);
  UpdateSpan span;
  span.value = values.data<float>() + at;
  span.gradient = gradients.raw() + at * size_of(gradients.dtype());
  span.gradient_dtype = gradients.dtype();
  if (model_.options().precision.mixed()) {
    const Tensor working = model_.values().updated(bucket);
    span.working = working.raw() + at * size_of(working.dtype());
    span.working_dtype = working.dtype();
  }
  span.count = run.range.count();
  span.group = run.update.group;
  span.member = run.first;
  if (directions) span.direction = directions + run.range.begin;
  for (std::size_t s = 0; s < max_states; ++s) span.state[s] = state_.at(s, run.first, run.range.begin);
  return span;
}

}  // namespace rz
