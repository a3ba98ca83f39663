#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t, Member) {
  return {.send = count, .recv = count, .param = count, .size = count, .extent = count};
}

Work start(const Call& c) {
  if (c.in_place) return c.comm.broadcast(c.output(), c.root, c.stream);
  return c.comm.broadcast(c.input(), c.output(), c.root, c.stream);
}

std::vector<Piece> expected(const Shape& s, Member, int root) { return {{root, 0, 0, s.recv}}; }

}  // namespace

const Collective broadcast{"broadcast", false, true, true, shape, start, expected, factor_one};

}  // namespace rz::bench
