#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t, Member) {
  return {.send = count, .recv = count, .param = count, .size = count, .extent = count};
}

Work start(const Call& c) { return c.comm.reduce(c.input(), c.output(), c.root, c.op, c.stream); }

std::vector<Piece> expected(const Shape& s, Member m, int root) {
  if (m.rank != root) return {};
  return {{Piece::combined, 0, 0, s.recv}};
}

}  // namespace

const Collective reduce{"reduce", true, true, true, shape, start, expected, factor_one};

}  // namespace rz::bench
