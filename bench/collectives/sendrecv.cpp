// A ring: every rank sends to the next and receives from the one before, in one group.
#include "bench/collective.h"

namespace rz::bench {
namespace {

/// In place means that both lie in one buffer, one behind the other: they cannot overlap.
Shape shape(std::size_t count, std::size_t, Member) {
  return {
      .send = count, .recv = count, .param = count, .size = count, .in_place_in = count, .extent = 2 * count};
}

Group& add(Group& group, const Call& c) {
  const int rank = c.comm.rank(), size = c.comm.size();
  return group.send(c.input(), (rank + 1) % size, c.stream)
      .recv(c.output(), (rank + size - 1) % size, c.stream);
}

Work start(const Call& c) {
  Group group = c.comm.group();
  return add(group, c).launch();
}

std::vector<Piece> expected(const Shape& s, Member m, int) {
  return {{(m.rank + m.size - 1) % m.size, 0, 0, s.recv}};
}

}  // namespace

const Collective sendrecv{"sendrecv", false, false, false, shape, start, add, expected, factor_one};

}  // namespace rz::bench
