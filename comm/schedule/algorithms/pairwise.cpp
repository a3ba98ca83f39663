// Pairwise all-to-all: in round t rank r sends to rank r + t and receives from rank r - t, so that every rank
// receives from one peer at a time.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

Schedule pairwise_all_to_all(RankContext context) {
  const auto chunk = [&](int source, int target) { return source * context.size + target; };
  const int self = chunk(context.rank, context.rank);
  Schedule s{.chunks = context.size * context.size, .steps = {copy(output(self), input(self))}};
  for (int t = 1; t < context.size; ++t) {
    const int target = rank_at_distance(context, t), source = rank_at_distance(context, -t);
    s.steps.push_back(send(target, input(chunk(context.rank, target))));
    s.steps.push_back(recv(output(chunk(source, context.rank)), source));
  }
  return s;
}

Schedule pairwise_all_to_all_v(RankContext context) { return pairwise_all_to_all(context); }

}  // namespace rz::schedule
