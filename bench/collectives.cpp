#include "bench/collectives.h"

#include <algorithm>
#include <numeric>

#include "comm/core/error.h"

namespace rz::bench {
namespace {

using CountList = std::vector<std::size_t>;
using ExpectedRanges = std::vector<ExpectedRange>;

// ---- Elements that a rank sends and receives

/// The shard of one rank of `count` elements, rounded down to a multiple of 16 bytes.
std::size_t share_of(std::size_t count, std::size_t element_size, int ranks) {
  return count / static_cast<std::size_t>(ranks) & ~(16 / element_size - 1);
}

ElementCounts send_all_recv_all(std::size_t count, std::size_t, RankInfo) {
  return {
      .send = count, .recv = count, .count_column = count, .size_column = count, .in_place_extent = count};
}

ElementCounts send_share_recv_all(std::size_t count, std::size_t element_size, RankInfo self) {
  const std::size_t share = share_of(count, element_size, self.size), all = share * self.size;
  return {.send = share,
          .recv = all,
          .count_column = share,
          .size_column = all,
          .in_place_in = share * self.rank,
          .in_place_extent = all};
}

ElementCounts send_all_recv_share(std::size_t count, std::size_t element_size, RankInfo self) {
  const std::size_t share = share_of(count, element_size, self.size), all = share * self.size;
  return {.send = all,
          .recv = share,
          .count_column = share,
          .size_column = all,
          .in_place_out = share * self.rank,
          .in_place_extent = all};
}

ElementCounts exchange_shares(std::size_t count, std::size_t element_size, RankInfo self) {
  const std::size_t share = share_of(count, element_size, self.size), all = share * self.size;
  return {.send = all, .recv = all, .count_column = share, .size_column = all, .in_place_extent = all};
}

/// In place, the output follows the input in one buffer, since they must not overlap.
ElementCounts exchange_with_neighbours(std::size_t count, std::size_t, RankInfo) {
  return {.send = count,
          .recv = count,
          .count_column = count,
          .size_column = count,
          .in_place_in = count,
          .in_place_extent = 2 * count};
}

/// For alltoallv: elements from one rank to another. It is one, two or three thirds of a share, so that
/// neighbours differ, and input and output of a rank differ in size.
std::size_t uneven_count(std::size_t share, int from, int to) {
  return share * ((from + 2 * to) % 3 + 1) / 3;
}

CountList uneven_sends(std::size_t share, RankInfo self) {
  CountList counts;
  for (int r = 0; r < self.size; ++r) counts.push_back(uneven_count(share, self.rank, r));
  return counts;
}

CountList uneven_receives(std::size_t share, RankInfo self) {
  CountList counts;
  for (int r = 0; r < self.size; ++r) counts.push_back(uneven_count(share, r, self.rank));
  return counts;
}

std::size_t total_of(const CountList& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

CountList offsets_of(const CountList& counts) {
  CountList offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), std::size_t{0});
  return offsets;
}

/// In place, output and input are separate halves of one buffer, since they must not overlap.
ElementCounts exchange_uneven_shares(std::size_t count, std::size_t element_size, RankInfo self) {
  const std::size_t share = share_of(count, element_size, self.size), all = share * self.size;
  std::size_t max_total = 0;
  for (int r = 0; r < self.size; ++r)
    max_total = std::max({max_total, total_of(uneven_sends(share, {r, self.size})),
                          total_of(uneven_receives(share, {r, self.size}))});
  return {.send = total_of(uneven_sends(share, self)),
          .recv = total_of(uneven_receives(share, self)),
          .count_column = share,
          .size_column = max_total,
          .in_place_in = all,
          .in_place_extent = 2 * all};
}

// ---- Ratio of bus bandwidth to algorithm bandwidth, as derived in PERFORMANCE.md of nccl-tests

double factor_one(int) { return 1; }
/// A rank does not send its own share to itself.
double factor_other_ranks(int ranks) { return static_cast<double>(ranks - 1) / ranks; }
double factor_all_reduce(int ranks) { return 2 * factor_other_ranks(ranks); }

// ---- Expected values

ExpectedRanges expect_reduced(const ElementCounts& c, RankInfo, int) {
  return {{ExpectedRange::reduced, 0, 0, c.recv}};
}
ExpectedRanges expect_reduced_on_root(const ElementCounts& c, RankInfo self, int root) {
  return self.rank == root ? expect_reduced(c, self, root) : ExpectedRanges{};
}
ExpectedRanges expect_reduced_share(const ElementCounts& c, RankInfo self, int) {
  return {{ExpectedRange::reduced, c.recv * self.rank, 0, c.recv}};
}
ExpectedRanges expect_input_of_root(const ElementCounts& c, RankInfo, int root) {
  return {{root, 0, 0, c.recv}};
}
ExpectedRanges expect_share_of_root(const ElementCounts& c, RankInfo self, int root) {
  return {{root, c.recv * self.rank, 0, c.recv}};
}
ExpectedRanges expect_input_of_all(const ElementCounts& c, RankInfo self, int) {
  ExpectedRanges ranges;
  for (int r = 0; r < self.size; ++r) ranges.push_back({r, 0, c.send * r, c.send});
  return ranges;
}
ExpectedRanges expect_input_of_all_on_root(const ElementCounts& c, RankInfo self, int root) {
  return self.rank == root ? expect_input_of_all(c, self, root) : ExpectedRanges{};
}
ExpectedRanges expect_shares_of_all(const ElementCounts& c, RankInfo self, int) {
  ExpectedRanges ranges;
  const std::size_t share = c.count_column;
  for (int r = 0; r < self.size; ++r) ranges.push_back({r, share * self.rank, share * r, share});
  return ranges;
}
ExpectedRanges expect_uneven_shares_of_all(const ElementCounts& c, RankInfo self, int) {
  ExpectedRanges ranges;
  const CountList counts = uneven_receives(c.count_column, self), at = offsets_of(counts);
  for (int r = 0; r < self.size; ++r) {
    const CountList offsets = offsets_of(uneven_sends(c.count_column, {r, self.size}));
    ranges.push_back({r, offsets[static_cast<std::size_t>(self.rank)], at[static_cast<std::size_t>(r)],
                      counts[static_cast<std::size_t>(r)]});
  }
  return ranges;
}
ExpectedRanges expect_input_of_neighbour(const ElementCounts& c, RankInfo self, int) {
  return {{(self.rank + self.size - 1) % self.size, 0, 0, c.recv}};
}

// ---- Calls. Each function works for a communicator, and returns the Work, and for a group, which it
// returns.

constexpr auto call_all_reduce = [](auto& to, const Call& c) -> decltype(auto) {
  if (c.in_place) return to.all_reduce(c.output(), c.op, c.stream);
  return to.all_reduce(c.input(), c.output(), c.op, c.stream);
};
constexpr auto call_reduce_scatter = [](auto& to, const Call& c) -> decltype(auto) {
  return to.reduce_scatter(c.input(), c.output(), c.op, c.stream);
};
constexpr auto call_all_gather = [](auto& to, const Call& c) -> decltype(auto) {
  return to.all_gather(c.input(), c.output(), c.stream);
};
constexpr auto call_broadcast = [](auto& to, const Call& c) -> decltype(auto) {
  if (c.in_place) return to.broadcast(c.output(), c.root, c.stream);
  return to.broadcast(c.input(), c.output(), c.root, c.stream);
};
constexpr auto call_reduce = [](auto& to, const Call& c) -> decltype(auto) {
  return to.reduce(c.input(), c.output(), c.root, c.op, c.stream);
};
constexpr auto call_alltoall = [](auto& to, const Call& c) -> decltype(auto) {
  return to.all_to_all(c.input(), c.output(), c.stream);
};
constexpr auto call_alltoallv = [](auto& to, const Call& c) -> decltype(auto) {
  const RankInfo self{c.comm.rank(), c.comm.size()};
  const CountList sends = uneven_sends(c.counts.count_column, self);
  const CountList receives = uneven_receives(c.counts.count_column, self);
  return to.all_to_all_v(c.input(), sends, offsets_of(sends), c.output(), receives, offsets_of(receives),
                         c.stream);
};
constexpr auto call_scatter = [](auto& to, const Call& c) -> decltype(auto) {
  return to.scatter(c.input(), c.output(), c.root, c.stream);
};
constexpr auto call_gather = [](auto& to, const Call& c) -> decltype(auto) {
  return to.gather(c.input(), c.output(), c.root, c.stream);
};

/// A ring: every rank sends to the next rank and receives from the previous one, in one group.
struct CallSendrecv {
  Group& operator()(Group& group, const Call& c) const {
    const int rank = c.comm.rank(), size = c.comm.size();
    return group.send(c.input(), (rank + 1) % size, c.stream)
        .recv(c.output(), (rank + size - 1) % size, c.stream);
  }
  Work operator()(Communicator& comm, const Call& c) const {
    Group group = comm.group();
    return (*this)(group, c).launch();
  }
};

template <auto call>
Work start_call(const Call& c) {
  return call(c.comm, c);
}
template <auto call>
Group& add_call(Group& group, const Call& c) {
  return call(group, c);
}
template <auto call>
constexpr Collective row(Collective c) {
  c.start = start_call<call>;
  c.add = add_call<call>;
  return c;
}

}  // namespace

