#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t element, Member m) {
  const std::size_t one = part(count, element, m.size), all = one * m.size;
  return {.send = all, .recv = all, .param = one, .size = all, .extent = all};
}

Work start(const Call& c) { return c.comm.all_to_all(c.input(), c.output(), c.stream); }

std::vector<Piece> expected(const Shape& s, Member m, int) {
  std::vector<Piece> pieces;
  for (int r = 0; r < m.size; ++r) pieces.push_back({r, s.param * m.rank, s.param * r, s.param});
  return pieces;
}

}  // namespace

const Collective alltoall{"alltoall", false, false, false, shape, start, expected, factor_others};

}  // namespace rz::bench
