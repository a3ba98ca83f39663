#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t, Member) {
  return {.send = count, .recv = count, .param = count, .size = count, .extent = count};
}

template <class To>
decltype(auto) put(To& to, const Call& c) {
  if (c.in_place) return to.all_reduce(c.output(), c.op, c.stream);
  return to.all_reduce(c.input(), c.output(), c.op, c.stream);
}

Work start(const Call& c) { return put(c.comm, c); }
Group& add(Group& group, const Call& c) { return put(group, c); }

std::vector<Piece> expected(const Shape& s, Member, int) { return {{Piece::combined, 0, 0, s.recv}}; }

/// Every rank sends and receives (n-1)/n of the data twice.
double busbw_factor(int n) { return 2 * factor_others(n); }

}  // namespace

const Collective all_reduce{"all_reduce", true, false, true, shape, start, add, expected, busbw_factor};

}  // namespace rz::bench
