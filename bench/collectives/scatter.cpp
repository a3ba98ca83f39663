#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t element, Member m) {
  const std::size_t own = part(count, element, m.size), all = own * m.size;
  return {.send = all, .recv = own, .param = own, .size = all, .in_place_out = own * m.rank, .extent = all};
}

Work start(const Call& c) { return c.comm.scatter(c.input(), c.output(), c.root, c.stream); }

std::vector<Piece> expected(const Shape& s, Member m, int root) {
  return {{root, s.recv * m.rank, 0, s.recv}};
}

}  // namespace

const Collective scatter{"scatter", false, true, true, shape, start, expected, factor_others};

}  // namespace rz::bench
