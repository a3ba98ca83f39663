// Broadcast of a large buffer: the root hands each other rank one chunk, and those exchange chunks among
// themselves. The root sends the buffer once however many ranks there are, and nobody receives anything
// twice. After van de Geijn's broadcast; see Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521.
// The exchange is direct and not a ring, which spares the rounds.

#include <algorithm>

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

// Chunk c belongs to the rank c + 1 places after the root.
int owner(RankContext seat, int chunk) { return (seat.root + 1 + chunk) % seat.size; }

Schedule scatter_chunks(RankContext seat, int chunks) {
  Schedule s{.chunks = chunks};
  for (int c = 0; c < chunks; ++c) s.steps.push_back(copy(output(c), input(c)));
  for (int c = 0; c < seat.size - 1; ++c) s.steps.push_back(send(owner(seat, c), input(c)));
  return s;
}

}  // namespace

Schedule scatter_all_gather_broadcast(RankContext seat) {
  const int chunks = std::max(1, seat.size - 1);
  if (seat.rank == seat.root) return scatter_chunks(seat, chunks);
  const int own = (seat.rank - seat.root - 1 + seat.size) % seat.size;
  Schedule s{.chunks = chunks, .steps = {recv(output(own), seat.root)}};
  for (int d = 1; d < chunks; ++d) s.steps.push_back(send(owner(seat, (own + d) % chunks), output(own)));
  for (int d = 1; d < chunks; ++d) {
    const int chunk = (own - d + chunks) % chunks;
    s.steps.push_back(recv(output(chunk), owner(seat, chunk)));
  }
  return s;
}

}  // namespace rz
