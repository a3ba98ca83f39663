#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t element, Member m) {
  const std::size_t one = part(count, element, m.size), all = one * m.size;
  return {.send = all, .recv = all, .param = one, .size = all, .extent = all};
}

template <class To>
decltype(auto) put(To& to, const Call& c) {
  return to.all_to_all(c.input(), c.output(), c.stream);
}

Work start(const Call& c) { return put(c.comm, c); }
Group& add(Group& group, const Call& c) { return put(group, c); }

std::vector<Piece> expected(const Shape& s, Member m, int) {
  std::vector<Piece> pieces;
  for (int r = 0; r < m.size; ++r) pieces.push_back({r, s.param * m.rank, s.param * r, s.param});
  return pieces;
}

}  // namespace

const Collective alltoall{"alltoall", false, false, false, shape, start, add, expected, factor_others};

}  // namespace rz::bench
