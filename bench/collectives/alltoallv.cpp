// An uneven exchange: rank s sends rank d one, two or three thirds of a full part, so that every pair of
// neighbours differs and a rank's whole input differs from its whole output.
#include <algorithm>
#include <numeric>

#include "bench/collective.h"

namespace rz::bench {
namespace {

std::size_t between(std::size_t full, int from, int to) { return full * ((from + 2 * to) % 3 + 1) / 3; }

std::vector<std::size_t> sends(std::size_t full, Member m) {
  std::vector<std::size_t> counts;
  for (int r = 0; r < m.size; ++r) counts.push_back(between(full, m.rank, r));
  return counts;
}

std::vector<std::size_t> receives(std::size_t full, Member m) {
  std::vector<std::size_t> counts;
  for (int r = 0; r < m.size; ++r) counts.push_back(between(full, r, m.rank));
  return counts;
}

std::size_t total(const std::vector<std::size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::vector<std::size_t> offsets(const std::vector<std::size_t>& counts) {
  std::vector<std::size_t> at(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), at.begin(), std::size_t{0});
  return at;
}

/// In place means that both lie in one buffer, one behind the other: they cannot overlap.
Shape shape(std::size_t count, std::size_t element, Member m) {
  const std::size_t full = part(count, element, m.size);
  std::size_t most = 0;
  for (int r = 0; r < m.size; ++r)
    most = std::max({most, total(sends(full, {r, m.size})), total(receives(full, {r, m.size}))});
  return {.send = total(sends(full, m)),
          .recv = total(receives(full, m)),
          .param = full,
          .size = most,
          .in_place_in = full * m.size,
          .extent = 2 * full * m.size};
}

template <class To>
decltype(auto) put(To& to, const Call& c) {
  const Member m{c.comm.rank(), c.comm.size()};
  const auto out = sends(c.shape.param, m), in = receives(c.shape.param, m);
  return to.all_to_all_v(c.input(), out, offsets(out), c.output(), in, offsets(in), c.stream);
}

Work start(const Call& c) { return put(c.comm, c); }
Group& add(Group& group, const Call& c) { return put(group, c); }

std::vector<Piece> expected(const Shape& s, Member m, int) {
  std::vector<Piece> pieces;
  const auto counts = receives(s.param, m), at = offsets(counts);
  for (int r = 0; r < m.size; ++r)
    pieces.push_back({r, offsets(sends(s.param, {r, m.size}))[m.rank], at[r], counts[r]});
  return pieces;
}

}  // namespace

const Collective alltoallv{"alltoallv", false, false, false, shape, start, add, expected, factor_others};

}  // namespace rz::bench
