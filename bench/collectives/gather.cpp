#include "bench/collective.h"

namespace rz::bench {
namespace {

Shape shape(std::size_t count, std::size_t element, Member m) {
  const std::size_t own = part(count, element, m.size), all = own * m.size;
  return {.send = own, .recv = all, .param = own, .size = all, .in_place_in = own * m.rank, .extent = all};
}

template <class To>
decltype(auto) put(To& to, const Call& c) {
  return to.gather(c.input(), c.output(), c.root, c.stream);
}

Work start(const Call& c) { return put(c.comm, c); }
Group& add(Group& group, const Call& c) { return put(group, c); }

std::vector<Piece> expected(const Shape& s, Member m, int root) {
  if (m.rank != root) return {};
  return all_gather.expected(s, m, root);
}

}  // namespace

const Collective gather{"gather", false, true, true, shape, start, add, expected, factor_others};

}  // namespace rz::bench
