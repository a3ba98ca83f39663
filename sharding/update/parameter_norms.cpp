#include "sharding/update/parameter_norms.h"

namespace rz {

std::span<const SquaredNorms> ParameterNorms::measure(const Optimizer& optimizer, UpdateSpans& spans,
                                                      std::span<const MemberUpdate> updates,
                                                      const UpdateScale& scale,
                                                      const std::function<bool(int member)>& filter,
                                                      const Stream& stream) {
  sums_.assign(2 * updates.size(), {});
  for (int b = 0; b < model_.layout().size(); ++b)
    for (const UpdateSpans::Call& call : spans.calls(b, updates, nullptr, filter)) {
      UpdateScale own = scale;
      own.missed = call.missed;
      optimizer.measure(call.spans, own, sums_, stream);
    }
  if (model_.layout().state() == Placement::sharded)
    runtime_.exposed.measure([&] { ExactSum::all_reduce(sums_, words_, runtime_.communicator); });
  norms_.clear();
  for (std::size_t m = 0; m < updates.size(); ++m)
    norms_.push_back({sums_[2 * m].value(), sums_[2 * m + 1].value()});
  return norms_;
}

}  // namespace rz
