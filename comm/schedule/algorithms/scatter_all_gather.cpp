// Broadcast of a large buffer: the root scatters it, one chunk to each other rank, and these all_gather the
// chunks among themselves. The root sends the buffer once, independent of the number of ranks, and no rank
// receives a byte twice. After van de Geijn's broadcast; see Thakur, Rabenseifner and Gropp,
// doi:10.1177/1094342005051521. The all_gather is direct instead of a ring, which saves rounds.

#include <algorithm>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

// Chunk c belongs to rank root + c + 1.
int owner(RankContext context, int chunk) { return (context.root + 1 + chunk) % context.size; }

Schedule scatter_chunks(RankContext context, int chunks) {
  Schedule s{.chunks = chunks};
  for (int c = 0; c < chunks; ++c) s.steps.push_back(copy(output(c), input(c)));
  for (int c = 0; c < context.size - 1; ++c) s.steps.push_back(send(owner(context, c), input(c)));
  return s;
}

}  // namespace

Schedule scatter_all_gather_broadcast(RankContext context) {
  const int chunks = std::max(1, context.size - 1);
  if (context.rank == context.root) return scatter_chunks(context, chunks);
  const int own = (context.rank - context.root - 1 + context.size) % context.size;
  Schedule s{.chunks = chunks, .steps = {recv(output(own), context.root)}};
  for (int d = 1; d < chunks; ++d) s.steps.push_back(send(owner(context, (own + d) % chunks), output(own)));
  for (int d = 1; d < chunks; ++d) {
    const int chunk = (own - d + chunks) % chunks;
    s.steps.push_back(recv(output(chunk), owner(context, chunk)));
  }
  return s;
}

}  // namespace rz::schedule
