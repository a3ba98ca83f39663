// Direct algorithms: one message per pair of ranks that exchange data, one round. Best where every pair of
// ranks has a link of its own, and for small groups. Each rank visits its peers from the next rank on, which
// spreads the load over receivers. The direct reduce_scatter is half of two_shot and is in two_shot.cpp.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

Schedule linear_all_gather(RankContext context) {
  Schedule s{.chunks = context.size};
  s.steps.push_back(copy(output(context.rank), input(context.rank)));
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(send(rank_at_distance(context, d), input(context.rank)));
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(context, -d)), rank_at_distance(context, -d)));
  return s;
}

Schedule linear_broadcast(RankContext context) {
  if (context.rank != context.root) return {.steps = {recv(output(0), context.root)}};
  Schedule s{.steps = {copy(output(0), input(0))}};
  for (int d = 1; d < context.size; ++d) s.steps.push_back(send(rank_at_distance(context, d), input(0)));
  return s;
}

Schedule linear_reduce(RankContext context) {
  if (context.rank != context.root) return {.steps = {send(context.root, input(0))}};
  return {.steps = {reduce_step(output(0), rank_ordered_operands(context, input(0)), true, context.order)}};
}

Schedule linear_gather(RankContext context) {
  if (context.rank != context.root)
    return {.chunks = context.size, .steps = {send(context.root, input(context.rank))}};
  Schedule s{.chunks = context.size, .steps = {copy(output(context.rank), input(context.rank))}};
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(context, d)), rank_at_distance(context, d)));
  return s;
}

Schedule linear_scatter(RankContext context) {
  if (context.rank != context.root)
    return {.chunks = context.size, .steps = {recv(output(context.rank), context.root)}};
  Schedule s{.chunks = context.size, .steps = {copy(output(context.rank), input(context.rank))}};
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(send(rank_at_distance(context, d), input(rank_at_distance(context, d))));
  return s;
}

}  // namespace rz::schedule