std::span<const Collective> collectives() {
  using K = rz::Collective;
  constexpr bool op = true, root = true, in_place = true, none = false;
  // clang-format off
  // Name, kind, op or none, root or none, whether the in-place result is checked;
  // elements, bus-bandwidth factor, expected values.
  static constexpr Collective table[] = {
    row<call_all_reduce>(     {"all_reduce",     K::all_reduce,     op,   none, in_place,
                               send_all_recv_all,        factor_all_reduce,  expect_reduced}),
    row<call_reduce_scatter>( {"reduce_scatter", K::reduce_scatter, op,   none, in_place,
                               send_all_recv_share,      factor_other_ranks, expect_reduced_share}),
    row<call_all_gather>(     {"all_gather",     K::all_gather,     none, none, in_place,
                               send_share_recv_all,      factor_other_ranks, expect_input_of_all}),
    row<call_broadcast>(      {"broadcast",      K::broadcast,      none, root, in_place,
                               send_all_recv_all,        factor_one,         expect_input_of_root}),
    row<call_reduce>(         {"reduce",         K::reduce,         op,   root, in_place,
                               send_all_recv_all,        factor_one,         expect_reduced_on_root}),
    row<call_alltoall>(       {"alltoall",       K::all_to_all,     none, none, none,
                               exchange_shares,          factor_other_ranks, expect_shares_of_all}),
    row<call_alltoallv>(      {"alltoallv",      K::all_to_all_v,   none, none, none,
                               exchange_uneven_shares,   factor_other_ranks, expect_uneven_shares_of_all}),
    row<call_scatter>(        {"scatter",        K::scatter,        none, root, in_place,
                               send_all_recv_share,      factor_other_ranks, expect_share_of_root}),
    row<call_gather>(         {"gather",         K::gather,         none, root, in_place,
                               send_share_recv_all,      factor_other_ranks, expect_input_of_all_on_root}),
    row<CallSendrecv{}>(      {"sendrecv",       K::send,           none, none, none,
                               exchange_with_neighbours, factor_one,         expect_input_of_neighbour}),
  };
  // clang-format on
  return table;
}

const Collective& collective_from_name(std::string_view name) {
  for (const Collective& c : collectives())
    if (c.name == name) return c;
  fail(Errc::config, "no bench for the collective '", name, "'");
}

}  // namespace rz::bench
