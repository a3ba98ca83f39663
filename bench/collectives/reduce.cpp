#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t, Member) {
  return {.send = count, .recv = count, .param = count, .size = count, .extent = count};
}

template <class To>
decltype(auto) put(To& to, const Call& c) {
  return to.reduce(c.input(), c.output(), c.root, c.op, c.stream);
}

Work start(const Call& c) { return put(c.comm, c); }
Group& add(Group& group, const Call& c) { return put(group, c); }

std::vector<Piece> expected(const Shape& s, Member m, int root) {
  if (m.rank != root) return {};
  return {{Piece::combined, 0, 0, s.recv}};
}

}  // namespace

const Collective reduce{"reduce", true, true, true, shape, start, add, expected, factor_one};

}  // namespace rz::bench
